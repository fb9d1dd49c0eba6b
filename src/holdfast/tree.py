"""Trees: from nested containers to leaves with paths, and back.

A path is a tuple: the role, then the keys as typed JSON. Dicts are taken apart always, lists and tuples only where they hold
tensors; any other subtree without tensors is one value. What a path was besides a dict is kept as a node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import Unsupported
from .format import values
from .format.names import dotted

Path = tuple[Any, ...]
NODES = ("list", "tuple", "odict", "ndarray", "generator")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or a value at its place in a tree."""

    path: Path
    value: Any
    node: str | None = None
    """What the tensor stands for if not itself: an ndarray, a generator."""
    holder: Any = None
    """The dict or list that holds it, and under which key: for putting another value there."""
    key: Any = None

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.value, torch.Tensor)


def walk(value: Any, path: Path, nodes: list[tuple[Path, str]], holder: Any = None, key: Any = None) -> Iterator[Leaf]:
    """The leaves of `value`, in order; containers other than dicts are added to `nodes`.

    Raises:
        Unsupported: an object that can neither be taken apart nor stored.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield Leaf(path, value, None, holder, key)
    elif isinstance(value, torch.Generator):
        nodes.append((path, "generator"))
        yield Leaf(path, value.get_state(), "generator", holder, key)
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject or value.dtype.kind not in "biufc":
            raise Unsupported(f"{dotted(path)} is a numpy array of {value.dtype}; hold numbers, or a list of strings")
        nodes.append((path, "ndarray"))
        yield Leaf(path, torch.from_numpy(value if value.flags.writeable else value.copy()), "ndarray", holder, key)
    elif isinstance(value, Mapping):
        if not value:
            yield Leaf(path, dict(value) if kind is not dict else value, None, holder, key)
        if kind is OrderedDict:
            nodes.append((path, "odict"))
        for child_key, child in value.items():
            part = child_key if isinstance(child_key, str) else values.encode(child_key, f"a key of {dotted(path)}")
            yield from walk(child, (*path, part), nodes, value, child_key)
    elif kind in (list, tuple) and _holds_tensors(value):
        nodes.append((path, kind.__name__))
        for number, child in enumerate(value):
            yield from walk(child, (*path, number), nodes, value if kind is list else None, number)
    elif isinstance(value, tuple) and kind is not tuple and _holds_tensors(value):
        raise Unsupported(f"{dotted(path)} is a {kind.__qualname__} with tensors in it; hold it as a dict")
    else:
        yield Leaf(path, value, None, holder, key)


def build(leaves: Mapping[Path, Any], nodes: Mapping[Path, str], root: Path) -> Any:
    """The tree below `root` from its leaves: tensors and values by path. Inverse of `walk`."""
    if root in leaves:
        return _leaf(leaves[root], nodes.get(root))
    children: dict[Any, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        if path[: len(root)] == root and len(path) > len(root):
            children.setdefault(_hashable(path[len(root)]), {})[path] = leaf
    node = nodes.get(root)
    items = [(next(iter(part))[len(root)], part) for part in children.values()]
    built = [(key, build(part, nodes, (*root, key))) for key, part in items]
    if node in ("list", "tuple"):
        ordered = [value for _, value in sorted(built, key=lambda item: item[0])]
        return ordered if node == "list" else tuple(ordered)
    mapping = {values.decode(key): value for key, value in built}
    return OrderedDict(mapping) if node == "odict" else mapping


def _leaf(value: Any, node: str | None) -> Any:
    if node == "ndarray":
        return value.numpy()
    if node == "generator":
        generator = torch.Generator()
        generator.set_state(value)
        return generator
    return value


def _numpy_generator(state: dict[str, Any]) -> np.random.Generator:
    allowed = {
        c.__name__: c
        for c in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
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


def _hashable(part: Any) -> Any:
    return part if isinstance(part, (str, int, float, bool, type(None))) else repr(part)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, torch.Generator, np.ndarray)):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensors, value))


def setter(leaf: Leaf) -> Callable[[Any], None] | None:
    """How to put another value in the leaf's place, or None where nothing can."""
    if isinstance(leaf.value, np.random.Generator):  # whoever shares the generator must see its new state
        return lambda value: setattr(leaf.value.bit_generator, "state", value.bit_generator.state)
    if leaf.holder is None:
        return None
    return lambda value: leaf.holder.__setitem__(leaf.key, value)


values.register(torch.dtype, "torch.dtype", lambda d: str(d).removeprefix("torch."), lambda name: _torch_dtype(name))
values.register(torch.Size, "torch.Size", list, torch.Size)
values.register(
    np.random.Generator, "numpy.Generator", lambda g: _plain_state(g.bit_generator.state), lambda s: _numpy_generator(s)
)
values.register(torch.device, "torch.device", str, torch.device)


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"torch.{name} is no dtype in torch {torch.__version__}")
    return found
