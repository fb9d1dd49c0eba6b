"""Trees: from nested containers to leaves with paths, and back.

A path is a tuple: the role, then the keys. Dicts are taken apart always, lists and tuples only where they hold tensors; any other
subtree without tensors is one value. What a path was besides a dict is kept as a node.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import Unsupported
from .format import values
from .format.names import Key, dotted, key_part

Path = tuple[Any, ...]
Put = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or a value at its place in a tree."""

    path: Path
    value: Any
    put: Put | None = None
    """How to put another value there. A tensor without it is filled in place; a value without it cannot be changed."""

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def walk(value: Any, path: Path, nodes: list[tuple[Path, str]], put: Put | None = None) -> Iterator[Leaf]:
    """The leaves of `value`, in order; containers other than dicts are added to `nodes`.

    Args:
        put: how to replace `value` itself where it is held.
    Raises:
        Unsupported: an object that can neither be taken apart nor stored.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield Leaf(path, value)
    elif isinstance(value, torch.Generator):
        nodes.append((path, "generator"))
        yield Leaf(path, value.get_state(), _generator_setter(value))
    elif isinstance(value, np.ndarray):
        nodes.append((path, "ndarray"))
        yield _array_leaf(path, value, put)
    elif isinstance(value, Mapping):
        if not value:
            yield Leaf(path, value if kind in (dict, OrderedDict) else dict(value), put)
        elif kind is OrderedDict:
            nodes.append((path, "odict"))
        for key, child in value.items():
            part = key_part(values.encode(key, f"a key of {dotted(path)}"))
            yield from walk(child, (*path, part), nodes, _item_setter(value, key))
    elif kind in (list, tuple) and holds_tensors(value):
        nodes.append((path, kind.__name__))
        current = list(value)
        for number, child in enumerate(value):
            inner = _item_setter(value, number) if kind is list else _tuple_setter(current, number, put)
            yield from walk(child, (*path, number), nodes, inner)
    elif isinstance(value, tuple) and kind is not tuple and holds_tensors(value):
        raise Unsupported(f"{dotted(path)} is a {kind.__qualname__} with tensors in it; hold it as a dict")
    elif isinstance(value, np.random.Generator):  # whoever shares the generator must see its new state
        yield Leaf(path, value, lambda new: setattr(value.bit_generator, "state", new.bit_generator.state))
    else:
        yield Leaf(path, value, put)


def build(leaves: Mapping[Path, Any], nodes: Mapping[Path, str], root: Path) -> Any:
    """The tree below `root` from its leaves: tensors and values by path. Inverse of `walk`."""
    if root in leaves:
        return _rebuilt(leaves[root], nodes.get(root))
    children: dict[Any, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        children.setdefault(path[len(root)], {})[path] = leaf
    node = nodes.get(root)
    built = {key: build(part, nodes, (*root, key)) for key, part in children.items()}
    if node in ("list", "tuple"):
        ordered = [built[number] for number in sorted(built)]
        return ordered if node == "list" else tuple(ordered)
    mapping = {values.decode(json.loads(k.text)) if isinstance(k, Key) else k: v for k, v in built.items()}
    return OrderedDict(mapping) if node == "odict" else mapping


def holds_tensors(value: Any) -> bool:
    """Whether there are tensors, arrays or generators anywhere in a container."""
    if isinstance(value, (torch.Tensor, torch.Generator, np.ndarray)):
        return True
    if isinstance(value, Mapping):
        return any(map(holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_tensors, value))


def _rebuilt(value: Any, node: str | None) -> Any:
    if node == "ndarray":
        return value.numpy()
    if node == "generator":
        generator = torch.Generator()
        generator.set_state(value)
        return generator
    return value


def _item_setter(holder: Any, key: Any) -> Put:
    return lambda value: holder.__setitem__(key, value)


def _tuple_setter(current: list[Any], number: int, put: Put | None) -> Put | None:
    """Replacing an item of a tuple replaces the tuple, where that can be."""
    if put is None:
        return None

    def replace(value: Any) -> None:
        current[number] = value
        put(tuple(current))

    return replace


def _generator_setter(generator: torch.Generator) -> Put:
    def replace(state: torch.Tensor) -> None:
        generator.set_state(state)

    return replace


def _array_leaf(path: Path, array: np.ndarray, put: Put | None) -> Leaf:
    """An array as a tensor that shares its memory; where torch cannot, as a copy that is put back."""
    native = array.dtype.newbyteorder("=")
    try:
        if array.dtype == native and array.flags.writeable:
            return Leaf(path, torch.from_numpy(array))
    except (TypeError, ValueError):  # negative strides, or a dtype that torch lacks
        pass
    try:
        copied = torch.from_numpy(np.array(array, native, order="C"))
    except TypeError:
        raise Unsupported(f"{dotted(path)} is a numpy array of {array.dtype}, which has no stored form; convert it") from None
    if array.flags.writeable:
        return Leaf(path, copied, lambda tensor: np.copyto(array, tensor.numpy()))
    return Leaf(path, copied, (lambda tensor: put(tensor.numpy())) if put is not None else None)


def _numpy_generator(state: dict[str, Any]) -> np.random.Generator:
    allowed = {
        c.__name__: c for c in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
    }
    if state.get("bit_generator") not in allowed:
        raise Unsupported(f"a numpy generator of {state.get('bit_generator')} cannot be made here")
    bits = allowed[state["bit_generator"]]()
    bits.state = state  # type: ignore[assignment]
    return np.random.Generator(bits)


def _plain_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain_state(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"torch.{name} is no dtype in torch {torch.__version__}")
    return found


values.register(np.random.Generator, "numpy.Generator", lambda g: _plain_state(g.bit_generator.state), _numpy_generator)
values.register(torch.dtype, "torch.dtype", lambda d: str(d).removeprefix("torch."), _torch_dtype)
values.register(torch.Size, "torch.Size", list, torch.Size)
values.register(torch.device, "torch.device", str, torch.device)
