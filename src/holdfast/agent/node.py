"""The contents of a step as one node of several holds it: each box that its ranks hold once, whoever captured its rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ..errors import Refused
from ..format.names import path_of
from ..run.contents import Contents, TensorItem
from ..run.image import Source
from .arena import Bytes
from .contents import Taken
from .gate import ArenaSource
from .messages import Row

_Box = tuple[tuple[int, ...], tuple[int, ...]]


class Chained:
    """The bytes of several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = list(sources)
        self._starts = [0]
        for source in sources:
            self._starts.append(self._starts[-1] + source.nbytes)
        self.nbytes = self._starts[-1]

    def copy_into(self, start: int, out: Bytes) -> None:
        at, number = 0, bisect_right(self._starts, start) - 1
        while at < len(out):
            source, skip = self._sources[number], start + at - self._starts[number]
            size = min(len(out) - at, source.nbytes - skip)
            if size > 0:
                source.copy_into(skip, out[at : at + size])
            at, number = at + size, number + 1


def node_contents(taken: Sequence[Taken], positions: Mapping[int, int]) -> Contents:
    """What the ranks of a node hold together. Their bytes may still be on their way.

    Args:
        taken: by ascending rank. positions: of the ranks in the job, by rank: values stay apart until those of all nodes meet.
    Raises:
        Refused: two ranks have captured the same rows of a box.
    """
    tensors, declared = _tensors(taken)
    return Contents(
        tensors,
        rank_values={str(positions[one.rank]): one.begin.values for one in taken},
        roles={role: kind for one in taken for role, kind in one.begin.roles.items()},
        declared=declared,
    )


def held_box(row: Row) -> _Box:
    """The box that the ranks of a node have captured together, each some rows of it."""
    offset, extent = row.held or row.box or ((0,) * len(row.shape), row.shape)
    return tuple(offset), tuple(extent)


def first_row(row: Row) -> tuple[int, ...]:
    """Where what a rank has captured of it begins: ascending as the bytes of the box do."""
    return tuple(row.box[0]) if row.box else (0,) * len(row.shape)


def _tensors(taken: Sequence[Taken]) -> tuple[list[TensorItem], dict[tuple[str, tuple[int, ...]], str]]:
    cuts: dict[tuple[str, _Box], list[tuple[tuple[int, ...], Row, Taken]]] = {}
    known: dict[str, TensorItem] = {}
    for one in taken:
        for row in one.table.rows:
            if row.at < 0:
                known.setdefault(row.name, _item(row))
            else:
                cuts.setdefault((row.name, held_box(row)), []).append((first_row(row), row, one))
    found: list[TensorItem] = []
    declared: dict[tuple[str, tuple[int, ...]], str] = {}
    for (name, box), rows in cuts.items():
        item = replace(_item(rows[0][1]), source=_source(rows), box=box)
        if item.key in declared:
            raise Refused(f"{name}: ranks of this node hold boxes of several sizes at {list(box[0])} of it; they overlap")
        declared[item.key] = rows[0][1].declared if len({row.declared for _, row, _ in rows}) == 1 else ""
        found.append(item)
    names = {item.name for item in found}
    return found + [item for name, item in known.items() if name not in names], declared


def _source(rows: list[tuple[tuple[int, ...], Row, Taken]]) -> Source:
    """Raises:
    Refused: two ranks have the same rows.
    """
    rows.sort(key=lambda one: (one[0], one[2].rank))
    for (first, row, one), (second, _, other) in pairwise(rows):
        if first == second and row.nbytes:
            raise Refused(
                f"{row.name}: ranks {one.rank} and {other.rank} both write what lies at {list(first)} of it; "
                "give different tensors different names, or wrap them in holdfast.PerRank"
            )
    sources = [ArenaSource(one.slot, row.at, row.nbytes, one.gate, row.ready) for _, row, one in rows]
    return sources[0] if len(sources) == 1 else Chained(sources)


def _item(row: Row) -> TensorItem:
    """The tensor of a row, without bytes."""
    return TensorItem(row.name, path_of(row.path), row.dtype, row.shape, row.role, None, row.owner, row.alias, None)
