"""Matching what is stored with what is live, by name, before anything is touched.

All differences are collected and raised as one `Mismatch`; only `waive` lets a difference pass, and then the ledger names it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Mismatch
from ..format import values
from ..format.index import TensorRow
from ..format.names import dotted
from ..layout.layouts import Whole
from ..live import Live, LiveTensor
from ..patterns import matches_any, near
from ..sharding.local import Sharded
from ..tensors import dtype_name, overlaps_itself, torch_dtype
from ..tree import Path
from .checkpoint import Checkpoint
from .groups import same_bytes, twin_of
from .ledger import Ledger
from .stored import Stored, stored_names
from .wishes import Wishes

_SHOWN = 40


@dataclass
class Fill:
    """One stored tensor on its way to a live one."""

    name: str
    stored: TensorRow
    target: torch.Tensor
    """What is given to the live object where it is not filled in place."""
    live: LiveTensor | None
    """None where the target was allocated."""
    path: Path
    sharded: Sharded
    """This rank's memory of the target."""
    rank: int = 0

    @classmethod
    def whole(cls, name: str, stored: TensorRow, target: torch.Tensor, path: Path) -> Fill:
        """Of a plain tensor that is not live yet."""
        return cls(name, stored, target, None, path, Sharded(tuple(target.shape), Whole(), target))


@dataclass
class Match:
    """What a load will do, decided and checked, nothing touched."""

    fills: list[Fill] = field(default_factory=list)
    values: dict[str, tuple[Path, Any]] = field(default_factory=dict)
    """Live name to path and decoded value."""
    nodes: dict[Path, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    """Stored values of what keeps its live one."""
    ledger: Ledger = field(default_factory=Ledger)
    untaken: dict[str, str] = field(default_factory=dict)
    """What is stored and asked for, and has no place on this rank, and why."""
    numbers: dict[str, int] = field(default_factory=dict)
    """See `Stored.numbers`."""
    elsewhere: set[int] = field(default_factory=set)
    """See `Stored.elsewhere`."""


def match(checkpoint: Checkpoint, live: Live, wishes: Wishes, all_roles: bool) -> Match:
    """Decide where every stored tensor and value goes.

    Args:
        all_roles: whether stored roles that the live state does not have are a difference (`resume`) or not asked for.
    Raises:
        Mismatch: every difference, each with its name. Where several ranks load, what is stored and not live here may be so on
            another rank: it is in `untaken`, to be refused if it is so on all of them.
        Unsupported: a value or dtype that is not known here.
    """
    result = Match(ledger=Ledger(step=checkpoint.step, attempt=checkpoint.attempt))
    problems: dict[str, str] = {}
    stored = stored_names(checkpoint, live, wishes, all_roles, result.ledger, problems)
    result.nodes, result.numbers, result.elsewhere = stored.nodes, stored.numbers, stored.elsewhere
    _match_tensors(stored, live, wishes, result, problems)
    _match_values(stored, live, wishes, result, problems)
    _match_aliases(checkpoint, result, problems, wishes)
    _match_twins(checkpoint, stored, live, result)
    found = {live.subtree_of(path) for path in (*stored.paths.values(), *(path for path, _ in stored.values.values()))}
    for subtree in live.required - found:
        if wishes.wants(dotted(subtree)):
            problems.setdefault(dotted(subtree), "missing: it is live, but nothing of it is stored")
            result.ledger.missing.append(dotted(subtree))
    _match_loaders(checkpoint, live, wishes, problems)
    if not all_roles and "rng" not in checkpoint.commit.roles:
        for name in [n for n in problems if live.roles.get(n.partition(".")[0]) == "rng"]:
            result.ledger.waived[name] = problems.pop(name)
    if live.world == 1:
        problems |= result.untaken
        result.ledger.unexpected = list(result.untaken)
    refuse(problems, wishes, result.ledger, checkpoint)
    return result


def _match_loaders(checkpoint: Checkpoint, live: Live, wishes: Wishes, problems: dict[str, str]) -> None:
    """The position of a data loader is one in a world of so many ranks, and none in another."""
    before = checkpoint.commit.world
    for role, kind in live.roles.items():
        if kind == "loader" and role in checkpoint.commit.roles and wishes.wants(role) and before != live.world:
            problems[role] = (
                f"is the position of a data loader among {before} ranks, and here are {live.world}: what is a position for one "
                "is none for the other. Use holdfast.data, or PerRank(..., reshape=)"
            )


def _match_twins(checkpoint: Checkpoint, stored: Stored, live: Live, result: Match) -> None:
    """Moments of a parameter that is tied here, but was not there: not wanted twice, if both are equal."""
    for name in list(result.untaken):
        path = stored.paths.get(name) or stored.values.get(name, ((), None))[0]
        twin = twin_of(path, live)
        if twin is None:
            continue
        if name in stored.tensors and twin in stored.tensors:
            is_equal = same_bytes(checkpoint, stored.tensors[name], stored.tensors[twin])
        else:
            is_equal = name in stored.values and twin in stored.values and stored.values[name][1] == stored.values[twin][1]
        if is_equal:
            del result.untaken[name]
            result.ledger.filled.append(name)
        else:
            result.untaken[name] = f"belongs to a parameter that is tied here, and differs from {twin}"


def _match_tensors(stored: Stored, live: Live, wishes: Wishes, result: Match, problems: dict[str, str]) -> None:
    ledger = result.ledger
    for name, tensor in stored.tensors.items():
        path, ours = stored.paths[name], live.tensors.get(name)
        kind = torch_dtype(tensor.dtype.name)
        if live.subtree_of(path) is not None:
            result.fills.append(Fill.whole(name, tensor, torch.empty(tensor.shape, dtype=kind), path))
            ledger.filled.append(name)
        elif ours is not None:
            _match_one(name, tensor, ours, live.rank, wishes, result, problems)
        elif name in live.values:
            if wishes.keeps_live(name):
                ledger.live.append(name)
            else:
                problems[name] = "is stored as a tensor, but the live one is a value"
        elif (made := _allocate(live, path, kind, tensor.shape)) is not None:
            result.fills.append(Fill(name, tensor, made[0], None, path, made[1], live.rank))
            ledger.allocated.append(name)
        else:
            result.untaken[name] = "unexpected: it is stored, but nothing live has that name" + near(name, live.tensors)
    filled = {fill.live.alias or fill.name for fill in result.fills if fill.live is not None}
    for name, item in live.tensors.items():
        if name in stored.tensors or not wishes.wants(name) or live.subtree_of(item.path) is not None:
            continue
        if (item.alias or name) in filled:
            ledger.filled.append(name)  # through the name that it shares its memory with
        elif name not in stored.values:
            _miss(name, near(name, stored.tensors), ledger, problems)


def _miss(name: str, hint: str, ledger: Ledger, problems: dict[str, str]) -> None:
    """Say that a live name is not stored, unless it, or its role as a whole, is refused for a reason that says more."""
    if name.partition(".")[0] not in problems:
        problems.setdefault(name, f"missing: it is live, but not stored{hint}")
    ledger.missing.append(name)


def _match_one(
    name: str, tensor: TensorRow, ours: LiveTensor, rank: int, wishes: Wishes, result: Match, problems: dict[str, str]
) -> None:
    shape, kind = ours.shape, dtype_name(ours.tensor)
    if wishes.keeps_live(name):
        result.ledger.live.append(name)
        return
    if overlaps_itself(ours.tensor):
        problems[name] = "has several elements at one place in memory, as after expand(); clone it"
        return
    if shape != tensor.shape:
        problems[name] = f"has shape {list(tensor.shape)} stored and {list(shape)} live"
        return
    if kind != tensor.dtype.name:
        wanted = next((w for pattern, w in wishes.cast.items() if matches_any(name, pattern)), None)
        if wanted is None or str(wanted).removeprefix("torch.") != kind:
            hint = (
                f'; cast={{"{name}": torch.{kind}}} would convert it'
                if wanted is None
                else f"; the cast asked for is to {wanted}"
            )
            problems[name] = f"has dtype {tensor.dtype.name} stored and {kind} live{hint}"
            return
        result.ledger.cast[name] = f"{tensor.dtype.name} -> {kind}"
    target = torch.empty_like(ours.tensor) if ours.put else ours.tensor
    result.fills.append(Fill(name, tensor, target, ours, ours.path, Sharded(ours.shape, ours.layout, target), rank))
    result.ledger.filled.append(name)


def _match_values(stored: Stored, live: Live, wishes: Wishes, result: Match, problems: dict[str, str]) -> None:
    ledger = result.ledger
    for name, (path, data) in stored.values.items():
        ours = live.values.get(name)
        decoded = values.decode(data, name)
        if live.subtree_of(path) is not None:
            result.values[name] = (path, decoded)
            ledger.filled.append(name)
        elif wishes.keeps_live(name) and (ours is not None or name in live.tensors):
            ledger.live.append(name)
            result.kept[name] = decoded
            if ours is not None:
                _note_hyper(name, decoded, ours.value, ours.is_hyper, ledger)
        elif name in live.tensors:
            problems[name] = "is stored as a value, but the live one is a tensor"
        elif ours is None:
            if _may_place(live, path):
                result.values[name] = (path, decoded)
                ledger.allocated.append(name)
            else:
                result.untaken[name] = "unexpected: it is stored, but nothing live has that name" + near(name, live.values)
        elif ours.put is None:
            if not _same(ours.value, decoded):
                problems[name] = f"differs: stored {_short(decoded)}, live {_short(ours.value)}"
        else:
            result.values[name] = (path, decoded)
            ledger.filled.append(name)
            _note_hyper(name, decoded, ours.value, ours.is_hyper, ledger)
    groups = {path[:3] for path, _ in stored.values.values()}
    for name, item in live.values.items():
        is_there = name in stored.values or name in stored.tensors
        if is_there or not wishes.wants(name) or live.subtree_of(item.path) is not None:
            continue
        if item.is_hyper and item.path[:3] in groups:  # a key that a newer torch has added
            ledger.hyper[name] = ("(not stored)", item.value)
            ledger.live.append(name)
            continue
        _miss(name, near(name, stored.values), ledger, problems)


def _match_aliases(checkpoint: Checkpoint, result: Match, problems: dict[str, str], wishes: Wishes) -> None:
    """What is tied must be tied on both sides, as far as both names are loaded."""
    apart = set()
    stored_as: dict[int, list[Fill]] = {}
    live_as: dict[str, list[Fill]] = {}
    for fill in result.fills:
        if fill.live is None or fill.live.put:
            continue
        stored_as.setdefault(checkpoint.index.canonical(fill.stored).row, []).append(fill)
        live_as.setdefault(fill.live.alias or fill.name, []).append(fill)
    for group in stored_as.values():
        for fill in group[1:]:
            if fill.live and group[0].live and _memory(fill.live) != _memory(group[0].live) and fill.stored.nbytes:
                problems[fill.name] = (
                    f"is tied to {group[0].name} where it was stored, but not here; tie them, or load them apart"
                )
    for group in live_as.values():
        for fill in group[1:]:
            rows = [checkpoint.index.canonical(f.stored) for f in (fill, group[0])]
            if rows[0].row != rows[1].row and not same_bytes(checkpoint, *rows):
                problems[fill.name] = f"is tied to {group[0].name} here, but stored apart from it; untie them, or load one"
                apart.add(fill.name)
    waived = {name for name in apart if matches_any(name, wishes.waive)}  # one memory has room for one of them
    result.fills = [fill for fill in result.fills if fill.name not in waived]


def _memory(item: LiveTensor) -> str:
    return item.alias or item.name


def refuse(problems: dict[str, str], wishes: Wishes, ledger: Ledger, checkpoint: Checkpoint) -> None:
    """Raises:
    Mismatch: there is a problem that is not waived. Those that are go into the ledger.
    """
    refused = {}
    for name, why in problems.items():
        if matches_any(name, wishes.waive):
            ledger.waived[name] = why
        else:
            refused[name] = why
    if not refused:
        return
    lines = [f"{name} {why}" for name, why in sorted(refused.items())]
    shown = "\n  ".join(lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []))
    raise Mismatch(
        f"step {checkpoint.step} of {checkpoint.store.url} does not fit the live state, which was not touched:\n  {shown}\n"
        "Name what may differ in waive=, rename=, cast=, select= or exclude=.",
        tuple(lines),
    )


def _allocate(live: Live, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Any, Sharded] | None:
    return next((made for allocate in live.allocators if (made := allocate(path, dtype, shape)) is not None), None)


def _may_place(live: Live, path: Path) -> bool:
    return _allocate(live, path, torch.float32, ()) is not None


def _same(one: Any, other: Any) -> bool:
    return bool(values.encode(one, "") == values.encode(other, ""))


def _note_hyper(name: str, stored: Any, ours: Any, is_hyper: bool, ledger: Ledger) -> None:
    if is_hyper and not _same(stored, ours):
        ledger.hyper[name] = (stored, ours)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
