"""Ranks that do not come, come late, hang, or see another directory: one outcome for all, and training goes on."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import pool

import holdfast
from holdfast.ranks import TorchBoard

from .breaking import Fault
from .outcomes import Outcome, judge_outcomes, judge_run, meet, tried
from .states import held, whole
from .stories import Breakage, Telling, Told, in_a_new_world, story

WORLD = 3
DEADLINE = 3.0
RANKS = pytest.mark.parametrize("rank", [0, 1], ids=["the_leader", "another_rank"])


def names(told: Told, rank: int, phase: str) -> list[str]:
    """The messages that do not name the rank, the phase and the seconds."""
    wanted = rf"waited \d+\.\d s in '{phase}' for rank {rank}\b"
    return [o.text for o in told.first if o is not None and not re.search(wanted, o.text)]


@RANKS
def test_a_rank_that_never_calls_save_is_named_by_all_others(tmp_path: Path, rank: int) -> None:
    told = Telling(tmp_path / "story", WORLD, {rank: Breakage(is_absent=True)}, DEADLINE).end()
    assert told.wrong == []
    assert not told.is_committed
    assert names(told, rank, "begin") == []


@RANKS
def test_a_rank_that_calls_late_but_in_time_is_waited_for(tmp_path: Path, rank: int) -> None:
    told = story(tmp_path / "story", WORLD, {rank: Breakage(late_seconds=DEADLINE / 2)}, DEADLINE)
    assert told.wrong == []
    assert told.is_committed


@RANKS
def test_a_rank_that_calls_too_late_gets_the_error_that_the_others_had(tmp_path: Path, rank: int) -> None:
    told = story(tmp_path / "story", WORLD, {rank: Breakage(late_seconds=DEADLINE * 1.5)}, DEADLINE)
    assert told.wrong == []
    assert not told.is_committed
    assert [o.error for o in told.first if o] == ["Deadline"] * WORLD
    assert names(told, rank, "begin") == []
    late = told.first[rank]
    assert late is not None
    assert late.seconds < 1, "there is nothing left to wait for"


@RANKS
def test_a_rank_that_hangs_in_its_write_is_named_and_finds_the_abort_when_it_wakes(tmp_path: Path, rank: int) -> None:
    hang = Fault(partial(time.sleep, DEADLINE * 1.7), "finish", "*.safetensors")
    told = story(tmp_path / "story", WORLD, {rank: Breakage((hang,))}, DEADLINE)
    assert told.wrong == []
    assert not told.is_committed
    assert all(f"rank {rank}" in text for text in told.texts), told.texts
    assert all(re.search(r"\d\.\d s", text) for text in told.texts)


@RANKS
def test_a_rank_that_writes_slowly_but_in_time_is_waited_for(tmp_path: Path, rank: int) -> None:
    slow = Fault(partial(time.sleep, DEADLINE / 2), "finish", "*.safetensors")
    told = story(tmp_path / "story", WORLD, {rank: Breakage((slow,))}, DEADLINE)
    assert told.wrong == []
    assert told.is_committed


def save_where_one_sees_another_directory(directory: Path, odd: int, by_link: bool, deadline: float) -> list[Outcome]:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    run, elsewhere = directory / "run", directory / "elsewhere" / "run"
    run.mkdir(exist_ok=True)
    if by_link:  # one path on all nodes, and on one of them, from now on, a disk of its own behind it
        run = directory / f"node{rank}" / "run"
        run.parent.mkdir()
        run.symlink_to(directory / "run")
    holdfast.save(run, held(1, rank), 1, deadline=30)
    meet(directory, "saved", rank, everybody)
    seen = elsewhere if rank == odd else run
    if by_link and rank == odd:
        shutil.copytree(directory / "run", elsewhere)
        run.unlink()
        run.symlink_to(elsewhere)
        seen = run
    meet(directory, "begin", rank, everybody)
    outcomes = [tried(lambda: holdfast.save(seen, held(2, rank), 2, deadline=deadline))]
    meet(directory, "end", rank, everybody)
    if by_link and rank == odd:
        run.unlink()
        run.symlink_to(directory / "run")
    meet(directory, "mended", rank, everybody)
    return [*outcomes, tried(lambda: holdfast.save(run, held(3, rank), 3, deadline=30))]


@pytest.mark.parametrize("by_link", [False, True], ids=["another_path", "one_path"])
@pytest.mark.parametrize("deadline", [2.0, 5.0])
@RANKS
def test_a_rank_that_sees_another_directory_is_found_out(tmp_path: Path, rank: int, deadline: float, by_link: bool) -> None:
    results = pool(2).run(save_where_one_sees_another_directory, tmp_path, rank, by_link, deadline)
    first, then = zip(*results, strict=True)
    assert judge_outcomes(first, deadline) == []
    assert {o.error for o in first} == {"Unavailable"}
    assert all("rank 1 sees another directory" in o.text and "than rank 0" in o.text for o in first), first
    assert [o.step for o in then] == [3, 3]
    everybody = [0, 1]
    assert judge_run(tmp_path / "run", {1: whole(1, everybody), 3: whole(3, everybody)}) == []


def test_the_other_directory_is_left_without_a_trace(tmp_path: Path) -> None:
    pool(2).run(save_where_one_sees_another_directory, tmp_path, 1, False, 4.0)
    left = [str(path.relative_to(tmp_path / "elsewhere")) for path in (tmp_path / "elsewhere").rglob("*")]
    assert left == [], "what no run is must not look like a damaged one"


def skip_one_call_of_two(directory: Path, absent: int, deadline: float) -> list[Outcome | None]:
    """Two runs of one job save the same step; one rank does not come to the first."""
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    found: list[Outcome | None] = [None]
    if rank != absent:
        found = [tried(lambda: holdfast.save(directory / "actor", held(1, rank), 1, deadline=deadline))]
    meet(directory, "first", rank, everybody)
    found.append(tried(lambda: holdfast.save(directory / "critic", held(1, rank), 1, deadline=deadline)))
    meet(directory, "second", rank, everybody)
    if rank == absent:
        time.sleep(0.5)  # otherwise it would seem to come too late to the first
    found.append(tried(lambda: holdfast.save(directory / "actor", held(1, rank), 1, deadline=deadline)))
    return found


@RANKS
def test_a_call_that_one_rank_left_out_does_not_confuse_the_next_ones_of_the_same_step(tmp_path: Path, rank: int) -> None:
    results = in_a_new_world(2, skip_one_call_of_two, tmp_path, rank, 2.0)
    _, second, third = zip(*results, strict=True)
    assert judge_outcomes(second, 2.0) == []
    assert judge_outcomes(third, 2.0) == []
    assert [o.step for o in (*second, *third)] == [1, 1, 1, 1], results


def train_without_collectives(directory: Path, late: int, deadline: float) -> Outcome:
    """One rank is some steps behind the others; whether a step is due, the clock of the leader decides."""
    rank = dist.get_rank()
    with holdfast.Checkpointer(directory, held(0, rank), save=holdfast.Every(minutes=60), deadline=deadline) as ckpt:
        ckpt.resume()
        if rank == late:
            time.sleep(deadline / 4)

        def train() -> int:
            for step in range(1, 9):
                ckpt.step(step)
            return step

        return tried(train)


def test_a_rank_may_be_some_steps_behind_the_leader(tmp_path: Path) -> None:
    assert [o.step for o in pool(3, fresh=True).run(train_without_collectives, tmp_path, 1, 2.0)] == [8, 8, 8]


def train_over_a_slow_board(directory: Path, slow: int, deadline: float) -> Outcome:
    """While one rank looks where the leader is, the leader answers and goes on to the next call."""
    rank = dist.get_rank()
    read = TorchBoard.read

    def slowly(self: TorchBoard, keys: Sequence[str]) -> list[bytes]:
        if keys[0] == "now/0":
            time.sleep(0.4)
        return read(self, keys)

    with holdfast.Checkpointer(directory, held(0, rank), save=holdfast.Every(minutes=60), deadline=deadline) as ckpt:
        ckpt.resume()
        if rank == 0:
            time.sleep(0.5)
        with pytest.MonkeyPatch.context() as patch:
            if rank == slow:
                patch.setattr(TorchBoard, "read", slowly)
            return tried(lambda: [ckpt.step(step) for step in (1, 2)] and 2)


def test_a_leader_that_answers_and_goes_on_at_once_is_not_taken_for_one_that_left_the_call_out(tmp_path: Path) -> None:
    assert [o.step for o in pool(2, fresh=True).run(train_over_a_slow_board, tmp_path, 1, 3.0)] == [2, 2]
