"""Who writes what between nodes: each box that several nodes hold is shared out among them, and what one has it writes whole.

The ranks of a node have shared out among themselves what they hold, so that its agent has each of their boxes once. Boxes are
the same on all nodes that hold them, whoever of their ranks captured which rows: they are those of the ranks' layouts.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import msgspec

from ..errors import Refused
from ..format.digest import hex_digest
from ..plan.save import Holding, shares
from .contents import Contents
from .shares import Plan, box_of

_Key = tuple[str, tuple[int, ...], tuple[int, ...]]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One box that a node holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    declared: str
    """Digest of the layout that says that all who hold this box have the same bytes; empty where nothing does."""

    @property
    def key(self) -> _Key:
        return self.name, self.offset, self.extent


class Holdings(msgspec.Struct, frozen=True):
    """All that a node holds, in order."""

    rows: tuple[Held, ...]

    def encode(self) -> bytes:
        return zlib.compress(msgspec.msgpack.encode(self), 1)

    @classmethod
    def decode(cls, data: bytes) -> Holdings:
        return msgspec.msgpack.decode(zlib.decompress(data), type=cls)

    def digest(self) -> str:
        return hex_digest(msgspec.msgpack.encode(self))


class Shared(msgspec.Struct, frozen=True):
    """What several nodes hold: the leader's answer."""

    groups: tuple[tuple[int, ...], ...]
    """Members whose holdings are equal, ascending."""
    boxes: tuple[tuple[_Key, tuple[int, ...], bool], ...]
    """Of each box that several groups hold: their numbers, and whether it is declared that they have the same bytes."""


class ByNodes:
    """Between nodes, from the boxes that each holds."""

    def describe(self, contents: Contents) -> Holdings:
        rows = []
        for item in contents.tensors:
            if item.source is not None:
                offset, extent = box_of(item)
                declared = contents.declared.get(item.key, "")
                rows.append(Held(item.name, item.dtype, tuple(item.shape), tuple(offset), tuple(extent), declared))
        return Holdings(tuple(sorted(rows, key=lambda row: row.key)))

    def compare(self, tables: Sequence[bytes], groups: Sequence[Sequence[int]]) -> bytes:
        """Raises:
        Refused: two nodes give one box another dtype, or the tensor another shape.
        """
        found: dict[_Key, list[tuple[int, Held]]] = {}
        for number, table in enumerate(tables):
            for row in Holdings.decode(table).rows:
                found.setdefault(row.key, []).append((number, row))
        boxes = []
        for key, held in found.items():
            first = held[0][1]
            for number, row in held[1:]:
                if (row.dtype, row.shape) != (first.dtype, first.shape):
                    raise Refused(
                        f"{row.name} is {first.dtype} {list(first.shape)} on the node of rank {groups[held[0][0]][0]}, and "
                        f"{row.dtype} {list(row.shape)} on that of rank {groups[number][0]}: give different tensors different "
                        "names, or wrap them in holdfast.PerRank"
                    )
            if len(held) > 1:
                is_declared = first.declared != "" and len({row.declared for _, row in held}) == 1
                boxes.append((key, tuple(number for number, _ in held), is_declared))
        return zlib.compress(msgspec.msgpack.encode(Shared(tuple(tuple(sorted(g)) for g in groups), tuple(boxes))), 1)

    def plan(self, contents: Contents, described: Holdings, common: bytes, member: int) -> Plan:
        shared = msgspec.msgpack.decode(zlib.decompress(common), type=Shared)
        alike = next(group for group in shared.groups if member in group)
        others = {key: (groups, is_declared) for key, groups, is_declared in shared.boxes}
        declared = {row.key: row.declared != "" for row in described.rows}
        keys: list[tuple[str, tuple[int, ...]]] = []
        holdings, undeclared = [], []
        for item in contents.tensors:
            if item.source is None:
                continue
            box = box_of(item)
            key = (item.name, tuple(box[0]), tuple(box[1]))
            groups, is_declared = others.get(key, ((), declared[key]))
            holders = tuple(sorted(m for number in groups for m in shared.groups[number])) or alike
            holding = Holding(len(keys), item.name, box, item.source.nbytes // max(1, math.prod(box[1])), holders)
            keys.append(item.key)
            holdings.append(holding)
            if not is_declared and len(holders) > 1:
                undeclared.append(holding)
        return Plan(keys, shares(holdings, member), undeclared)
