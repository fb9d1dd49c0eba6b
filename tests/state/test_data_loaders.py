"""The position in the data: a loader of torchdata, saved in the middle of an epoch, gives the batches that remain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated:UserWarning", "ignore:This DataLoader will create:UserWarning"
)


class Numbers(torch.utils.data.Dataset[int]):
    """The numbers below `size`."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int) -> int:
        return at


class Stream(torch.utils.data.IterableDataset[int]):
    """Numbers without end, each worker its own, with a position that it keeps itself."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        while True:
            self.position += 1
            yield self.position * 10 + (worker.id if worker else 0)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def shuffled(workers: int) -> Any:
    generator = torch.Generator().manual_seed(7)
    return StatefulDataLoader(Numbers(), batch_size=3, shuffle=True, num_workers=workers, generator=generator)


def streamed(workers: int) -> Any:
    return StatefulDataLoader(Stream(), batch_size=3, num_workers=workers)


def take(iterator: Any, count: int) -> list[list[int]]:
    return [next(iterator).tolist() for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [shuffled, streamed])
def test_the_batches_that_remain_are_those_that_would_have_come(tmp_path: Path, make: Any, workers: int) -> None:
    loader, fresh = make(workers), make(workers)
    iterator = iter(loader)
    seen = take(iterator, 3)
    holdfast.save(tmp_path, {"data": loader}, 3)
    expected = take(iterator, 5)
    holdfast.restore(tmp_path, {"data": fresh})
    got = take(iter(fresh), 5)
    assert got == expected
    assert seen[0] not in got


def test_a_loader_saved_before_its_first_batch_begins_at_the_beginning(tmp_path: Path) -> None:
    loader, fresh = shuffled(0), shuffled(0)
    holdfast.save(tmp_path, {"data": loader}, 1)
    holdfast.restore(tmp_path, {"data": fresh})
    assert take(iter(fresh), 8) == take(iter(loader), 8)


def test_the_second_resume_in_an_epoch_is_as_exact_as_the_first(tmp_path: Path) -> None:
    whole = [b.tolist() for b in shuffled(2)]
    got: list[list[int]] = []
    for step in range(1, 4):
        loader = shuffled(2)
        if got:
            holdfast.restore(tmp_path, {"data": loader})
        iterator = iter(loader)
        got += take(iterator, 2)
        holdfast.save(tmp_path, {"data": loader}, step)
        next(iterator)  # the job dies here, one batch further than it saved
    assert got == whole[:6]
