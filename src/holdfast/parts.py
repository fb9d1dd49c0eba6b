"""Parts of a state: how modules, optimizers, random generators, objects with a state dict, and plain containers are taken apart.

Each function adds one part to a `Live`. Names never show a wrapper: `_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`,
`_fsdp_wrapped_module.` are left out, so that a compiled or wrapped model loads what the plain one saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import Unsupported
from .format.names import dotted
from .live import Live, LiveTensor, LiveValue
from .tensors import is_lazy
from .tree import Leaf, Path, Put

_PRIVATE_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_EXTRA = "_extra_state"


def add_part(live: Live, role: str, part: Any, put: Put | None, number: int, owners: dict[int, str]) -> int:
    """Add one part of a role; returns how many parameter groups it took.

    Args:
        put: replaces the part where it is held, if it is a plain value that can be; else None.
        number: parameter groups that earlier parts of this role took.
        owners: logical names of parameters by `id`.
    """
    if isinstance(part, torch.nn.Module):
        live.roles[role] = "module"
        _add_module(live, role, part)
    elif isinstance(part, torch.optim.Optimizer):
        live.roles[role] = "optimizer"
        return _add_optimizer(live, role, part, number, owners)
    elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        live.roles[role] = "object"
        _add_object(live, role, part)
    elif put is None and not isinstance(part, (torch.Tensor, torch.Generator, np.ndarray, dict, list)):
        raise Unsupported(
            f"the role {role} is a {type(part).__qualname__}: give a module, an optimizer, an object with state_dict and "
            "load_state_dict, a tensor, or a dict that can be filled in place"
        )
    else:
        kinds = {torch.Tensor: "tensor", torch.nn.Parameter: "tensor", torch.Generator: "generator"}
        live.roles.setdefault(role, kinds.get(type(part), "dict"))
        live.add_tree(part, (role,), role, put)
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
    innermost = {name: module.get_submodule(path) for path, name in clean.items()}
    held = {_memory(t) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)}
    for key, value in module.state_dict(keep_vars=True).items():
        path, _, attribute = key.rpartition(".")
        name = _join(clean[path], attribute) if path in clean else _drop_private(key)
        if attribute == _EXTRA:
            live.subtrees[role, name] = innermost[name.rpartition(".")[0]].set_extra_state
            live.required.add((role, name))
            live.add_tree(value, (role, name), role)
        elif isinstance(value, torch.Tensor):
            # a state dict may hold what is computed from the parameters: then only the module can take it back
            is_live = is_lazy(value) or not value.numel() or _memory(value) in held
            live.add_leaf(Leaf((role, name), value, None if is_live else _module_loader(module, key)), role)
        else:
            raise Unsupported(f"{dotted((role, name))} in the module's state dict is a {type(value).__qualname__}, not a tensor")


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype


def _module_loader(module: torch.nn.Module, key: str) -> Put:
    def load(value: torch.Tensor) -> None:
        module.load_state_dict({key: value}, strict=False)

    return load


def _clean_module_names(module: torch.nn.Module) -> dict[str, str]:
    """Path of every submodule to its path without wrappers."""
    clean: dict[str, str] = {}

    def visit(child: torch.nn.Module, path: str, name: str) -> None:
        clean[path] = name
        for key, grandchild in child._modules.items():
            if grandchild is not None:
                is_wrapper = key in _PRIVATE_WRAPPERS or (key == "module" and _is_wrapper(child))
                visit(grandchild, _join(path, key), name if is_wrapper else _join(name, key))

    visit(module, "", "")
    return clean


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Whether a module with a child called `module` only wraps it: no other children, no parameters of its own."""
    return len(module._modules) == 1 and not module._parameters


def _join(left: str, right: str) -> str:
    return f"{left}.{right}" if left else right


def _drop_private(key: str) -> str:
    return ".".join(p for p in key.split(".") if p not in _PRIVATE_WRAPPERS)


def _add_optimizer(live: Live, role: str, optimizer: torch.optim.Optimizer, first_group: int, owners: dict[int, str]) -> int:
    by_name: dict[str, torch.Tensor] = {}
    if extra := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise Unsupported(f"the optimizer {role} keeps {', '.join(extra)} in its state dict, which would be lost; hold it apart")
    if extra := sorted(str(key) for key in optimizer.state if not isinstance(key, torch.Tensor)):
        raise Unsupported(f"the optimizer {role} has state for {', '.join(extra)}, which is no parameter; hold it apart")
    for number, group in enumerate(optimizer.param_groups, first_group):
        members = []
        for at, parameter in enumerate(group["params"]):
            name = owners.get(id(parameter), f"param_groups.{number}.params.{at}")
            members.append(name)
            by_name[name] = parameter
            owner = name if id(parameter) in owners else None
            for key, value in optimizer.state.get(parameter, {}).items():
                _add_moment(live, (role, name, key), value, optimizer.state[parameter], owner)
        base = (role, "param_groups", number)
        path = (*base, "params")
        live.values[dotted(path)] = LiveValue(dotted(path), path, role, members, None)
        for key, value in group.items():
            if key != "params":
                put = None if isinstance(value, torch.Tensor) else _item_setter(group, key)
                live.add_leaf(Leaf((*base, key), value, put), role, is_hyper=True)
    live.nodes.append(((role, "param_groups"), "list"))
    moments = _Moments(role, optimizer, by_name)
    live.allocators.append(moments.allocate)
    live.placers.append(moments.place)
    live.finders.append(moments.find)
    return len(optimizer.param_groups)


def _add_moment(live: Live, path: Path, value: Any, state: dict[Any, Any], owner: str | None) -> None:
    if isinstance(value, torch.Tensor):
        live.add_leaf(Leaf(path, value), path[0], owner)
    elif not isinstance(value, (list, tuple, dict)):
        live.add_leaf(Leaf(path, value, _item_setter(state, path[2])), path[0])
    elif not live.to_fill:  # a list of tensors, as LBFGS has, comes back as a whole
        live.add_tree(value, path, path[0])


def _item_setter(holder: dict[Any, Any], key: Any) -> Put:
    return lambda value: holder.__setitem__(key, value)


@dataclass(frozen=True)
class _Moments:
    """What an optimizer has not made itself yet, or holds in containers."""

    role: str
    optimizer: torch.optim.Optimizer
    by_name: dict[str, torch.Tensor]
    """Its parameters by logical name."""

    def allocate(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A tensor where its parameter is; a step counter where torch has it."""
        parameter = self._parameter(path)
        if parameter is None or len(path) != 3 or self.optimizer.state.get(parameter):
            return None
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        is_counter = path[2] == "step" and not (group.get("capturable") or group.get("fused"))
        if shape == tuple(parameter.shape) and not is_counter:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
        return torch.empty(shape, dtype=dtype, device="cpu" if is_counter else parameter.device)

    def place(self, path: Path, value: Any) -> bool:
        parameter = self._parameter(path)
        if parameter is None or len(path) != 3:
            return False
        self.optimizer.state[parameter][path[2]] = value
        return True

    def find(self, path: Path) -> tuple[Path, Put] | None:
        """A container of a parameter's state, which is given back as a whole."""
        parameter = self._parameter(path)
        if parameter is None or len(path) < 3:
            return None
        state = self.optimizer.state.get(parameter, {})
        if len(path) == 3 and not isinstance(state.get(path[2]), (list, tuple, dict)):
            return None
        return path[:3], lambda tree: self.optimizer.state[parameter].__setitem__(path[2], tree)

    def _parameter(self, path: Path) -> torch.Tensor | None:
        is_ours = len(path) > 1 and path[0] == self.role and isinstance(path[1], str)
        return self.by_name.get(path[1]) if is_ours else None


def _add_object(live: Live, role: str, part: Any) -> None:
    if not live.to_fill:  # a data loader that is asked for its state starts its workers
        live.add_tree(part.state_dict(), (role,), role)
    live.subtrees[(role,)] = part.load_state_dict
    live.required.add((role,))


def add_random_generators(live: Live, role: str = "rng") -> None:
    """Add the states of Python's, numpy's, torch's CPU and every CUDA device's global generator."""
    live.roles[role] = "rng"
    live.values[f"{role}.python"] = LiveValue(f"{role}.python", (role, "python"), role, random.getstate(), random.setstate)
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


def _set_numpy(state: Any) -> None:
    key = np.array(state["state"]["key"], np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})


def _cuda_setter(device: int) -> Callable[[torch.Tensor], None]:
    return lambda state: torch.cuda.set_rng_state(state, device)
