"""Optimizers over flat memory: FSDP1's and ZeRO's, whose state stands for many parameters at once.

Each original parameter gets its part of every state tensor as a view; a scalar, such as a step counter, is read for each of
them and must come back equal for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import Unsupported
from .live import Live, LiveValue
from .sharding.local import Sharded
from .sharding.original import Original, one_for_all
from .tree import Leaf, Path, Put

MASTERS = "fp32"
"""Key of master weights that are more precise than the weights."""


@dataclass
class Held:
    """A live tensor that an optimizer keeps state for, and the parameters in it."""

    tensor: torch.Tensor
    inside: list[tuple[str, Original]]
    """Logical names, each with where it lies."""
    has_masters: bool = False
    setters: dict[Any, Put] = field(default_factory=dict)
    """By key of the state: what sets a scalar."""


@dataclass
class FlatMoments:
    """The state that a base optimizer keeps for held tensors, taken apart by parameter."""

    role: str
    state: dict[Any, dict[Any, Any]]
    held: list[Held]
    _new: dict[tuple[int, Any], torch.Tensor] = field(default_factory=dict)

    def add(self, live: Live) -> None:
        """Add all that there is; what is not made yet is made when it is loaded."""
        for one in self.held:
            for name, original in one.inside:
                if one.has_masters and (part := original.of(one.tensor)) is not None:
                    self._add(live, name, MASTERS, part)
            for key, value in self.state.get(one.tensor, {}).items():
                put = self._setter(one, key)
                for name, original in one.inside:
                    found = original.of(value) if isinstance(value, torch.Tensor) else None
                    if found is not None:
                        self._add(live, name, key, found)
                    else:
                        live.add_leaf(Leaf((self.role, name, key), value, put), self.role, name)
        live.allocators.append(self.allocate)
        live.placers.append(self.place)

    def allocate(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, Sharded] | None:
        """State that the optimizer has not made yet: zeros for all parameters of a tensor, of which each takes its part."""
        found = self._find(path)
        if found is None or self.state.get(found[0].tensor):
            return None
        one, original = found
        if shape != original.shape or shape == ():
            scalar = torch.empty(shape, dtype=dtype)
            return scalar, Sharded.of_whole(scalar)
        key = (id(one.tensor), path[2])
        if key not in self._new:
            self._new[key] = torch.zeros(original.whole, dtype=dtype, device=one.tensor.device)
        part = original.of(self._new[key])
        return None if part is None else (self._new[key], part)

    def place(self, path: Path, value: Any) -> bool:
        found = self._find(path)
        if found is None:
            return False
        one, _ = found
        is_whole = isinstance(value, torch.Tensor) and value is self._new.get((id(one.tensor), path[2]))
        state = self.state.setdefault(one.tensor, {})
        if is_whole or path[2] not in state:
            state[path[2]] = value
        if not is_whole:
            self._setter(one, path[2])(value)
        return True

    def _setter(self, one: Held, key: Any) -> Put:
        if key not in one.setters:
            one.setters[key] = one_for_all(self.state.setdefault(one.tensor, {}), key, f"{self.role}: {key}")
        return one.setters[key]

    def _add(self, live: Live, name: str, key: Any, part: Sharded) -> None:
        path = (self.role, name, key)
        live.add_sharded(live.name_of(path), path, self.role, part, name, tied=("state", self.role, name, key))

    def _find(self, path: Path) -> tuple[Held, Original] | None:
        if len(path) != 3 or path[0] != self.role:
            return None
        return next(((one, o) for one in self.held for name, o in one.inside if name == path[1]), None)


def add_groups(live: Live, role: str, groups: list[dict[str, Any]], members: list[list[str]], first: int) -> None:
    """Add the hyper-parameters of parameter groups, and the names of their members."""
    for number, (group, names) in enumerate(zip(groups, members, strict=True), first):
        base = (role, "param_groups", number)
        name = live.name_of((*base, "params"))
        live.values[name] = LiveValue(name, (*base, "params"), role, names, None)
        for key, value in group.items():
            if key != "params":
                put = None if isinstance(value, torch.Tensor) else _item_setter(group, key)
                live.add_leaf(Leaf((*base, key), value, put), role, is_hyper=True)
    live.nodes.append(((role, "param_groups"), "list"))


def add_zero(live: Live, role: str, optimizer: Any, first: int, owners: dict[int, str]) -> int:
    """Add one of DeepSpeed's ZeRO optimizers; returns how many parameter groups it took.

    Raises:
        Unsupported: a parameter of it is in no module of the state.
    """
    from .sharding import deepspeed

    parts = deepspeed.partitions(optimizer)
    members: list[list[str]] = [[] for _ in optimizer.param_groups]
    held = []
    for part in parts:
        inside = []
        for parameter, original in part.inside:
            if id(parameter) not in owners:
                raise Unsupported(f"the optimizer {role} holds a parameter of no module here: give State(model=engine, ...) too")
            inside.append((owners[id(parameter)], original))
        members[part.group] += [name for name, _ in inside if name not in members[part.group]]
        held.append(Held(part.flat, inside, part.has_masters))
    add_groups(live, role, optimizer.param_groups, members, first)
    FlatMoments(role, optimizer.optimizer.state, held).add(live)
    for name, value, put in deepspeed.scaler_values(optimizer):
        live.add_leaf(Leaf((role, name), value, put), role)
    refresh_masters(live, optimizer, owners)
    return len(optimizer.param_groups)


def refresh_masters(live: Live, optimizer: Any, names: dict[int, str]) -> None:
    """Have a ZeRO optimizer's masters follow the weights that a load fills, where it does not fill the masters as well.

    Else the first step would put the old weights back. Masters of weights that are not filled stay as precise as they are.

    Args:
        names: of the parameters, by `id`; those that are not in it keep their masters.
    """
    from .sharding import deepspeed

    def refresh(filled: set[str]) -> None:
        items = [live.tensors[name] for name in filled & live.tensors.keys()]
        weights = {item.alias or item.name for item in items}
        masters = {item.owner for item in items if item.path[2:] == (MASTERS,)}

        def lacks_master(parameter: torch.nn.Parameter) -> bool:
            name = names.get(id(parameter))
            item = live.tensors.get(name) if name is not None else None
            return item is not None and (item.alias or item.name) in weights and name not in masters

        deepspeed.refresh(optimizer, masters_of=lacks_master)

    live.after.append(refresh)


def _item_setter(holder: dict[Any, Any], key: Any) -> Callable[[Any], None]:
    return lambda value: holder.__setitem__(key, value)
