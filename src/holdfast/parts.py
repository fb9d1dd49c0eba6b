"""Parts of a state: how modules, optimizers, random generators, objects with a state dict, and plain containers are taken apart.

Each function adds one part to a `Live`. Names never show a wrapper: `_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`,
`_fsdp_wrapped_module.` are left out, so that a compiled or wrapped model loads what the plain one saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from .errors import Refused, Unsupported
from .format.names import dotted
from .live import Live, LiveTensor, LiveValue
from .tree import Leaf, Path

_PRIVATE_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_EXTRA = "_extra_state"


def add_part(live: Live, role: str, part: Any, holder: Any, number: int, owners: dict[int, str], *, to_fill: bool = False) -> int:
    """Add one part of a role; returns how many parameter groups it took.

    Args:
        holder: the container that `part` is held in under `role`, where a plain value can be replaced; else None.
        number: parameter groups that earlier parts of this role took.
        owners: logical names of parameters by `id`.
        to_fill: the state is about to be loaded: objects are not asked for theirs, which makes a data loader start workers.
    """
    if isinstance(part, torch.nn.Module):
        live.roles[role] = "module"
        _add_module(live, role, part)
    elif isinstance(part, torch.optim.Optimizer):
        live.roles[role] = "optimizer"
        return _add_optimizer(live, role, part, number, owners)
    elif isinstance(part, torch.Generator):
        live.roles[role] = "generator"
        live.nodes.append(((role,), "generator"))
        live.tensors[role] = LiveTensor(role, (role,), role, part.get_state(), put=_generator_setter(part))
    elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        live.roles[role] = "object"
        _add_object(live, role, part, to_fill)
    elif holder is None and not isinstance(part, (torch.Tensor, np.ndarray, dict, list)):
        raise Unsupported(
            f"the role {role} is a {type(part).__qualname__}: give a module, an optimizer, an object with state_dict and "
            "load_state_dict, a tensor, or a dict that can be filled in place"
        )
    else:
        live.roles.setdefault(role, "tensor" if isinstance(part, torch.Tensor) else "dict")
        _add_container(live, role, part, holder)
    return 0


def parameter_names(role: str, module: torch.nn.Module) -> dict[int, str]:
    """The logical name of every parameter, by `id`; of tied ones the first."""
    clean = _clean_module_names(module)
    names: dict[int, str] = {}
    for path, child in module.named_modules(remove_duplicate=False):
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), dotted((role, _join(clean.get(path, path), name))))
    return names


def _add_module(live: Live, role: str, module: torch.nn.Module) -> None:
    clean = _clean_module_names(module)
    for key, value in module.state_dict(keep_vars=True).items():
        path, _, attribute = key.rpartition(".")
        name = _join(clean[path], attribute) if path in clean else _drop_private(key)
        if attribute == _EXTRA:
            live.subtrees[role, name] = module.get_submodule(path).set_extra_state
            live.required.add((role, name))
            live.add_tree(value, (role, name), role)
        elif isinstance(value, torch.Tensor):
            live.add_leaf(Leaf((role, name), value), role)
        else:
            raise Unsupported(
                f"{dotted((role, name))} in the module's state dict is a {type(value).__qualname__}, not a tensor"
            )


def _clean_module_names(module: torch.nn.Module) -> dict[str, str]:
    """Path of every submodule to its path without wrappers."""
    clean: dict[str, str] = {}

    def visit(child: torch.nn.Module, path: str, name: str) -> None:
        clean[path] = name
        children = list(child._modules.items())
        for key, grandchild in children:
            if grandchild is not None:
                is_wrapper = key in _PRIVATE_WRAPPERS or (key == "module" and len(children) == 1)
                visit(grandchild, _join(path, key), name if is_wrapper else _join(name, key))

    visit(module, "", "")
    return clean


def _join(left: str, right: str) -> str:
    return f"{left}.{right}" if left else right


def _drop_private(key: str) -> str:
    return ".".join(p for p in key.split(".") if p not in _PRIVATE_WRAPPERS)


def _add_optimizer(
    live: Live, role: str, optimizer: torch.optim.Optimizer, first_group: int, owners: dict[int, str]
) -> int:
    by_name: dict[str, torch.Tensor] = {}
    for number, group in enumerate(optimizer.param_groups, first_group):
        members = []
        for at, parameter in enumerate(group["params"]):
            name = owners.get(id(parameter), f"param_groups.{number}.params.{at}")
            members.append(name)
            by_name[name] = parameter
            for key, value in optimizer.state.get(parameter, {}).items():
                _add_moment(
                    live,
                    role,
                    name,
                    key,
                    value,
                    optimizer.state[parameter],
                    owner=name if id(parameter) in owners else None,
                )
        base = (role, "param_groups", number)
        path = (*base, "params")
        live.values[dotted(path)] = LiveValue(dotted(path), path, role, members, None)
        for key, value in group.items():
            if key != "params":
                live.add_leaf(Leaf((*base, key), value, None, group, key), role, is_hyper=True)
    live.nodes.append(((role, "param_groups"), "list"))
    live.allocators.append(_moment_allocator(role, optimizer, by_name))
    live.placers.append(_moment_placer(role, optimizer, by_name))
    return len(optimizer.param_groups)


def _add_moment(live: Live, role: str, name: str, key: Any, value: Any, state: Any, owner: str | None) -> None:
    path = (role, name, key)
    if isinstance(value, torch.Tensor):
        live.add_leaf(Leaf(path, value, None, state, key), role, owner)
    else:
        live.add_tree(value, path, role, state, key)


def _moment_allocator(
    role: str, optimizer: torch.optim.Optimizer, by_name: dict[str, torch.Tensor]
) -> Callable[[Path, torch.dtype, tuple[int, ...]], torch.Tensor | None]:
    """Makes the state that an optimizer has not yet made itself, where its parameter is (a step counter: where torch has it)."""
    on_device = {
        id(p): bool(group.get("capturable") or group.get("fused"))
        for group in optimizer.param_groups
        for p in group["params"]
    }

    def allocate(path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        parameter = by_name.get(path[1]) if len(path) == 3 and path[0] == role and isinstance(path[1], str) else None
        if parameter is None or optimizer.state.get(parameter):
            return None
        is_counter = path[2] == "step" and not on_device[id(parameter)]
        memory = torch.preserve_format
        if shape == tuple(parameter.shape) and not is_counter:
            made = torch.empty_like(parameter, dtype=dtype, memory_format=memory, requires_grad=False).detach()
        else:
            made = torch.empty(shape, dtype=dtype, device="cpu" if is_counter else parameter.device)
        return made

    return allocate


def _moment_placer(
    role: str, optimizer: torch.optim.Optimizer, by_name: dict[str, torch.Tensor]
) -> Callable[[Path, Any], bool]:
    def place(path: Path, value: Any) -> bool:
        parameter = by_name.get(path[1]) if len(path) == 3 and path[0] == role and isinstance(path[1], str) else None
        if parameter is None:
            return False
        optimizer.state[parameter][path[2]] = value
        return True

    return place


def _add_object(live: Live, role: str, part: Any, to_fill: bool) -> None:
    if not to_fill:
        live.add_tree(part.state_dict(), (role,), role)
    live.subtrees[(role,)] = part.load_state_dict
    live.required.add((role,))


def _add_container(live: Live, role: str, part: Any, holder: Any) -> None:
    live.add_tree(part, (role,), role, holder, role)
    if isinstance(part, dict) and not part:
        live.values.pop(dotted((role,)), None)
        live.subtrees[(role,)] = part.update


def scheduler_of(parts: Iterable[Any]) -> list[LRScheduler]:
    """The learning-rate schedulers among the parts."""
    return [part for part in parts if isinstance(part, LRScheduler)]


def add_random_generators(live: Live, role: str = "rng") -> None:
    """Add the states of Python's, numpy's, torch's CPU and every CUDA device's global generator."""
    live.roles[role] = "rng"
    live.values[f"{role}.python"] = LiveValue(
        f"{role}.python", (role, "python"), role, random.getstate(), random.setstate
    )
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    plain = {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}}
    live.values[f"{role}.numpy"] = LiveValue(f"{role}.numpy", (role, "numpy"), role, plain, _set_numpy)
    live.tensors[f"{role}.torch"] = LiveTensor(
        f"{role}.torch", (role, "torch"), role, torch.get_rng_state(), put=torch.set_rng_state
    )
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for device in range(torch.cuda.device_count()):
            name = f"{role}.cuda{device}"
            live.tensors[name] = LiveTensor(
                name, (role, f"cuda{device}"), role, torch.cuda.get_rng_state(device), put=_cuda_setter(device)
            )


def _generator_setter(generator: torch.Generator) -> Callable[[torch.Tensor], None]:
    def put(state: torch.Tensor) -> None:
        generator.set_state(state)

    return put


def _set_numpy(state: Any) -> None:
    key = np.array(state["state"]["key"], np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})


def _cuda_setter(device: int) -> Callable[[torch.Tensor], None]:
    return lambda state: torch.cuda.set_rng_state(state, device)


def check_roles(roles: dict[str, Any]) -> None:
    """Raises:
    Refused: a role's name is not a plain identifier-like key.
    """
    for role in roles:
        if not isinstance(role, str) or not role:
            raise Refused(f"a role is called {role!r}; give a name")
