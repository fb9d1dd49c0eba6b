"""Parameter groups and tied parameters across layouts: hyper-parameters and moments follow the names of parameters.

A rank's groups may have other numbers and fewer members than the stored ones, and a parameter that is tied in one layout may
stand twice in another, as the embedding of a pipeline's first and last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..format import values
from ..format.index import Index, TensorRow
from ..format.names import dotted
from ..live import Live
from .checkpoint import Checkpoint

GROUPS, MEMBERS = "param_groups", ("params",)
Path = tuple[Any, ...]
StoredValues = dict[str, tuple[Path, Any]]


@dataclass
class Ties:
    """Names of parameters that are one tensor, as the checkpoint has them."""

    canonical: dict[str, str] = field(default_factory=dict)
    """Alias to the name that holds the bytes."""

    @classmethod
    def of(cls, index: Index) -> Ties:
        alias = index.column("tensor.alias", 0, len(index))
        rows = (alias >= 0).nonzero()[0].tolist()
        return cls({str(index.names[row]): str(index.names[int(alias[row])]) for row in rows})

    def holder(self, name: str) -> str:
        return self.canonical.get(name, name)


@dataclass
class _Group:
    members: list[str] = field(default_factory=list)
    settings: dict[Path, Any] = field(default_factory=dict)
    """Typed JSON by what follows the group's number in the path."""


def regroup(stored: StoredValues, live: Live, role: str, ties: Ties, is_whole: bool) -> None:
    """Give the stored values of a role's parameter groups the numbers of the live groups that have the same members.

    Nothing is changed where the groups are the same, or cannot be matched: then the differences are refused by name.

    Args:
        is_whole: whether this process holds all groups, so that every stored member must be live.
    """
    theirs, ours = _stored_groups(stored, role), members_of(live, role)
    if not theirs or not ours or {n: g.members for n, g in theirs.items()} == ours:
        return
    home = {ties.holder(name): number for number, group in theirs.items() for name in group.members}
    chosen: dict[int, int] = {}
    for number, members in ours.items():
        found = {home.get(ties.holder(name), -1) for name in members} or {number}
        if -1 in found or not found <= theirs.keys() or any(theirs[n].settings != theirs[min(found)].settings for n in found):
            return
        chosen[number] = min(found)
    if is_whole and not all(_is_live(name, live, ours, ties) for group in theirs.values() for name in group.members):
        return
    for name in [n for n, (path, _) in stored.items() if path[:2] == (role, GROUPS)]:
        del stored[name]
    for number, source in chosen.items():
        settings = theirs[source].settings | {MEMBERS: values.encode(ours[number], f"{role}.{GROUPS}")}
        for tail, data in settings.items():
            path = (role, GROUPS, number, *tail)
            stored[dotted(path)] = (path, data)


def follow_ties(tensors: dict[str, TensorRow], paths: dict[str, Path], stored: StoredValues, live: Live, ties: Ties) -> None:
    """Let the moments of a parameter that was tied go to the names under which live optimizers have it, if those are others."""
    for role in [role for role, kind in live.roles.items() if kind == "optimizer"]:
        members = {name for group in members_of(live, role).values() for name in group}
        for alias, holder in ties.canonical.items():
            if alias not in members:
                continue
            for name in [n for n, path in paths.items() if path[:2] == (role, holder)]:
                path = (role, alias, *paths[name][2:])
                tensors[dotted(path)], paths[dotted(path)] = tensors[name], path
                if holder not in members:
                    del tensors[name], paths[name]
            for name in [n for n, (path, _) in stored.items() if path[:2] == (role, holder)]:
                path = (role, alias, *stored[name][0][2:])
                stored[dotted(path)] = (path, stored[name][1])
                if holder not in members:
                    del stored[name]


def twin_of(path: Path, live: Live) -> str | None:
    """For the stored path of a moment whose parameter is tied to another here: the name under that one; else None."""
    if len(path) < 3 or live.roles.get(path[0]) != "optimizer" or not isinstance(path[1], str):
        return None
    parameter = live.tensors.get(path[1])
    return dotted((path[0], parameter.alias, *path[2:])) if parameter is not None and parameter.alias else None


def same_bytes(checkpoint: Checkpoint, one: TensorRow, other: TensorRow) -> bool:
    """Whether two stored tensors are equal: by the digests of their chunks where they are cut alike, else by reading both."""
    index = checkpoint.index
    one, other = index.canonical(one), index.canonical(other)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = ([(index.box(t, e), index.chunks(e)) for e in index.entries(t)] for t in (one, other))
    if [(box, c.raw_bytes.tolist()) for box, c in left] == [(box, c.raw_bytes.tolist()) for box, c in right]:
        return all(bool((a.digest == b.digest).all()) for (_, a), (_, b) in zip(left, right, strict=True))
    return checkpoint.digest(one.name) == checkpoint.digest(other.name)


def members_of(live: Live, role: str) -> dict[int, list[str]]:
    """Names of the parameters of each live group of a role, by the group's number."""
    items = [v for v in live.values.values() if v.path[:2] == (role, GROUPS) and v.path[3:] == MEMBERS]
    return {item.path[2]: list(item.value) for item in items}


def _stored_groups(stored: StoredValues, role: str) -> dict[int, _Group]:
    groups: dict[int, _Group] = {}
    for path, data in stored.values():
        if len(path) < 4 or path[:2] != (role, GROUPS):
            continue
        group = groups.setdefault(path[2], _Group())
        if path[3:] == MEMBERS:
            group.members = list(data)
        else:
            group.settings[path[3:]] = data
    return groups


def _is_live(name: str, live: Live, ours: dict[int, list[str]], ties: Ties) -> bool:
    """Whether a stored member is one of a live group, or tied to one, there or here."""
    members = {n for group in ours.values() for n in group}
    tied = live.tensors[name].alias if name in live.tensors else None
    return name in members or tied in members or ties.holder(name) in {ties.holder(n) for n in members}
