"""Who holds what: found out once, when the structure of the state changes, and kept.

A rank's structure is its table of names, dtypes, shapes and layouts: the same for all ranks of a structure group, and each save
sends only its digest. One rank of each new group publishes the table; the leader answers with what the groups have in common.
From that each rank computes alone who else holds its boxes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from ..errors import Refused
from ..format.digest import hex_digest
from ..layout.layouts import Layout, Piece, Whole

Shape = tuple[int, ...]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a structure."""

    name: str
    dtype: str
    shape: Shape
    layout: int
    """Row of the structure's layouts."""


class Structure(msgspec.Struct, frozen=True):
    """The tensors that the ranks of a structure group know, in order of their names."""

    rows: tuple[Row, ...]
    layouts: tuple[Layout, ...]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, str, Shape, Layout]]) -> Structure:
        """The structure of a rank that knows these tensors: name, dtype, global shape, layout."""
        layouts: dict[Layout, int] = {}
        rows = [Row(n, d, s, layouts.setdefault(layout, len(layouts))) for n, d, s, layout in sorted(tensors, key=lambda t: t[0])]
        return cls(tuple(rows), tuple(layouts))

    def encode(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, data: bytes) -> Structure:
        return msgspec.msgpack.decode(zlib.decompress(data), type=cls)

    def digest(self) -> str:
        return hex_digest(msgspec.msgpack.encode(self))


class Common(msgspec.Struct, frozen=True):
    """What the structure groups have in common: the leader's answer."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks of each structure group, ascending."""
    shared: dict[str, tuple[tuple[int, Layout], ...]]
    """Names that several groups know: (group, layout) pairs."""

    def digest(self) -> str:
        return hex_digest(msgspec.msgpack.encode(self, order="sorted"))

    def encode(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, data: bytes) -> Common:
        return msgspec.msgpack.decode(zlib.decompress(data), type=cls)


def compare(structures: Sequence[Structure], groups: Sequence[Sequence[int]]) -> Common:
    """What structure groups have in common.

    Raises:
        Refused: two groups give one name another dtype or global shape.
    """
    known: dict[str, list[tuple[int, Row]]] = {}
    for number, structure in enumerate(structures):
        for row in structure.rows:
            known.setdefault(row.name, []).append((number, row))
    shared = {}
    for name, found in known.items():
        if len(found) < 2:
            continue
        first, row = found[0]
        for number, other in found[1:]:
            if (other.dtype, other.shape) != (row.dtype, row.shape):
                raise Refused(
                    f"{name} is {row.dtype} {list(row.shape)} on rank {groups[first][0]}, and {other.dtype} {list(other.shape)} "
                    f"on rank {groups[number][0]}: give different tensors different names, or wrap them in holdfast.PerRank"
                )
        shared[name] = tuple((number, structures[number].layouts[row.layout]) for number, row in found)
    return Common(tuple(tuple(sorted(g)) for g in groups), shared)


@dataclass
class Census:
    """What one rank knows of all: for each of its tensors, who holds the same boxes."""

    structure: Structure
    common: Common
    rank: int
    _holders: dict[str, tuple[tuple[int, ...], bool]] = field(default_factory=dict)

    def holders(self, name: str, shape: Shape, layout: Layout) -> tuple[tuple[int, ...], bool]:
        """The ranks that hold exactly what this rank holds of a tensor, ascending; and whether that is declared by its layout,
        rather than found out, so that equal bytes need no proof."""
        if name not in self._holders:
            declared = layout.holders(shape, self.rank)
            found = set(declared)
            ours = layout.pieces(shape, self.rank)
            for group, other in self.common.shared.get(name, ((self._group, layout),)):
                found |= self._same(ours, shape, layout, self.common.groups[group], other)
            self._holders[name] = tuple(sorted(found)), found == set(declared)
        return self._holders[name]

    @cached_property
    def _group(self) -> int:
        return next(number for number, ranks in enumerate(self.common.groups) if self.rank in ranks)

    def _same(self, ours: list[Piece], shape: Shape, layout: Layout, group: tuple[int, ...], other: Layout) -> set[int]:
        """Those of another layout's ranks that hold the same boxes."""
        if isinstance(other, Whole):
            return set(group) if _boxes(ours) == _boxes(other.pieces(shape, 0)) else set()
        if other == layout:
            return set()
        return {rank for rank in other.members() if _boxes(other.pieces(shape, rank)) == _boxes(ours)} if ours else set()


def _boxes(pieces: list[Piece]) -> list[object]:
    return [piece.box for piece in pieces]
