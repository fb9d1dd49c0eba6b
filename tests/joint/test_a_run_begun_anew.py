"""A run that was removed between two saves of one job: the next save begins it anew, on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist
from ranks import pool

import holdfast

from .outcomes import judge_run
from .states import held, whole

WORLD = 2


def save_remove_save(directory: Path) -> list[int]:
    rank = dist.get_rank()
    run = directory / "run"
    holdfast.save(run, held(1, rank), step=1)
    holdfast.save(run, held(2, rank), step=2)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(run)
    dist.barrier()
    handles = [holdfast.save(run, held(step, rank), step=step) for step in (1, 3)]
    return [handle.step for handle in handles]


def test_a_run_that_was_removed_is_begun_anew_by_all_ranks(tmp_path: Path) -> None:
    assert pool(WORLD).run(save_remove_save, tmp_path) == [[1, 3], [1, 3]]
    assert judge_run(tmp_path / "run", {step: whole(step, list(range(WORLD))) for step in (1, 3)}) == []
