"""Data positions of a job of several ranks, through checkpoints: three ranks, then two with other workers, then one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import pool
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data import Loader, Sampler, StatefulLoader, TokenStream


class Tokens(TokenStream):
    """Four documents in each source, of tokens that occur nowhere else."""

    def read(self, source: int, start: int) -> Iterator[list[int]]:
        for number in range(start, 4):
            first = 1000 * source + 100 * number
            yield list(range(first, first + 3 + 5 * number))


EVERYTHING = [token for source in range(8) for document in Tokens([], 1).read(source, 0) for token in document]


def flat(samples: list[list[int]]) -> list[int]:
    return [token for sample in samples for token in sample]


def live(run: str, workers: int, batches: int, batch_size: int, step: int) -> tuple[list[int], list[int]]:
    """A rank's life: resume if there is something, consume, save. What it consumed of the set and of the stream."""
    sampled = Loader(DataLoader(range(48), batch_sampler=Sampler(48, batch_size=batch_size), num_workers=workers))  # type: ignore[arg-type]
    inner = StatefulDataLoader(Tokens(range(8), 7), batch_size=2, num_workers=workers, collate_fn=flat)
    stream = StatefulLoader(inner)
    state = holdfast.State(rng=False, sampled=sampled, stream=holdfast.PerRank(stream, reshape=stream.reshape))
    if step:
        holdfast.restore(run, state)
    seen = [n for batch in islice(sampled, batches) if batch is not None for n in batch.tolist()]
    packed = [token for batch in islice(stream, batches) for token in batch]
    dist.barrier()
    holdfast.save(run, state, step + 1)
    return seen, packed


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_lost_or_repeated_over_checkpoints_of_other_ranks_and_workers(tmp_path: Path) -> None:
    seen: list[int] = []
    packed: list[int] = []
    lives: list[tuple[int, int, int, int]] = [(3, 0, 3, 3), (2, 2, 1, 4), (2, 0, 1, 2), (1, 2, 99, 5)]
    for step, (world, workers, batches, batch_size) in enumerate(lives):
        results: list[Any] = pool(world).run(live, str(tmp_path / "run"), workers, batches, batch_size, step)
        seen += [n for rank, _ in results for n in rank]
        packed += [token for _, rank in results for token in rank]
    assert sorted(seen) == list(range(48))
    assert sorted(packed) == sorted(EVERYTHING)
