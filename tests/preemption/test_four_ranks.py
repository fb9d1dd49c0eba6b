"""SIGTERM to one of four ranks inside a long evaluation: all stop at one call, with one committed step or a clear refusal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import pool

import holdfast

from .jobs import EVALUATES_AT, LAST, SAVES_AT, Told, train

WORLD = 4


def preempt(
    directory: Path, victim: int | None, window: str = "30s", past: float | None = None, explicit: bool = False
) -> list[Told]:
    """Let four ranks train; when all are in the evaluation, send SIGTERM to one of them, or, for None, make the file."""
    file = str(directory / "stop") if victim is None else None
    running = pool(WORLD).start(train, directory, window, past, explicit, file)
    end = time.monotonic() + 60
    while len(list(directory.glob("evaluating-*"))) < WORLD:
        assert time.monotonic() < end, "the ranks did not come to the evaluation"
        time.sleep(0.02)
    if victim is None:
        (directory / "stop").touch()
    else:
        os.kill(running.pids[victim], signal.SIGTERM)
    (directory / "sent").touch()
    told: list[Told] = running.results(timeout=60)
    return told


def check_stop(told: list[Told], at_most: int = EVALUATES_AT + 1) -> int:
    """All stopped at one call: the one after the evaluation, or the one that nobody had passed then. Gives its step."""
    answers = told[0].answers
    assert all(one.answers == answers for one in told), told
    assert answers.index(True) == len(answers) - 1
    assert EVALUATES_AT <= len(answers) <= at_most
    assert all(one.is_restored for one in told)
    return len(answers)


def check_steps(directory: Path, steps: list[int]) -> None:
    """Exactly these are committed, and the last one is whole and right."""
    run = holdfast.Run(directory / "run")
    assert [one.step for one in run.steps()] == steps
    with holdfast.open(directory / "run") as checkpoint:
        assert checkpoint.verify() == []
    tree = holdfast.load(directory / "run")
    assert torch.equal(tree["same"]["w"], torch.full((50, 3), float(steps[-1])))
    for rank in range(WORLD):
        assert torch.equal(tree["own"][f"r{rank}"], torch.full((9,), steps[-1] + rank / 8))


@pytest.mark.parametrize("victim", [0, 2, 3, None], ids=["the_leader", "another", "the_last_to_come", "a_file"])
def test_all_ranks_stop_at_one_call_and_commit_one_step(tmp_path: Path, victim: int | None) -> None:
    told = preempt(tmp_path, victim)
    step = check_stop(told) if victim is not None else check_stop(told, at_most=LAST)  # a file is looked for now and then
    check_steps(tmp_path, [SAVES_AT, step])
    assert [one.warned for one in told] == [()] * WORLD


def test_a_save_that_would_be_killed_is_not_begun_and_all_ranks_say_so_in_the_same_words(tmp_path: Path) -> None:
    told = preempt(tmp_path, 2, past=3600.0)
    step = check_stop(told)
    assert all(one.warned == told[0].warned for one in told), told
    (text,) = told[0].warned
    assert f"step {step} was not saved" in text
    assert "it takes about 3600.0 s" in text
    assert f"Step {SAVES_AT} is the last good one, and stays as it is" in text
    check_steps(tmp_path, [SAVES_AT])


def test_a_save_by_hand_is_refused_with_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    told = preempt(tmp_path, 1, past=3600.0, explicit=True)
    check_stop(told)
    assert all(one.error == told[0].error for one in told), told
    assert told[0].error.startswith("TooLate: step ")
    assert "3600.0 s" in told[0].error
    check_steps(tmp_path, [SAVES_AT])
