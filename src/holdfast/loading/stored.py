"""What is stored, under the names by which the live side would call it: renamed, selected, and what belongs to this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..format.index import TensorRow
from ..format.names import dotted, path_of
from ..live import Live, LiveTensor, LiveValue
from ..patterns import rename, renamer
from ..tree import Path
from .checkpoint import NODE, Checkpoint
from .groups import Ties, follow_ties, regroup
from .ledger import Ledger
from .wishes import Wishes

PER_RANK = "per_rank"


@dataclass
class Stored:
    """The stored names as the live side would call them."""

    tensors: dict[str, TensorRow] = field(default_factory=dict)
    values: dict[str, tuple[Path, Any]] = field(default_factory=dict)
    nodes: dict[Path, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """Of the tensors."""
    numbers: dict[str, int] = field(default_factory=dict)
    """By name: row of the tensor, or the number of tensors and the position of the value. Equal on all ranks."""
    elsewhere: set[int] = field(default_factory=set)
    """Numbers of what belongs to roles that this rank does not hold: others account for it."""


def stored_names(
    checkpoint: Checkpoint, live: Live, wishes: Wishes, all_roles: bool, ledger: Ledger, problems: dict[str, str]
) -> Stored:
    """Everything that is stored and was asked for."""
    names = _Names(checkpoint, live, wishes, all_roles, ledger, problems)
    for tensor in checkpoint.index.tensors():
        names.add_tensor(tensor)
    for number, (raw_path, data) in enumerate(checkpoint.commit.values):
        names.add_value(path_of(raw_path), data, len(checkpoint.index) + number)
    names.add_values_of_this_rank()
    stored, ties = names.stored, Ties.of(checkpoint.index)
    follow_ties(stored.tensors, stored.paths, stored.values, live, ties)
    for role in [role for role, kind in live.roles.items() if kind == "optimizer"]:
        regroup(stored.values, live, role, ties, live.world == 1)
    return stored


class _Names:
    def __init__(
        self, checkpoint: Checkpoint, live: Live, wishes: Wishes, all_roles: bool, ledger: Ledger, problems: dict[str, str]
    ) -> None:
        self.stored = Stored()
        self._checkpoint, self._live, self._wishes = checkpoint, live, wishes
        self._all_roles, self._ledger, self._problems = all_roles, ledger, problems
        self._kinds = checkpoint.commit.roles
        self._renames = renamer(wishes.rename)
        self._apart = self._part_roles()

    def _part_roles(self) -> set[str]:
        """Roles whose states belong to another number of ranks than the live ones, and cannot be mapped: refused as a whole."""
        counts: dict[str, set[Any]] = {}
        paths = [path_of(raw) for raw, _ in self._checkpoint.commit.values]
        index = self._checkpoint.index
        for role in [role for role, kind in self._kinds.items() if kind == PER_RANK]:
            below = [t.path for t in index.tensors() if t.path[0] == role] + [p for p in paths if p[0] == role]
            counts[role] = {path[1:3] for path in below if len(path) > 2}
        apart = set()
        for role in self._live.roles:
            stream, before = self._live.streams.get(role), counts.get(role)
            if role not in self._kinds or (stream is None and before is None) or (stream is not None and stream.has_reshape):
                continue
            if stream is None or before is None:
                one, other = ("each rank", "the whole job") if stream is None else ("the whole job", "each rank")
                why = f"is stored as what belongs to {one}, and is live as what belongs to {other}"
            elif before != {(stream.axis, number) for number in range(stream.count)}:
                why = f"belongs to each of {len(before)} ranks where it is stored, and of {stream.count} here"
            else:
                continue
            hint = 'State(rng="reseed") derives new streams' if role == "rng" else "PerRank(..., reshape=) says how to map it"
            self._problems[role] = f"{why}: {hint}, or waive it to keep what is live"
            apart.add(role)
        return apart

    def add_tensor(self, tensor: TensorRow) -> None:
        if placed := self._place(tensor.name, tensor.path, tensor.row):
            name, self.stored.paths[placed[0]] = placed
            self.stored.tensors[name], self.stored.numbers[name] = tensor, tensor.row

    def add_value(self, path: Path, data: Any, number: int) -> None:
        if isinstance(data, dict) and NODE in data:
            self.stored.nodes[path] = data[NODE]
        elif placed := self._place(dotted(path), path, number):
            is_members = self._kinds.get(path[0]) == "optimizer" and path[-1] == "params" and isinstance(data, list)
            renamed = [rename(n, self._renames) for n in data] if is_members else data
            self.stored.values[placed[0]] = (placed[1], renamed)
            self.stored.numbers[placed[0]] = number

    def add_values_of_this_rank(self) -> None:
        """Values that differed by rank when they were saved: those of the rank at the same position in as large a world."""
        commit, live = self._checkpoint.commit, self._live
        if not commit.rank_values:
            return
        if commit.world == live.world:
            for raw_path, data in commit.rank_values.get(str(live.position), []):
                self.add_value(path_of(raw_path), data, -1)
        elif commit.world != live.world:
            paths = {dotted(path_of(raw)): path_of(raw) for pairs in commit.rank_values.values() for raw, _ in pairs}
            for name, path in paths.items():
                if placed := self._place(name, path, -1):
                    self._problems[placed[0]] = (
                        f"was saved by {commit.world} ranks with values that differ, and cannot be mapped to {live.world}: hold "
                        "it in holdfast.PerRank(..., reshape=), make it equal on all ranks, or waive it"
                    )

    def _place(self, name: str, path: Path, number: int) -> tuple[str, Path] | None:
        """The live name and path of a stored name; None if it was not asked for."""
        ours, moved = rename(name, self._renames), path
        if self._kinds.get(path[0]) == "optimizer" and len(path) > 2 and isinstance(path[1], str):
            moved = (path[0], rename(path[1], self._renames), *path[2:])  # moments go with their parameter
            if ours == name or ours == dotted(moved):
                ours = dotted(moved)
            else:
                moved = path
        if not self._is_asked_for(ours, name, path):
            self._ledger.skipped.append(name)
            if path[0] not in self._live.roles and self._wishes.wants(ours):
                self.stored.elsewhere.add(number)
            return None
        if ours in self.stored.tensors or ours in self.stored.values:
            before = self._ledger.renamed.get(ours, ours)
            self._problems[ours] = f"is what two stored names would become: {before} and {name}"
        if ours != name:
            self._ledger.renamed[ours] = name
            known: LiveTensor | LiveValue | None = self._live.tensors.get(ours)
            known = known or self._live.values.get(ours)
            if known is not None:
                moved = known.path
            elif moved == path:
                moved = (ours.partition(".")[0], ours.partition(".")[2])
        return ours, moved

    def _is_asked_for(self, ours: str, name: str, path: Path) -> bool:
        live = self._live
        if not self._wishes.wants(ours) or (not self._all_roles and path[0] not in live.roles and ours == name):
            return False
        if path[0] in self._apart:
            return False
        stream = live.streams.get(path[0])
        if stream is None or self._kinds.get(path[0]) != PER_RANK:
            return True
        return stream.has_reshape or path[1:3] == (stream.axis, stream.number)
