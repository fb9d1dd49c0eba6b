"""The storage or the board of one rank fails at each call in turn: one outcome for all, and training goes on."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import pool

import holdfast

from .breaking import Fault, no_space, unavailable
from .outcomes import Outcome, meet, tried
from .states import held
from .stories import Breakage, Telling, Told, calls_of, stories, story

WORLD = 3
DEADLINE = 3.0
RANKS = pytest.mark.parametrize("rank", [0, 1], ids=["the_leader", "another_rank"])
SPARE = 3
"""Calls beyond those that were counted: a rank that waits looks into the store now and then."""


def told_of(told: list[Told], label: str) -> dict[str, list[str]]:
    return {f"{label} {number}": one.wrong for number, one in enumerate(told) if one.wrong}


@pytest.mark.parametrize("do", [unavailable, no_space])
@pytest.mark.parametrize("is_lasting", [False, True], ids=["one_call_fails", "all_from_one_call_on_fail"])
@RANKS
def test_storage_that_fails_one_rank_at_any_call_has_one_outcome(tmp_path: Path, rank: int, is_lasting: bool, do: object) -> None:
    (tmp_path / "counted").mkdir()
    calls = calls_of(tmp_path / "counted", WORLD, rank)[0]
    told = []
    for number in range(len(calls) + SPARE):
        fault = Fault(do, nth=number, times=None if is_lasting else 1)  # type: ignore[arg-type]
        told.append(story(tmp_path / str(number), WORLD, {rank: Breakage((fault,))}, DEADLINE))
    assert told_of(told, "call") == {}
    failed = [one for one in told if not one.is_committed]
    assert failed, "no fault did anything"
    for one in failed:
        assert all("injected" in text for text in one.texts), "all are told what happened, not only that nothing came"
        assert all(o.seconds < DEADLINE for o in one.first if o is not None), "nobody waits for a rank that has said so"


@RANKS
@pytest.mark.slow
def test_a_board_that_is_gone_for_one_rank_from_any_call_on_has_one_outcome(tmp_path: Path, rank: int) -> None:
    (tmp_path / "counted").mkdir()
    asked = calls_of(tmp_path / "counted", WORLD, rank)[2]
    making = [
        partial(Telling, tmp_path / str(number), WORLD, {rank: Breakage(board_gone_from=number)}, 2.0)
        for number in range(len(asked) + 1)
    ]
    assert told_of(stories(making), "board gone from call") == {}


def test_a_leader_that_failed_early_is_not_taken_for_one_in_another_directory(tmp_path: Path) -> None:
    """Rank 1 looks for what the leader has put into the directory only after the leader has failed and cleaned up."""
    late = Fault(partial(time.sleep, 1.0), "size", "intents/*")
    told = story(tmp_path / "story", WORLD, {0: Breakage((Fault(no_space, "write"),)), 1: Breakage((late,))}, DEADLINE)
    assert told.wrong == []
    assert [o.error for o in told.first if o] == ["NoSpace"] * WORLD, told.first


def test_an_answer_of_the_storage_that_was_lost_has_one_outcome(tmp_path: Path) -> None:
    """The leader's commit is there, and its answer is not: nobody guesses, and nobody says that the step does not exist."""
    lost = Fault(unavailable, "create", "*/commit.json", after=True)
    told = story(tmp_path / "story", WORLD, {0: Breakage((lost,))}, DEADLINE)
    assert [o.error for o in told.first if o] == ["Unavailable"] * WORLD
    assert all("is visible" in text and "not confirmed" in text for text in told.texts)


def test_a_commit_that_is_slow_to_be_confirmed_and_then_fails_has_one_outcome(tmp_path: Path) -> None:
    told = story(tmp_path / "story", WORLD, {0: Breakage((Fault(late_unavailable, "create", "*/commit.json", after=True),))}, 6.0)
    assert len({o.step for o in told.first if o}) == 1, told.first


def test_a_rank_that_cannot_look_for_the_decision_waits_for_the_leader_to_tell_it(tmp_path: Path) -> None:
    slow = Fault(partial(time.sleep, 1.8), "create", "*/commit.json")
    blind = Fault(unavailable, "read", "*/commit.json", times=None)
    told = story(tmp_path / "story", WORLD, {0: Breakage((slow,)), 1: Breakage((blind,))}, 5.0)
    assert told.wrong == []
    assert told.is_committed


def late_unavailable() -> None:
    time.sleep(2.5)
    unavailable()


def train_where_the_directory_vanishes(directory: Path) -> list[Outcome]:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    found = []
    state = held(1, rank)
    every = holdfast.Every(steps=1)
    with holdfast.Checkpointer(directory / "run", state, save=every, on_failure="raise", deadline=DEADLINE) as ckpt:
        ckpt.resume()
        for step, name in enumerate(["mounted", "gone", "back"], 1):
            meet(directory, f"{name}, before", rank, everybody)
            if rank == 0 and name != "mounted":
                source, target = ("run", "away") if name == "gone" else ("away", "run")
                (directory / source).rename(directory / target)
            meet(directory, name, rank, everybody)
            found.append(tried(lambda step=step: ckpt.step(step)))
    return found


def test_storage_that_is_unmounted_for_a_while_costs_only_the_saves_meanwhile(tmp_path: Path) -> None:
    results = pool(WORLD).run(train_where_the_directory_vanishes, tmp_path)
    assert [[o.step for o in found] for found in results] == [[1, None, 3]] * WORLD
    assert {found[1].error for found in results} == {"Unavailable"}
