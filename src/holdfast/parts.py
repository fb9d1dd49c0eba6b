"""Parts of a state: how modules, optimizers, objects with a state dict, and plain containers are taken apart.

Each function adds one part to a `Live`. Names never show a wrapper: `_orig_mod.`, `module.`, `_checkpoint_wrapped_module.`,
`_fsdp_wrapped_module.` are left out, so that a compiled or wrapped model loads what the plain one saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .errors import Unsupported
from .flat_state import FlatMoments, Held, add_groups, add_zero, refresh_masters
from .format.names import dotted
from .live import Live, Stream
from .per_rank import PerRank
from .provider import STABLE, Provider
from .sharding import deepspeed, fsdp1
from .sharding.local import Sharded, sharded
from .sharding.original import Original
from .signature import is_plain_module, is_plain_optimizer
from .tensors import is_lazy
from .tree import Leaf, Path, Put

_PRIVATE_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_EXTRA = "_extra_state"


@dataclass
class Owners:
    """The parameters of the modules of a state, by `id` of the live ones."""

    names: dict[int, str] = field(default_factory=dict)
    """Logical names; of tied parameters the first."""
    inside: dict[int, list[tuple[str, Original]]] = field(default_factory=dict)
    """Of flat ones: the names of those in it, each with where it lies."""

    def add(self, role: str, module: torch.nn.Module) -> None:
        """Add a module's; what is known already stays."""
        self.names = parameter_names(role, module) | self.names
        if fsdp1.contains(module):
            clean = _clean_module_names(module)
            for number, held in fsdp1.originals(module).items():
                self.inside[number] = [(dotted((role, _clean_key(clean, key))), original) for key, original in held]


def add_part(live: Live, role: str, part: Any, put: Put | None, number: int, owners: Owners) -> int:
    """Add one part of a role; returns how many parameter groups it took.

    Args:
        put: replaces the part where it is held, if it is a plain value that can be; else None.
        number: parameter groups that earlier parts of this role took.
        owners: the parameters of all modules.
    """
    if not live.to_fill:
        _note(live, role, part, put, number, owners)
    if isinstance(part, torch.nn.Module):
        live.roles[role] = "module"
        _add_module(live, role, part)
    elif isinstance(part, torch.optim.Optimizer):
        live.roles[role] = "optimizer"
        return _add_optimizer(live, role, part, number, owners)
    elif deepspeed.is_zero(part):
        live.roles[role] = "optimizer"
        return add_zero(live, role, part, number, owners.names)
    elif isinstance(part, PerRank):
        add_per_rank(live, role, part)
    elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
        live.roles[role] = "loader" if isinstance(part, torch.utils.data.DataLoader) else "object"
        if isinstance(part, Provider) and part.kind == STABLE:
            live.stable.add(role)
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


def _note(live: Live, role: str, part: Any, put: Put | None, number: int, owners: Owners) -> None:
    """Note how to add the part again, to tell what has changed of it; a plain optimizer notes it itself."""
    if isinstance(part, torch.nn.Module) and is_plain_module(part):
        live.plain.add(id(part))
        live.again.append(lambda other: other.roles.__setitem__(role, "module"))
    elif isinstance(part, torch.optim.Optimizer) and is_plain_optimizer(part) and not owners.inside:
        live.plain.add(id(part))
    else:

        def add(other: Live) -> None:
            add_part(other, role, part, put, number, owners)

        live.again.append(add)


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
    style = fsdp1 if fsdp1.contains(module) else deepspeed if deepspeed.contains(module) else None
    if style is fsdp1:
        live.after.append(lambda filled: fsdp1.refresh(module))
    if style is deepspeed and live.to_fill:  # for a state without the optimizer; with it, this is done twice
        for optimizer in deepspeed.optimizers_of(module):
            deepspeed.partitions(optimizer)  # refuses what could not be brought up to date, before anything is touched
            refresh_masters(live, optimizer, parameter_names(role, module))
    for key, value in (style.state_dict(module) if style else module.state_dict(keep_vars=True)).items():
        attribute, name = key.rpartition(".")[2], _clean_key(clean, key)
        if isinstance(value, Sharded):
            live.add_sharded(dotted((role, name)), (role, name), role, value, tied=id(value))
        elif attribute == _EXTRA:
            live.subtrees[role, name] = innermost[name.rpartition(".")[0]].set_extra_state
            live.required.add((role, name))
            live.add_tree(value, (role, name), role)
        elif isinstance(value, torch.Tensor):
            # a state dict may hold what is computed from the parameters: then only the module can take it back
            is_live = is_lazy(value) or not value.numel() or _memory(value) in held
            live.add_leaf(Leaf((role, name), value, None if is_live else _module_loader(module, key)), role)
        else:
            raise Unsupported(f"{dotted((role, name))} in the module's state dict is a {type(value).__qualname__}, not a tensor")


def _clean_key(clean: dict[str, str], key: str) -> str:
    path, _, attribute = key.rpartition(".")
    return _join(clean[path], attribute) if path in clean else _drop_private(key)


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


def _add_optimizer(live: Live, role: str, optimizer: torch.optim.Optimizer, first_group: int, owners: Owners) -> int:
    by_name: dict[str, torch.Tensor] = {}
    held: list[Held] = []
    every: list[list[str]] = []
    if extra := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise Unsupported(f"the optimizer {role} keeps {', '.join(extra)} in its state dict, which would be lost; hold it apart")
    if extra := sorted(str(key) for key in optimizer.state if not isinstance(key, torch.Tensor)):
        raise Unsupported(f"the optimizer {role} has state for {', '.join(extra)}, which is no parameter; hold it apart")
    for number, group in enumerate(optimizer.param_groups, first_group):
        members: list[str] = []
        for at, parameter in enumerate(group["params"]):
            if id(parameter) in owners.inside:
                held.append(Held(parameter, owners.inside[id(parameter)]))
                members += [name for name, _ in held[-1].inside]
                continue
            name = owners.names.get(id(parameter), f"param_groups.{number}.params.{at}")
            members.append(name)
            by_name[name] = parameter
            owner = name if id(parameter) in owners.names else None
            for key, value in optimizer.state.get(parameter, {}).items():
                _add_moment(live, (role, name, key), value, optimizer.state[parameter], owner)
        every.append(members)
    add_groups(live, role, optimizer.param_groups, every, first_group)
    if id(optimizer) in live.plain:
        live.again.append(lambda other: _add_settings(other, role, optimizer, every, first_group, by_name))
    moments = _Moments(role, optimizer, by_name, live.rules)
    live.allocators.append(moments.allocate)
    live.placers.append(moments.place)
    live.finders.append(moments.find)
    if held:
        FlatMoments(role, optimizer.state, held).add(live)
    return len(optimizer.param_groups)


def _add_settings(
    live: Live,
    role: str,
    optimizer: torch.optim.Optimizer,
    members: list[list[str]],
    first: int,
    by_name: dict[str, torch.Tensor],
) -> None:
    """Add what a plain optimizer has besides the tensors of its state."""
    live.roles[role] = "optimizer"
    for name, parameter in by_name.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                live.add_leaf(Leaf((role, name, key), value, _item_setter(optimizer.state[parameter], key)), role)
    add_groups(live, role, optimizer.param_groups, members, first)


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
    rules: Callable[[str, torch.Tensor], Sharded | None] | None
    """See `Live.rules`."""

    def allocate(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, Sharded] | None:
        """A tensor where its parameter is, and sharded as that is; a step counter where torch has it."""
        parameter = self._parameter(path)
        if parameter is None or len(path) != 3 or self.optimizer.state.get(parameter):
            return None
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        is_counter = path[2] == "step" and not (group.get("capturable") or group.get("fused"))
        by_rule = self.rules(path[1], parameter) if self.rules is not None else None
        if not is_counter and shape == (by_rule.shape if by_rule else tuple(parameter.shape)):
            made = torch.empty_like(parameter, dtype=dtype, requires_grad=False).detach()
            layout = None if by_rule is None else by_rule.layout
        else:
            made, layout = torch.empty(shape, dtype=dtype, device="cpu" if is_counter else parameter.device), None
        return made, sharded(dotted(path), made) if layout is None else Sharded(shape, layout, made)

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


def add_per_rank(live: Live, role: str, part: PerRank) -> None:
    """Add what belongs to this rank of a part that belongs to each."""
    ranks = live.ranks or (live.rank,)
    places = [part.place(rank, position, live.world) for position, rank in enumerate(ranks)]
    number, count = places[live.position]
    holders = tuple(rank for rank, place in zip(ranks, places, strict=True) if place == (number, count))
    live.roles[role] = "per_rank"
    live.streams[role] = Stream(part.axis, number, count, part.reshape is not None, holders)
    if not live.to_fill:
        live.add_tree(part.state(), (role, part.axis, number), role)
    live.subtrees[(role,)] = lambda tree: part.take(tree, number, count)
    live.required.add((role,))
