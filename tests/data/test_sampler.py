"""One global position: however ranks and batch sizes change on the way, each epoch gives every sample exactly once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.data import Sampler


@dataclass(frozen=True)
class Phase:
    """A part of a job's life, from one resume to the next."""

    world: int
    batch_size: int
    batches: int
    """Global batches that are consumed before the job stops."""


PHASES = st.lists(st.builds(Phase, st.integers(1, 5), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=8)


def ranks_of(phase: Phase, length: int, **options: Any) -> list[Sampler]:
    return [Sampler(length, batch_size=phase.batch_size, rank=r, world=phase.world, **options) for r in range(phase.world)]


def run(phases: list[Phase], length: int, **options: Any) -> tuple[list[tuple[int, list[list[int]]]], dict[str, Any]]:
    """(epoch, the ranks' batches) of each global batch that was consumed, and the last state; states agree all the way."""
    state: dict[str, Any] | None = None
    seen = []
    for phase in phases:
        samplers = ranks_of(phase, length, **options)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        left = phase.batches
        while True:
            epoch = samplers[0].epoch
            expected = len(samplers[0])
            dealt = list(zip(*samplers, strict=True))  # all of the epoch is fetched before anything is consumed
            assert len(dealt) == expected
            assert all(sampler.epoch == epoch for sampler in samplers)
            for batch in dealt[:left]:
                seen.append((epoch, list(batch)))
                for sampler in samplers:
                    sampler.advance()
            left -= min(left, len(dealt))
            states = [sampler.state_dict() for sampler in samplers]
            assert all(s == states[0] for s in states)
            if not left:
                break
        state = states[0]
    assert state is not None
    return seen, state


def by_epoch(seen: list[tuple[int, list[list[int]]]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for epoch, batches in seen:
        found.setdefault(epoch, []).extend(sample for batch in batches for sample in batch)
    return found


@settings(max_examples=80, deadline=None)
@given(phases=PHASES, length=st.integers(1, 40), seed=st.integers(0, 3), shuffle=st.booleans())
def test_every_sample_of_every_epoch_comes_once_whatever_changes(
    phases: list[Phase], length: int, seed: int, shuffle: bool
) -> None:
    seen, state = run(phases, length, seed=seed, shuffle=shuffle)
    epochs = by_epoch(seen)
    for epoch, samples in epochs.items():
        assert len(set(samples)) == len(samples), "a sample came twice"
        if epoch < state["epoch"]:
            assert sorted(samples) == list(range(length)), "a sample was lost"
    assert state["position"] == len(epochs.get(state["epoch"], []))


@settings(max_examples=60, deadline=None)
@given(phases=PHASES, length=st.integers(1, 40), seed=st.integers(0, 3))
def test_the_samples_come_in_the_order_of_the_epoch_on_any_number_of_ranks(phases: list[Phase], length: int, seed: int) -> None:
    seen, state = run(phases, length, seed=seed)
    for epoch, samples in by_epoch(seen).items():
        alone = Sampler(length, batch_size=length, rank=0, world=1, seed=seed)
        alone.load_state_dict(state | {"epoch": epoch, "position": 0})
        assert samples == next(iter(alone))[: len(samples)]


@settings(max_examples=60, deadline=None)
@given(phases=PHASES, length=st.integers(25, 60))
def test_drop_last_gives_whole_batches_only_and_leaves_out_less_than_one(phases: list[Phase], length: int) -> None:
    seen, state = run(phases, length, drop_last=True)
    for (_, batches), phase in zip(seen, [p for p in phases for _ in range(p.batches)], strict=True):
        assert [len(batch) for batch in batches] == [phase.batch_size] * phase.world
    for epoch, samples in by_epoch(seen).items():
        assert len(set(samples)) == len(samples)
        if epoch < state["epoch"]:
            assert length - len(samples) < max(p.world * p.batch_size for p in phases)


SPANS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)).map(lambda s: (s[0], s[0] + s[1])), max_size=4)


@settings(max_examples=80, deadline=None)
@given(phases=PHASES, length=st.integers(1, 30), skip=SPANS)
def test_skipped_positions_are_left_out_and_nothing_else(phases: list[Phase], length: int, skip: list[tuple[int, int]]) -> None:
    seen, state = run(phases, length, skip=skip)
    alone = Sampler(length, batch_size=1, rank=0, world=1)
    expected = Counter()
    for position in range(state["epoch"] * length + state["position"]):
        if not any(start <= position < stop for start, stop in skip):
            expected[position // length, alone.samples([(position, position + 1)])[0]] += 1
    assert Counter((epoch, s) for epoch, batches in seen for batch in batches for s in batch) == expected


@settings(deadline=None)
@given(world=st.integers(1, 9), batch_size=st.integers(1, 6), length=st.integers(1, 60))
def test_shares_of_the_last_batch_differ_by_one_sample_at_most(world: int, batch_size: int, length: int) -> None:
    phase = Phase(world, batch_size, 0)
    last = [list(sampler)[-1] for sampler in ranks_of(phase, length)]
    sizes = [len(batch) for batch in last]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_with_fewer_samples_left_than_ranks_some_batches_are_empty_and_all_ranks_have_equally_many() -> None:
    dealt = [list(s) for s in ranks_of(Phase(4, 2, 0), 10, shuffle=False)]
    assert dealt == [[[0, 1], [8]], [[2, 3], [9]], [[4, 5], []], [[6, 7], []]]


def test_the_same_global_batch_is_split_over_ranks_without_changing_it() -> None:
    def global_batches(world: int, batch_size: int) -> list[list[int]]:
        return [[sample for share in batch for sample in share] for _, batch in run([Phase(world, batch_size, 6)], 40)[0]]

    assert global_batches(1, 12) == global_batches(2, 6) == global_batches(3, 4) == global_batches(12, 1)


def test_what_is_fetched_ahead_does_not_move_the_position() -> None:
    sampler = Sampler(100, batch_size=10)
    fetched = iter(sampler)
    for _ in range(7):
        next(fetched)
    assert sampler.position == 0
    sampler.advance(3)
    assert sampler.position == 30
    assert len(sampler) == 7


def test_a_pass_that_was_left_is_gone_on_with() -> None:
    sampler = Sampler(10, batch_size=2, shuffle=False)
    assert next(iter(sampler)) == [0, 1]
    sampler.advance()
    assert list(sampler) == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_batch_size_may_grow_in_the_middle_of_an_epoch() -> None:
    sampler = Sampler(20, batch_size=2, shuffle=False)
    fetched = iter(sampler)
    next(fetched)
    sampler.batch_size = 4
    assert next(fetched) == [2, 3], "what is on its way was dealt by the old rules, and is counted by them"
    sampler.advance(2)
    assert sampler.position == 4
    assert list(sampler) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]
    sampler.advance()
    assert sampler.position == 8


def test_ranges_to_skip_may_be_given_late_and_travel_with_the_state() -> None:
    sampler = Sampler(10, batch_size=2, shuffle=False)
    sampler.skip = [(4, 6), (2, 4), (7, 7)]
    assert sampler.skip == ((2, 6),)
    other = Sampler(10, batch_size=1, shuffle=False, skip=[(8, 9)])
    other.load_state_dict(sampler.state_dict())
    assert [b[0] for b in other] == [0, 1, 6, 7, 9]
    other.advance(5)
    assert other.state_dict()["skip"] == [], "what lies behind is forgotten"
    assert other.position == 10


def test_a_whole_epoch_may_be_skipped() -> None:
    sampler = Sampler(10, batch_size=5, shuffle=False, skip=[(8, 31)])
    assert list(sampler) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    sampler.advance(2)
    assert (sampler.epoch, sampler.position) == (3, 31)


@pytest.mark.parametrize("change", [{"length": 11}, {"seed": 1}, {"shuffle": False}])
def test_a_state_of_another_order_is_refused_unless_told(change: dict[str, Any]) -> None:
    old = Sampler(10, batch_size=2)
    old.advance(2)
    length, options = change.get("length", 10), {k: v for k, v in change.items() if k != "length"}
    new = Sampler(length, batch_size=2, **options)
    new.advance()
    with pytest.raises(holdfast.Mismatch, match="allow_change=True") as error:
        new.load_state_dict(old.state_dict())
    assert len(error.value.differences) == 1
    assert new.position == 2, "it is as it was"
    told = Sampler(length, batch_size=2, allow_change=True, **options)
    told.load_state_dict(old.state_dict())
    assert (told.epoch, told.position) == (1, length), "the epoch that was begun has no rest in the new order"


def test_another_drop_last_batch_size_or_world_is_no_other_order() -> None:
    old = Sampler(10, batch_size=2)
    old.advance()
    new = Sampler(10, batch_size=3, rank=1, world=2, drop_last=True)
    new.load_state_dict(old.state_dict())
    assert new.position == 2


def test_reading_a_second_epoch_without_counting_the_first_is_refused() -> None:
    sampler = Sampler(10, batch_size=2)
    list(sampler)
    with pytest.raises(holdfast.Refused, match="advance"):
        iter(sampler)
    sampler.advance(5)
    assert len(list(sampler)) == 5
    with pytest.raises(holdfast.Refused, match="advance"):
        iter(sampler)
    sampler.load_state_dict(sampler.state_dict())
    assert len(list(sampler)) == 5, "a load begins anew"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 0, "batch_size": 1}, "0 samples"),
        ({"data": 5, "batch_size": 0}, "0 samples"),
        ({"data": 5, "batch_size": 3, "rank": 0, "world": 2, "drop_last": True}, "leaves nothing"),
        ({"data": 5, "batch_size": 3, "rank": 0}, "both"),
        ({"data": 5, "batch_size": 3, "rank": 2, "world": 2}, "no rank 2"),
        ({"data": 5, "batch_size": 3, "skip": [(3, 1)]}, "half-open"),
    ],
)
def test_arguments_that_cannot_be_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**arguments)


def test_a_launched_job_without_a_process_group_is_not_taken_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(holdfast.Refused, match="init_process_group"):
        Sampler(10, batch_size=2)
    assert Sampler(10, batch_size=2, rank=3, world=4).rank == 3


def test_rank_and_world_are_those_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    for name, value in {"is_initialized": True, "get_rank": 2, "get_world_size": 4}.items():
        monkeypatch.setattr(dist, name, lambda value=value: value)
    sampler = Sampler(10, batch_size=2)
    assert (sampler.rank, sampler.world) == (2, 4)


def test_the_position_of_a_huge_dataset_costs_nothing() -> None:
    sampler = Sampler(10**15, batch_size=4, rank=7, world=1000)
    sampler.load_state_dict(replace_position(sampler.state_dict(), epoch=3, position=10**15 - 2500))
    (last,) = sampler
    assert len(last) == 3
    assert sampler.epoch == 3


def replace_position(state: dict[str, Any], **position: int) -> dict[str, Any]:
    return {**state, **position}
