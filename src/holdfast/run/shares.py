"""What one rank holds, as a structure for the census, and its share of the writing, as the contents of its part."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from ..format.digest import hex_digest
from ..layout.layouts import Layout, Whole
from ..plan.save import Holding, Share, shares
from .census import Census, Common, Structure, compare
from .contents import Contents, TensorItem
from .image import ByteRange

Undeclared = list[tuple[TensorItem, tuple[int, ...]]]


def structure_of(contents: Contents) -> Structure:
    """The structure of what a rank holds. An alias has no bytes of its own, and so no part in it."""
    seen: dict[str, tuple[str, str, tuple[int, ...], Layout]] = {}
    for item in contents.tensors:
        if item.alias is None and item.role not in contents.streams:
            seen[item.name] = (item.name, item.dtype, tuple(item.shape), contents.layouts.get(item.name, Whole()))
    return Structure.of(list(seen.values()))


@dataclass(frozen=True)
class Plan:
    """What this writer writes, kept while the structure stays."""

    keys: list[tuple[str, tuple[int, ...]]]
    """`TensorItem.key` by number."""
    mine: list[Share]
    undeclared: list[Holding]
    """Holdings whose equality with others must be proved."""
    declared: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    """By key: digest of the layout that says that what others hold of it is equal."""


def plan(contents: Contents, census: Census, among: Collection[int] | None = None) -> Plan:
    """Who writes what of what this rank holds; computed alone.

    Args:
        among: ranks that share the writing out, each box among those of them that hold it; all where None.
    """
    keys: list[tuple[str, tuple[int, ...]]] = []
    holdings, undeclared = [], []
    declared: dict[tuple[str, tuple[int, ...]], str] = {}
    digests: dict[Layout, str] = {}
    for item in contents.tensors:
        if item.source is None:
            continue
        layout = contents.layouts.get(item.name, Whole())
        if (stream := contents.streams.get(item.role)) is not None:
            holders, is_declared = stream, len(stream) == 1
        else:
            holders, is_declared = census.holders(item.name, tuple(item.shape), layout)
            if is_declared and not isinstance(layout, Whole):
                declared[item.key] = digests.setdefault(layout, hex_digest(msgspec.msgpack.encode(layout)))
        if among is not None:
            holders = tuple(rank for rank in holders if rank in among)
            is_declared = is_declared or len(holders) == 1
        holding = Holding(len(keys), item.name, box_of(item), item.source.nbytes // max(1, math.prod(item.box_shape)), holders)
        keys.append(item.key)
        holdings.append(holding)
        if not is_declared:
            undeclared.append(holding)
    return Plan(keys, shares(holdings, census.rank), undeclared, declared)


def box_of(item: TensorItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of an item, that of the whole tensor where it has none of its own."""
    return item.box or ((0,) * len(item.shape), tuple(item.shape))


class Described(Protocol):
    """The structure of what one writer holds."""

    def digest(self) -> str: ...

    def encode(self) -> bytes: ...


class Sharing(Protocol):
    """How the members of a team come to know who writes what: each describes what it holds, the leader compares, all plan."""

    def describe(self, contents: Contents) -> Described: ...

    def compare(self, tables: Sequence[bytes], groups: Sequence[Sequence[int]]) -> bytes:
        """What the members' structures have in common.

        Args:
            tables: one for each group of members whose structures are equal.
        Raises:
            Refused: they cannot be one state.
        """
        ...

    def plan(self, contents: Contents, described: Any, common: bytes, member: int) -> Plan: ...


class ByRanks:
    """Between ranks, from the layouts of what each holds."""

    def describe(self, contents: Contents) -> Structure:
        return structure_of(contents)

    def compare(self, tables: Sequence[bytes], groups: Sequence[Sequence[int]]) -> bytes:
        return compare([Structure.decode(data) for data in tables], groups).encode()

    def plan(self, contents: Contents, described: Structure, common: bytes, member: int) -> Plan:
        return plan(contents, Census(described, Common.decode(common), member))


def share_of(item: TensorItem, share: Share) -> TensorItem:
    """The part of an item that a share is: some rows of it, which lie side by side."""
    assert item.source is not None
    box = box_of(item)
    if share.box == box:
        return item if item.box else replace(item, box=box)
    dim = next(d for d, n in enumerate(box[1]) if n > 1)
    row = item.source.nbytes // box[1][dim]
    start = (share.box[0][dim] - box[0][dim]) * row
    return replace(item, box=share.box, source=ByteRange(item.source, start, share.box[1][dim] * row))


def written_by(plan: Plan, contents: Contents) -> Contents:
    """The contents of this rank's part: its share of the bytes, and every tensor and alias that it knows."""
    held = _held(contents)
    mine = [share_of(held[plan.keys[share.key]], share) for share in plan.mine]
    named = {item.name for item in mine}
    known = [replace(item, source=None, box=None) for item in contents.tensors if item.alias is None and item.name not in named]
    aliases = [item for item in contents.tensors if item.alias is not None]
    order = {item.name: number for number, item in reversed(list(enumerate(contents.tensors)))}
    return replace(contents, tensors=sorted([*mine, *known, *aliases], key=lambda item: order[item.name]))


def undeclared_of(plan: Plan, contents: Contents) -> Undeclared:
    """What this rank holds with others without having declared it: the items, each with who holds the same."""
    held = _held(contents)
    return [(held[plan.keys[holding.key]], holding.holders) for holding in plan.undeclared]


def _held(contents: Contents) -> dict[tuple[str, tuple[int, ...]], TensorItem]:
    return {item.key: item for item in contents.tensors if item.source is not None}
