"""torchdata's StatefulDataLoader under other ranks and workers: exact, or refused, and never one rank's state for all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import Sampler, ShardedStream, StatefulLoader, TokenStream

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning", "ignore:This DataLoader will create:UserWarning"
)


class Lines(ShardedStream):
    """Item i of source n is 100 n + i; source n has n + 3 of them."""

    def read(self, source: int, start: int) -> Iterator[int]:
        yield from range(100 * source + start, 100 * source + source + 3)


class Tokens(TokenStream):
    """Four documents in each source, of tokens that occur nowhere else."""

    def read(self, source: int, start: int) -> Iterator[list[int]]:
        for number in range(start, 4):
            first = 1000 * source + 100 * number
            yield list(range(first, first + 3 + 5 * number))


class Counting(IterableDataset[int]):
    """Every count-th number below 60, with a position that only the dataset's own rules can reshard."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.place, self.position = (rank, world), 0

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        shard, count = self.place[0] * workers + number, self.place[1] * workers
        while shard + count * self.position < 60:
            self.position += 1
            yield shard + count * (self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class WithIterator(IterableDataset[int]):
    """The dataset has no state, its iterator has: what it still holds."""

    class Held:
        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            if not self.numbers:
                raise StopIteration
            return self.numbers.pop(0)

        def state_dict(self) -> dict[str, Any]:
            return {"numbers": list(self.numbers)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.numbers = list(state["numbers"])

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.place = rank, world

    def __iter__(self) -> Any:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return self.Held(list(range(60))[self.place[0] * workers + number :: self.place[1] * workers])


def unite(states: list[Any]) -> list[int]:
    return [n for state in states for n in state["numbers"]]


def deal(whole: list[int], shard: int, count: int) -> dict[str, Any]:
    return {"numbers": whole[shard::count]}


Make = Callable[[int, int, int], StatefulLoader]


def lines(rank: int, world: int, workers: int) -> StatefulLoader:
    stream = Lines(range(9), rank=rank, world=world)
    return StatefulLoader(StatefulDataLoader(stream, batch_size=2, num_workers=workers))


def tokens(rank: int, world: int, workers: int) -> StatefulLoader:
    stream = Tokens(range(8), 7, rank=rank, world=world)
    return StatefulLoader(StatefulDataLoader(stream, batch_size=2, num_workers=workers, collate_fn=flat))


def with_functions(rank: int, world: int, workers: int) -> StatefulLoader:
    loader = StatefulDataLoader(WithIterator(rank, world), batch_size=2, num_workers=workers)
    return StatefulLoader(loader, merge=unite, split=deal, rank=rank, world=world)


def counting(rank: int, world: int, workers: int) -> StatefulLoader:
    return StatefulLoader(StatefulDataLoader(Counting(rank, world), batch_size=2, num_workers=workers), rank=rank, world=world)


def flat(samples: list[list[int]]) -> list[int]:
    return [token for sample in samples for token in sample]


def numbers(batch: Any) -> list[int]:
    return batch if isinstance(batch, list) else batch.tolist()


EVERYTHING = {
    lines: [n for source in range(9) for n in Lines([]).read(source, 0)],
    tokens: [n for source in range(8) for document in Tokens([], 1).read(source, 0) for n in document],
    with_functions: list(range(60)),
}


def was_finished(state: dict[str, Any]) -> bool:
    return bool(state["finished"] if "shards" in state else state["inner"]["_iterator_finished"])


def resume(loaders: list[StatefulLoader], states: list[dict[str, Any]]) -> None:
    """As PerRank does: each rank takes its own state if it can, else one made from those of all."""
    for rank, loader in enumerate(loaders):
        stored = json.loads(json.dumps(states))
        fits = len(states) == len(loaders) and loader.fits(stored[rank])
        loader.load_state_dict(stored[rank] if fits else loader.reshape(stored, rank, len(loaders)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [lines, tokens, with_functions])
def test_nothing_is_lost_or_repeated_when_ranks_and_workers_change(make: Make, seed: int) -> None:
    chance = random.Random(f"{make.__name__} {seed}")
    lives = [(chance.randint(1, 3), chance.randint(0, 2), [chance.randint(0, 4) for _ in range(3)]) for _ in range(3)]
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for world, workers, counts in [*lives, (4, 0, [10_000] * 4)]:  # the last layout is a new one: what is left of the pass
        if states and all(was_finished(state) for state in states):
            break
        loaders = [make(rank, world, workers) for rank in range(world)]
        if states:
            resume(loaders, states)
        for loader, count in zip(loaders, counts, strict=False):
            seen += [n for batch in islice(loader, count) for n in numbers(batch)] if count else []
        states = [loader.state_dict() for loader in loaders]
    assert sorted(seen) == sorted(EVERYTHING[make])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [lines, tokens, with_functions, counting])
def test_under_the_same_ranks_and_workers_the_batches_are_those_that_would_have_come(make: Make, workers: int) -> None:
    for rank in range(2):
        loader, fresh = make(rank, 2, workers), make(rank, 2, workers)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = loader.state_dict()
        expected = [numbers(batch) for batch in iterator]
        assert fresh.fits(state)
        fresh.load_state_dict(json.loads(json.dumps(state)))
        assert [numbers(batch) for batch in fresh] == expected


def test_without_a_rule_another_layout_is_refused_and_told_what_to_give() -> None:
    states = [counting(rank, 2, 0).state_dict() for rank in range(2)]
    with pytest.raises(holdfast.Refused, match=r"2 ranks with 0 workers.*merge= and split=.*Counting"):
        counting(0, 3, 0).reshape(states, 0, 3)
    assert counting(1, 2, 0).reshape(states, 1, 2) == states[1], "nothing changed, so no rule is needed"


def test_no_rank_takes_the_state_of_another() -> None:
    states = [lines(rank, 2, 0).state_dict() for rank in range(2)]
    loader = lines(1, 2, 0)
    with pytest.raises(holdfast.Mismatch, match=r"rank 1 of 2.*rank 0 of 2"):
        loader.load_state_dict(states[0])
    with pytest.raises(holdfast.Mismatch, match=r"rank 0 of 1.*PerRank"):
        lines(0, 1, 0).load_state_dict(states[0])
    for wrong in ([states[0]], [states[0], states[0]], [states[1], lines(0, 3, 0).state_dict()]):
        with pytest.raises(holdfast.Mismatch, match="data states of rank"):
            lines(0, 3, 0).reshape(wrong, 0, 3)
    assert loader.reshape([states[1], states[0]]) == states[1], "a state knows whose it is"


def test_processes_that_read_the_same_data_are_one_reader() -> None:
    """Tensor parallel 2, data parallel 2: four processes, two readers; then data parallel 3."""
    loaders = [lines(rank, 2, 0) for rank in (0, 0, 1, 1)]
    seen: list[int] = []
    for loader, count in zip(loaders, (3, 3, 1, 1), strict=True):
        seen += [n for batch in islice(loader, count) for n in numbers(batch)]
    states = [loader.state_dict() for loader in loaders]
    fresh = [lines(rank, 3, 0) for rank in range(3)]
    rest: list[int] = []
    for process, loader in enumerate(fresh):
        loader.load_state_dict(loader.reshape(states, process, 3))
        rest += [n for batch in loader for n in numbers(batch)]
    assert sorted([*seen[:6], *seen[12:14], *rest]) == EVERYTHING[lines]
    next(iter(loaders[1]))
    with pytest.raises(holdfast.Mismatch, match="equally far"):
        fresh[0].reshape([loader.state_dict() for loader in loaders], 0, 3)


def test_other_workers_on_several_ranks_need_the_states_of_all() -> None:
    states = [lines(rank, 2, 0).state_dict() for rank in range(2)]
    loader = lines(0, 2, 2)
    assert not loader.fits(states[0])
    with pytest.raises(holdfast.Refused, match="workers"):
        loader.load_state_dict(states[0])
    loader.load_state_dict(loader.reshape(states, 0, 2))


def test_one_rank_may_change_its_workers_alone() -> None:
    loader, other = lines(0, 1, 2), lines(0, 1, 0)
    seen = [n for batch in islice(loader, 5) for n in numbers(batch)]
    other.load_state_dict(loader.state_dict())
    seen += [n for batch in other for n in numbers(batch)]
    assert sorted(seen) == EVERYTHING[lines]


def test_a_single_worker_reads_what_no_worker_read_without_a_rule() -> None:
    loader, other = counting(1, 2, 0), counting(1, 2, 1)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert [numbers(b) for b in other] == [numbers(b) for b in iterator]


def test_a_state_that_was_loaded_and_not_read_from_can_be_saved_again() -> None:
    states = [lines(rank, 2, 0).state_dict() for rank in range(2)]
    loader = lines(0, 1, 2)
    loader.load_state_dict(loader.reshape(states, 0, 1))
    again = lines(0, 1, 0)
    again.load_state_dict(loader.state_dict())
    assert sorted(n for batch in again for n in numbers(batch)) == EVERYTHING[lines]


def test_after_a_whole_pass_on_all_ranks_the_next_begins_on_others() -> None:
    loaders = [lines(rank, 2, workers=0) for rank in range(2)]
    for loader in loaders:
        list(loader)
    loader = lines(0, 1, 2)
    resume([loader], [old.state_dict() for old in loaders])
    assert sorted(n for batch in loader for n in numbers(batch)) == EVERYTHING[lines]


def test_snapshots_that_lag_behind_cannot_be_resharded_and_are_refused_in_time() -> None:
    stream = Lines(range(3), rank=0, world=1)
    with pytest.raises(holdfast.Refused, match="snapshot_every_n_steps=1"):
        StatefulLoader(StatefulDataLoader(stream, batch_size=2, snapshot_every_n_steps=2))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_one_rank_is_saved_and_restored_as_a_role(tmp_path: Path, workers: int) -> None:
    loader, fresh = tokens(0, 1, workers), tokens(0, 1, workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    holdfast.save(tmp_path, {"data": loader}, 3)
    holdfast.restore(tmp_path, {"data": fresh})
    assert list(fresh) == list(iterator)


# --- with our sampler -------------------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """The numbers below 40."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, at: int) -> int:
        return at


def sampled(rank: int, world: int, workers: int, batch_size: int = 3) -> StatefulLoader:
    sampler = Sampler(40, batch_size=batch_size, rank=rank, world=world)
    return StatefulLoader(StatefulDataLoader(Numbers(), batch_sampler=sampler, num_workers=workers))


def test_with_our_sampler_the_state_is_the_position_and_fits_anywhere() -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world, workers, count in [(2, 2, 2), (3, 0, 2), (1, 2, 99)]:
        loaders = [sampled(rank, world, workers) for rank in range(world)]
        if state is not None:
            for rank, loader in enumerate(loaders):
                assert loader.fits(state)
                loader.load_state_dict(state if rank else loader.reshape([state, state], rank, world))
        for loader in loaders:
            seen += [n for batch in islice(loader, count) if batch is not None for n in batch.tolist()]
        states = [loader.state_dict() for loader in loaders]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert sorted(seen) == list(range(40))


def test_ranges_are_skipped_through_the_adapter_where_there_are_positions() -> None:
    loader = sampled(0, 1, 2, batch_size=10)
    loader.skip_samples([(10, 30)])
    loader.skip_samples([(5, 10)])
    assert sum(len(batch) for batch in loader) == 15
    with pytest.raises(holdfast.Refused, match="Sampler"):
        lines(0, 1, 0).skip_samples([(0, 1)])


def test_ranks_that_disagree_on_the_position_are_refused() -> None:
    loader = sampled(0, 2, 0)
    before = loader.state_dict()
    next(iter(loader))
    with pytest.raises(holdfast.Mismatch, match="agree"):
        loader.reshape([before, loader.state_dict()], 0, 1)


def test_a_state_with_what_workers_held_does_not_fit_a_sampler() -> None:
    with pytest.raises(holdfast.Mismatch, match="global position"):
        sampled(0, 1, 0).load_state_dict(lines(0, 1, 0).state_dict())
    with pytest.raises(holdfast.Mismatch, match="no StatefulLoader"):
        lines(0, 1, 0).load_state_dict(sampled(0, 1, 0).state_dict())


def test_a_dataset_with_a_state_beside_the_position_is_refused() -> None:
    class Augmented(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {}

    with pytest.raises(holdfast.Refused, match="Augmented"):
        StatefulLoader(StatefulDataLoader(Augmented(), batch_sampler=Sampler(40, batch_size=2)))


@pytest.mark.parametrize("workers", [0, 2])
def test_our_sampler_in_a_loader_of_torchdata_without_the_adapter_is_exact_too(workers: int) -> None:
    def bare() -> Any:
        return StatefulDataLoader(Numbers(), batch_sampler=Sampler(40, batch_size=3), num_workers=workers)

    loader, fresh, again = bare(), bare(), bare()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    fresh.load_state_dict(loader.state_dict())
    expected = [batch.tolist() for batch in iterator]
    onward = iter(fresh)
    assert next(onward).tolist() == expected[0]
    again.load_state_dict(fresh.state_dict())
    assert [batch.tolist() for batch in again] == expected[1:]


@pytest.mark.parametrize("workers", [0, 2])
def test_without_the_adapter_the_epoch_after_a_finished_one_is_the_next(workers: int) -> None:
    def bare() -> Any:
        return StatefulDataLoader(Numbers(), batch_sampler=Sampler(40, batch_size=3), num_workers=workers)

    loader, fresh = bare(), bare()
    list(loader)
    fresh.load_state_dict(loader.state_dict())
    following = Sampler(40, batch_size=3)
    following.advance(14)
    assert [batch.tolist() for batch in fresh] == list(following)


def test_asking_for_the_state_that_was_just_loaded_starts_no_worker() -> None:
    loader = lines(0, 1, 2)
    next(iter(loader))
    state = loader.state_dict()
    fresh = lines(0, 1, 2)
    fresh.load_state_dict(state)
    assert fresh.state_dict() == state
    assert fresh.loader._iterator is None


def test_persistent_workers_are_resharded_too() -> None:
    loader = lines(0, 1, 2)
    seen = [n for batch in islice(loader, 5) for n in numbers(batch)]
    stream = Lines(range(9), rank=0, world=1)
    other = StatefulLoader(StatefulDataLoader(stream, batch_size=2, num_workers=3, persistent_workers=True))
    other.load_state_dict(loader.state_dict())
    seen += [n for batch in other for n in numbers(batch)]
    assert sorted(seen) == EVERYTHING[lines]
    assert sorted(n for batch in other for n in numbers(batch)) == EVERYTHING[lines]
