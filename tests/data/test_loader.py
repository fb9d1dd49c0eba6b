"""The counting loader around torch's DataLoader: what was handed out is behind the position, what was fetched ahead is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.data import Collate, Loader, Sampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(Dataset[int]):
    """The numbers below `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        return at


def loader_of(size: int, batch_size: int, workers: int = 0, rank: int = 0, world: int = 1, **options: Any) -> Loader:
    data = Numbers(size)
    sampler = Sampler(data, batch_size=batch_size, rank=rank, world=world, seed=5)
    return Loader(DataLoader(data, batch_sampler=sampler, num_workers=workers, **options))


def samples(batch: Any) -> list[int]:
    return [] if batch is None else batch.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_that_fetch_ahead_do_not_move_the_position(workers: int) -> None:
    loader = loader_of(40, 4, workers)
    for number, _ in enumerate(islice(loader, 6), 1):
        assert loader.position == 4 * number
        assert loader.state_dict()["position"] == 4 * number


def test_a_job_that_changes_ranks_batches_and_workers_sees_each_sample_once() -> None:
    lives = [(2, 3, 2, 2), (1, 4, 0, 3), (3, 2, 0, 4), (2, 1, 2, 2), (4, 3, 0, 9)]  # world, batch size, workers, batches
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for world, batch_size, workers, batches in lives:
        ranks = [loader_of(64, batch_size, workers, rank, world) for rank in range(world)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        for shares in islice(zip(*ranks, strict=True), batches):
            seen += [sample for share in shares for sample in samples(share)]
        states = [loader.state_dict() for loader in ranks]
        assert all(s == states[0] for s in states)
        state = states[0]
    assert state is not None
    assert state["epoch"] == 1
    assert sorted(seen) == list(range(64))


def test_an_empty_batch_comes_out_as_none_on_all_ranks_that_have_nothing() -> None:
    last = [list(loader_of(9, 4, 0, rank, 2))[-1] for rank in range(2)]
    assert samples(last[0])
    assert last[1] is None


def test_collate_makes_none_of_an_empty_batch_only() -> None:
    assert Collate()([]) is None
    assert Collate()([1, 2]).tolist() == [1, 2]
    assert Collate(len)([0]) == 1


def test_epochs_follow_each_other() -> None:
    loader = loader_of(10, 4)
    epochs = []
    while loader.epoch < 3:
        epochs.append([n for batch in loader for n in samples(batch)])
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_was_left_goes_on_where_it_was(persistent: bool) -> None:
    loader = loader_of(24, 4, 2, persistent_workers=persistent)
    seen = []
    for _ in range(3):
        seen += [n for batch in islice(loader, 2) for n in samples(batch)]
    assert sorted(seen) == list(range(24))


@pytest.mark.parametrize("workers", [0, 2])
def test_restoring_from_a_checkpoint_gives_the_batches_that_remain(tmp_path: Path, workers: int) -> None:
    loader, fresh = loader_of(40, 4, workers), loader_of(40, 4, 2 - workers)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    holdfast.save(tmp_path, {"data": loader}, 3)
    expected = [samples(batch) for batch in iterator]
    holdfast.restore(tmp_path, {"data": fresh})
    assert [samples(batch) for batch in fresh] == expected


def test_an_iterator_from_before_a_load_is_refused() -> None:
    loader = loader_of(40, 4)
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(holdfast.Refused, match="iter"):
        next(iterator)
    assert loader.position == 4


def test_an_iterator_from_before_another_is_refused() -> None:
    loader = loader_of(40, 4)
    first, second = iter(loader), iter(loader)
    next(second)
    with pytest.raises(holdfast.Refused, match="outdated"):
        next(first)


def test_workers_are_seeded_by_rank_and_position() -> None:
    def seeds(rank: int) -> list[int]:
        data = Seeds()
        loader = Loader(DataLoader(data, batch_sampler=Sampler(4, batch_size=2, rank=rank, world=2), num_workers=1))
        return [int(n) for _ in range(2) for batch in loader for n in batch]

    assert len({*seeds(0), *seeds(1)}) == 4, "two ranks, two epochs"
    assert seeds(0) == seeds(0)


class Seeds(Numbers):
    """The seed of the worker that read it."""

    def __init__(self) -> None:
        super().__init__(4)

    def __getitem__(self, at: int) -> int:
        return torch.initial_seed()


def test_counting_twice_is_refused() -> None:
    loader = loader_of(40, 4)
    next(iter(loader))
    with pytest.raises(holdfast.Refused, match="twice"):
        loader.sampler.advance()


def test_a_loader_without_our_sampler_is_refused() -> None:
    with pytest.raises(holdfast.Refused, match="batch_sampler"):
        Loader(DataLoader(Numbers(4), batch_size=2))


def test_a_loader_whose_batches_overtake_each_other_is_refused() -> None:
    sampler = Sampler(8, batch_size=2)
    with pytest.raises(holdfast.Refused, match="in_order"):
        Loader(DataLoader(Numbers(8), batch_sampler=sampler, num_workers=2, in_order=False))


def test_going_on_in_the_middle_draws_no_random_number_of_the_training() -> None:
    loader = loader_of(40, 4)
    torch.manual_seed(1)
    next(iter(loader))
    next(iter(loader))
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


LIFE = """
import json, os, signal, sys
from pathlib import Path
from torch.utils.data import DataLoader
import holdfast
from holdfast.data import Loader, Sampler

run, log, world, batch_size, workers, dies_at, total = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])
data = range(50)
samplers = [Sampler(50, batch_size=batch_size, rank=rank, world=world, seed=5) for rank in range(world)]
# lists, for a tensor on its way from a worker that is killed could leave a file in shared memory
ranks = [Loader(DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=list)) for sampler in samplers]
for rank in reversed(ranks):  # each rank of a job would restore for itself
    step = 0
    if Path(run).exists():
        step = holdfast.restore(run, {"data": rank}).step
lines = log.read_text().splitlines()[:step] if log.exists() else []
while step < total:
    for shares in zip(*ranks, strict=True):
        seen = [n for share in shares for n in share or ()]
        lines.append(json.dumps(seen))
        log.write_text("\\n".join(lines))
        step += 1
        if step == dies_at:
            os.killpg(0, signal.SIGKILL)
        holdfast.save(run, {"data": ranks[step % world]}, step)
        if step == total:
            break
"""


def test_a_job_killed_again_and_again_on_other_ranks_sees_each_sample_once_in_each_epoch(tmp_path: Path) -> None:
    """Each life is killed after a batch was consumed and before it was saved: that batch comes again."""
    lives = [(2, 3, 2, 4), (3, 1, 0, 9), (1, 7, 2, 0)]  # world, batch size, workers, the step it dies at
    log = tmp_path / "log"
    for world, batch_size, workers, dies_at in lives:
        arguments = [tmp_path / "run", log, world, batch_size, workers, dies_at, 20]
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", LIFE, *map(str, arguments)],
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == (-signal.SIGKILL if dies_at else 0), done.stderr
    assert len(log.read_text().splitlines()) == 20
    seen = [n for line in log.read_text().splitlines() for n in json.loads(line)]
    assert len(seen) > 100
    for epoch in range(len(seen) // 50):
        assert sorted(seen[50 * epoch : 50 * epoch + 50]) == list(range(50))
    assert len(set(seen[len(seen) // 50 * 50 :])) == len(seen) % 50
