"""Matching what is stored with what is live, by name, before anything is touched.

All differences are collected and raised as one `Mismatch`; only `waive` lets a difference pass, and then the ledger names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Mismatch
from ..format import values
from ..format.index import TensorRow
from ..format.names import dotted, path_of
from ..live import Live, LiveTensor, LiveValue
from ..patterns import as_list, matches_any, near, rename, renamer
from ..tensors import dtype_name, overlaps_itself, torch_dtype
from ..tree import Path
from .checkpoint import NODE, Checkpoint
from .ledger import Ledger

_SHOWN = 40


@dataclass(frozen=True)
class Wishes:
    """What the caller asked of a load."""

    select: Sequence[str] = ()
    """Empty: everything."""
    exclude: Sequence[str] = ()
    waive: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
    """Pattern to the dtype that stored tensors are cast to; the live one must be that."""
    live: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        select: Any = None,
        exclude: Any = (),
        waive: Any = (),
        rename: Any = None,
        cast: Any = None,
        live: Any = (),
    ) -> Wishes:
        return cls(as_list(select), as_list(exclude), as_list(waive), dict(rename or {}), dict(cast or {}), as_list(live))

    def wants(self, name: str) -> bool:
        return (not self.select or matches_any(name, self.select)) and not matches_any(name, self.exclude)

    def keeps_live(self, name: str) -> bool:
        """Whether the live hyper-parameter stays; patterns match the whole name or its last part."""
        return matches_any(name, self.live) or matches_any(name.rpartition(".")[2], self.live)


@dataclass
class Fill:
    """One stored tensor on its way to a live one."""

    name: str
    stored: TensorRow
    target: torch.Tensor
    live: LiveTensor | None
    """None where the target was allocated."""
    path: Path


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


@dataclass
class _Stored:
    """The stored names as the live side would call them."""

    tensors: dict[str, TensorRow]
    values: dict[str, tuple[Path, Any]]
    nodes: dict[Path, str]
    paths: dict[str, Path]


def match(checkpoint: Checkpoint, live: Live, wishes: Wishes, all_roles: bool) -> Match:
    """Decide where every stored tensor and value goes.

    Args:
        all_roles: whether stored roles that the live state does not have are a difference (`resume`) or not asked for.
    Raises:
        Mismatch: every difference, each with its name.  Unsupported: a value or dtype that is not known here.
    """
    result = Match(ledger=Ledger(step=checkpoint.step, attempt=checkpoint.attempt))
    problems: dict[str, str] = {}
    stored = _stored(checkpoint, live, wishes, all_roles, result.ledger, problems)
    result.nodes = stored.nodes
    _match_tensors(stored, live, wishes, result, problems)
    _match_values(stored, live, wishes, result, problems)
    _match_aliases(checkpoint, result, problems, wishes)
    found = {live.subtree_of(path) for path in (*stored.paths.values(), *(path for path, _ in stored.values.values()))}
    for subtree in live.required - found:
        if wishes.wants(dotted(subtree)):
            problems[dotted(subtree)] = "missing: it is live, but nothing of it is stored"
            result.ledger.missing.append(dotted(subtree))
    if not all_roles and "rng" not in checkpoint.commit.roles:
        for name in [n for n in problems if live.roles.get(n.partition(".")[0]) == "rng"]:
            result.ledger.waived[name] = problems.pop(name)
    _raise_unless_waived(problems, wishes, result.ledger, checkpoint)
    return result


def _stored(
    checkpoint: Checkpoint, live: Live, wishes: Wishes, all_roles: bool, ledger: Ledger, problems: dict[str, str]
) -> _Stored:
    renames = renamer(wishes.rename)
    stored = _Stored({}, {}, {}, {})
    kinds = checkpoint.commit.roles

    def place(name: str, path: Path) -> tuple[str, Path] | None:
        """The live name and path of a stored name; None if it was not asked for."""
        ours, moved = rename(name, renames), path
        if kinds.get(path[0]) == "optimizer" and len(path) > 2 and isinstance(path[1], str):
            moved = (path[0], rename(path[1], renames), *path[2:])  # moments go with their parameter
            if ours == name or ours == dotted(moved):
                ours = dotted(moved)
            else:
                moved = path
        if not wishes.wants(ours) or (not all_roles and path[0] not in live.roles and ours == name):
            ledger.skipped.append(name)
            return None
        if ours in stored.tensors or ours in stored.values:
            problems[ours] = f"is what two stored names would become: {ledger.renamed.get(ours, ours)} and {name}"
        if ours != name:
            ledger.renamed[ours] = name
            known: LiveTensor | LiveValue | None = live.tensors.get(ours)
            known = known or live.values.get(ours)
            if known is not None:
                moved = known.path
            elif moved == path:
                moved = (ours.partition(".")[0], ours.partition(".")[2])
        return ours, moved

    for tensor in checkpoint.index.tensors():
        if placed := place(tensor.name, tensor.path):
            stored.tensors[placed[0]], stored.paths[placed[0]] = tensor, placed[1]
    for raw_path, data in checkpoint.commit.values:
        path = path_of(raw_path)
        if isinstance(data, dict) and NODE in data:
            stored.nodes[path] = data[NODE]
        elif placed := place(dotted(path), path):
            is_members = kinds.get(path[0]) == "optimizer" and path[-1] == "params" and isinstance(data, list)
            stored.values[placed[0]] = (placed[1], [rename(n, renames) for n in data] if is_members else data)
    return stored


def _match_tensors(stored: _Stored, live: Live, wishes: Wishes, result: Match, problems: dict[str, str]) -> None:
    ledger = result.ledger
    for name, tensor in stored.tensors.items():
        path, ours = stored.paths[name], live.tensors.get(name)
        kind = torch_dtype(tensor.dtype.name)
        if live.subtree_of(path) is not None:
            result.fills.append(Fill(name, tensor, torch.empty(tensor.shape, dtype=kind), None, path))
            ledger.filled.append(name)
        elif ours is not None:
            _match_one(name, tensor, ours, wishes, result, problems)
        elif name in live.values:
            if wishes.keeps_live(name):
                ledger.live.append(name)
            else:
                problems[name] = "is stored as a tensor, but the live one is a value"
        elif (made := _allocate(live, path, kind, tensor.shape)) is not None:
            result.fills.append(Fill(name, tensor, made, None, path))
            ledger.allocated.append(name)
        else:
            problems[name] = "unexpected: it is stored, but nothing live has that name" + near(name, live.tensors)
            ledger.unexpected.append(name)
    filled = {fill.live.alias or fill.name for fill in result.fills if fill.live is not None}
    for name, item in live.tensors.items():
        if name in stored.tensors or not wishes.wants(name) or live.subtree_of(item.path) is not None:
            continue
        if (item.alias or name) in filled:
            ledger.filled.append(name)  # through the name that it shares its memory with
        elif name not in stored.values:
            problems[name] = "missing: it is live, but not stored" + near(name, stored.tensors)
            ledger.missing.append(name)


def _match_one(name: str, tensor: TensorRow, ours: LiveTensor, wishes: Wishes, result: Match, problems: dict[str, str]) -> None:
    shape, kind = tuple(ours.tensor.shape), dtype_name(ours.tensor)
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
    result.fills.append(Fill(name, tensor, target, ours, ours.path))
    result.ledger.filled.append(name)


def _match_values(stored: _Stored, live: Live, wishes: Wishes, result: Match, problems: dict[str, str]) -> None:
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
                problems[name] = "unexpected: it is stored, but nothing live has that name" + near(name, live.values)
                ledger.unexpected.append(name)
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
        problems[name] = "missing: it is live, but not stored" + near(name, stored.values)
        ledger.missing.append(name)


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
            if checkpoint.index.canonical(fill.stored).row != checkpoint.index.canonical(group[0].stored).row:
                problems[fill.name] = f"is tied to {group[0].name} here, but stored apart from it; untie them, or load one"
                apart.add(fill.name)
    waived = {name for name in apart if matches_any(name, wishes.waive)}  # one memory has room for one of them
    result.fills = [fill for fill in result.fills if fill.name not in waived]


def _memory(item: LiveTensor) -> str:
    return item.alias or item.name


def _raise_unless_waived(problems: dict[str, str], wishes: Wishes, ledger: Ledger, checkpoint: Checkpoint) -> None:
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


def _allocate(live: Live, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
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
