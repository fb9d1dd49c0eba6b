"""The division of what the ranks of a node need: who reads what alone, who reads what for others, and where it lies meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.index import Chunks
from holdfast.plan.exchange import ALIGNMENT, Sharing, plan_sharing, slot_bytes

Cases = st.integers(0, 2**32 - 1)


def chunks_of(sizes: Any, rng: np.random.Generator) -> Chunks:
    """Raw chunks of these sizes, in the order of the index, one after the other in two files, shuffled."""
    count = len(sizes)
    order = rng.permutation(count)
    file, offset = np.zeros(count, np.uint32), np.zeros(count, np.int64)
    file[order[count // 2 :]] = 1
    for number in (0, 1):
        rows = order[file[order] == number]
        offset[rows] = 4096 + np.cumsum(sizes[rows]) - sizes[rows]
    none = np.zeros(count, np.uint32)
    raw = sizes.astype(np.uint32)
    return Chunks(none, none, none, raw, file, offset, raw, none, none, np.zeros((count, 16), np.uint8), none)


def case(seed: int, ranks: int, twins: int = 1) -> tuple[Chunks, np.ndarray, list[Sharing], int]:
    """Chunks, who needs which, what each rank makes of it, and the slot."""
    rng = np.random.default_rng(seed)
    chunks = chunks_of(rng.integers(1, 5000, rng.integers(0, 300)), rng)
    needs = rng.random((ranks, len(chunks))) < rng.choice([0.02, 0.5, 1.0])
    packed = [np.packbits(need) for need in needs]
    slot = slot_bytes(chunks, int(rng.integers(64, 40000)))
    return chunks, needs, [plan_sharing(chunks, packed, position, slot, twins) for position in range(ranks)], slot


@settings(max_examples=200, deadline=None)
@given(Cases, st.integers(1, 6), st.integers(1, 3))
def test_all_ranks_make_the_same_of_it_and_each_gets_what_it_needs(seed: int, ranks: int, twins: int) -> None:
    _, needs, plans, _ = case(seed, ranks, twins)
    for position, plan in enumerate(plans):
        for name in ("shared", "reader", "at", "first"):
            np.testing.assert_array_equal(getattr(plan, name), getattr(plans[0], name))
        got = np.sort(np.concatenate([plan.alone, plan.shared[plan.is_mine]]))
        np.testing.assert_array_equal(got, np.flatnonzero(needs[position]))


@settings(max_examples=200, deadline=None)
@given(Cases, st.integers(2, 6))
def test_what_is_read_is_little_more_than_what_is_needed(seed: int, ranks: int) -> None:
    chunks, needs, plans, _ = case(seed, ranks)
    stored = chunks.stored_bytes.astype(np.int64)
    read = sum(int(stored[plan.alone].sum()) for plan in plans) + int(stored[plans[0].shared].sum())
    assert read <= 1.03 * int(stored[needs.any(axis=0)].sum())


@settings(max_examples=200, deadline=None)
@given(Cases, st.integers(1, 6), st.integers(1, 3))
def test_chunks_of_a_window_lie_apart_in_their_slot_in_file_order(seed: int, ranks: int, twins: int) -> None:
    chunks, _, (plan, *_), slot = case(seed, ranks, twins)
    assert plan.first[0] == 0
    assert plan.first[-1] == len(plan.shared)
    places = chunks.file[plan.shared].astype(np.int64) << 40 | chunks.offset[plan.shared]
    assert (np.diff(places) > 0).all()
    assert (plan.at % ALIGNMENT == 0).all()
    for low, high in zip(plan.first[:-1], plan.first[1:], strict=True):
        stops = plan.at[low:high] + chunks.raw_bytes[plan.shared[low:high]]
        assert low < high
        assert plan.at[low] == 0
        assert (plan.at[low + 1 : high] >= stops[:-1]).all()
        assert stops[-1] <= slot


@settings(max_examples=200, deadline=None)
@given(Cases, st.integers(1, 6), st.integers(1, 3))
def test_readers_read_runs_and_their_loads_stay_level(seed: int, ranks: int, twins: int) -> None:
    chunks, _, (plan, *_), _ = case(seed, ranks, twins)
    stored = chunks.stored_bytes[plan.shared].astype(np.int64)
    parts = [plan.part(window, reader) for window in range(plan.windows) for reader in range(ranks * twins)]
    assert [number for low, high in parts for number in range(low, high)] == list(range(len(plan.shared)))
    for stop in plan.first[1:].tolist():
        loads = np.bincount(plan.reader[:stop], stored[:stop], ranks * twins)
        assert loads.max() - loads.min() <= 2 * stored[:stop].max()
