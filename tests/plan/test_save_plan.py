"""Shares of a save: those of all ranks together are every byte once, in equal parts, however each rank lists what it holds."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.layout.boxes import Box, covers_once
from holdfast.plan.image import CHUNK_BYTES
from holdfast.plan.save import Holding, Share, shares

Held = dict[int, list[Holding]]
"""By rank."""


@st.composite
def replicated(draw: st.DrawFn) -> Held:
    """Boxes of tensors of any size, each held by some of a few ranks; several boxes of one tensor, each by its own ranks."""
    world = draw(st.integers(1, 7))
    groups = draw(st.lists(st.lists(st.sampled_from(range(world)), min_size=1, unique=True), min_size=1, max_size=3))
    held: Held = {rank: [] for rank in range(world)}
    for number in range(draw(st.integers(1, 12))):
        shape, itemsize = draw(shapes()), draw(st.sampled_from([1, 2, 4, 8]))
        rows = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=2))}) if shape else []
        boxes: list[Box] = [((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in itertools.pairwise(rows)]
        for at, box in enumerate(boxes or [((0,) * len(shape), shape)]):
            holders = tuple(sorted(draw(st.sampled_from(groups))))
            for rank in holders:
                held[rank].append(Holding(1000 * number + at, f"tensor.{number}", box, itemsize, holders))
    return held


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """Scalars, empties, dims of 1, single rows, and boxes on both sides of two chunks."""
    rows = 2 * CHUNK_BYTES // 4096
    small = [(), (0,), (0, 3), (5, 0), (1,), (1, 1, 7), (3,)]
    about = [(rows - 1, 1024), (rows, 1024), (rows + 1, 1024), (2 * CHUNK_BYTES,), (2 * CHUNK_BYTES - 1,)]
    large = [(1, 2 * CHUNK_BYTES), (1, 1, rows, 1024), (2, rows * 4096), (7 * rows, 4096)]
    kinds = (*small, *about, *large)
    return draw(st.one_of(st.sampled_from(kinds), st.lists(st.integers(0, 4096), max_size=3).map(tuple)))


def all_shares(held: Held) -> dict[int, list[Share]]:
    return {rank: shares(holdings, rank) for rank, holdings in held.items()}


def holding_of(held: Held) -> dict[int, Holding]:
    return {holding.key: holding for holdings in held.values() for holding in holdings}


def written_bytes(mine: Sequence[Share], held: dict[int, Holding]) -> int:
    return sum(math.prod(share.box[1]) * held[share.key].itemsize for share in mine)


EMPTY_BEHIND = {
    rank: [Holding(0, "a", ((0,), (4,)), 4, (0, 1)), Holding(1, "b", ((0, 0), (0, 3)), 4, (0, 1))]
    + [Holding(number, f"c{number}", ((0,), (4,)), 4, (0, 1)) for number in range(2, 6)]
    for rank in (0, 1)
}


@settings(deadline=None)
@example(EMPTY_BEHIND)
@given(replicated())
def test_the_shares_of_all_ranks_are_every_byte_once(held: Held) -> None:
    boxes: dict[int, list[Box]] = {key: [] for key in holding_of(held)}
    for mine in all_shares(held).values():
        for share in mine:
            boxes[share.key].append(share.box)
    for key, holding in holding_of(held).items():
        offset, extent = holding.box
        inside = [(tuple(a - o for a, o in zip(box[0], offset, strict=True)), box[1]) for box in boxes[key]]
        assert covers_once(extent, inside) is None, (holding, boxes[key])


@settings(deadline=None)
@example(EMPTY_BEHIND)
@given(replicated())
def test_what_is_small_or_empty_is_written_whole_by_exactly_one_rank(held: Held) -> None:
    found = Counter(share.key for mine in all_shares(held).values() for share in mine)
    for key, holding in holding_of(held).items():
        if holding.nbytes < 2 * CHUNK_BYTES:
            assert found[key] == 1, holding
        assert found[key] <= len(holding.holders)


@settings(deadline=None)
@given(replicated())
def test_a_rank_writes_only_what_it_holds_whole_rows_of_it_and_in_its_order(held: Held) -> None:
    for rank, mine in all_shares(held).items():
        keys = [holding.key for holding in held[rank]]
        assert [share.key for share in mine] == sorted((share.key for share in mine), key=keys.index)
        for share in mine:
            box = holding_of(held)[share.key].box
            cut = [d for d, (n, m) in enumerate(zip(share.box[1], box[1], strict=True)) if n != m]
            assert not cut or (len(cut) == 1 and all(n == 1 for n in box[1][: cut[0]])), "its bytes would not lie side by side"


@settings(deadline=None)
@given(replicated(), st.randoms(use_true_random=False))
def test_the_order_in_which_a_rank_lists_what_it_holds_changes_nothing(held: Held, chance: random.Random) -> None:
    before = all_shares(held)
    for rank, holdings in held.items():
        mixed = chance.sample(holdings, len(holdings))
        assert sorted(shares(mixed, rank), key=repr) == sorted(before[rank], key=repr)


@settings(deadline=None)
@given(replicated())
def test_no_rank_writes_more_than_its_part_of_a_bucket_and_a_granule_at_each_end(held: Held) -> None:
    known = holding_of(held)
    for holders in {holding.holders for holding in known.values()}:
        bucket = {key: holding for key, holding in known.items() if holding.holders == holders}
        granule = 0
        for holding in bucket.values():
            rows = next((n for n in holding.box[1] if n > 1), 1)
            large = holding.nbytes >= 2 * CHUNK_BYTES
            granule = max(granule, holding.nbytes // rows if large else holding.nbytes)
        total = sum(holding.nbytes for holding in bucket.values())
        for rank in holders:
            mine = [share for share in shares(held[rank], rank) if share.key in bucket]
            assert written_bytes(mine, bucket) <= total / len(holders) + 2 * granule


def layer(width: int, hidden: int, holders: tuple[int, ...]) -> list[Holding]:
    sizes = {"wq": (width, width), "wk": (width // 8, width), "wv": (width // 8, width), "wo": (width, width),
             "w1": (hidden, width), "w2": (width, hidden), "w3": (hidden, width), "norm": (width,)}  # fmt: skip
    return [
        Holding(number, f"model.layers.{number // 8}.{name}", ((0,) * len(shape), shape), 4, holders)
        for number, (name, shape) in enumerate(list(sizes.items()) * 4)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8, 16, 61])
@pytest.mark.parametrize("width", [2048, 4096])
def test_large_tensors_are_balanced_within_a_tenth(width: int, ranks: int) -> None:
    holdings = layer(width, 4 * width, tuple(range(ranks)))
    known = {holding.key: holding for holding in holdings}
    sizes = [written_bytes(shares(holdings, rank), known) for rank in range(ranks)]
    assert sum(sizes) == sum(holding.nbytes for holding in holdings)
    assert max(sizes) <= 1.1 * sum(sizes) / ranks


def test_many_small_buckets_do_not_fall_to_the_same_ranks() -> None:
    ranks = tuple(range(8))
    count: Counter[int] = Counter()
    for number in range(400):
        one = [Holding(0, f"counters.{number}", ((), ()), 8, ranks)]
        count.update(rank for rank in ranks if shares(one, rank))
    assert set(count) == set(ranks)
    assert max(count.values()) <= 2 * 400 / 8


def test_what_one_rank_holds_alone_it_writes_as_it_is() -> None:
    held = [Holding(3, "b", ((8, 0), (4096, 4096)), 4, (5,)), Holding(1, "a", ((), ()), 4, (5,))]
    assert shares(held, 5) == [Share(3, ((8, 0), (4096, 4096))), Share(1, ((), ()))]
