"""Every phase of a save, and who is killed in it: trainer, agent, both, one rank of four. What the next life resumes from.

The ranks stop at the phase themselves, all of them, and say so; then the test kills. An agent is held at a phase by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks.pools import Pool

import holdfast
from holdfast.handle import CAPTURED, DURABLE
from holdfast.run.status import Status

from .job import Job, live_here
from .lives import agents_in, kill, nothing_is_left, status, until

LAST = 3
"""The step in whose save something is killed; those before are durable by then."""
BEFORE, BEGUN, CAPTURE_IS_OVER, WRITING, COMMITTED = "before", "during capture", "captured", "during the write", "committed"
PHASES = [BEFORE, BEGUN, CAPTURE_IS_OVER, WRITING, COMMITTED]
SCALE = 8
"""Of the job: some 70 MB of state, so that phases take long enough to be met."""


def arrive(run: Path, here: Path, sockets: Path, phase: str, scale: int) -> None:
    """Train up to a phase of the save of step LAST, say so, and go on when told to: two more steps, and out of the `with`."""
    live_here(sockets)
    rank = dist.get_rank()
    job = Job(scale)
    with holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=9), deadline=30, on_full="wait",
        agent=holdfast.Agent(idle=60),
    ) as ckpt:  # fmt: skip
        assert ckpt.resume() == 0
        for step in range(1, LAST):
            job.train(step)
            handle = ckpt.step(step)
            assert handle is not None
            handle.wait(DURABLE, 30)
        job.train(LAST)
        if phase != BEFORE:
            handle = ckpt.step(LAST)
            assert handle is not None
            if phase in (CAPTURE_IS_OVER, WRITING):
                handle.wait(CAPTURED, 30)
            elif phase == COMMITTED:
                handle.wait(DURABLE, 30)
        (here / f"{rank}").touch()
        until(lambda: (here / "go on").exists(), "the test lets it go on", 60)
        first = LAST if phase == BEFORE else LAST + 1
        for step in range(first, LAST + 3):
            job.train(step) if step > LAST else None
            ckpt.step(step)


def look(run: Path, sockets: Path, scale: int) -> tuple[int, list[str]]:
    """Resume, and compare with what it should be; then leave in good order."""
    live_here(sockets)
    job = Job(scale)
    with holdfast.Checkpointer(run, job.state, save=holdfast.Every(steps=1), agent=holdfast.Agent(idle=60), deadline=30) as ckpt:
        step = ckpt.resume()
        return step, job.wrong(step)


class Stage:
    """A job that stands at a phase of the save of step LAST."""

    def __init__(self, directory: Path, sockets: Path, world: int, phase: str, scale: int = SCALE) -> None:
        self.run, self._here, self._sockets, self.world, self._scale = (
            directory / "run",
            directory / "here",
            sockets,
            world,
            scale,
        )
        self._here.mkdir()
        self.pool = Pool(world)
        self.pool.start(arrive, self.run, self._here, sockets, phase, scale)
        until(lambda: all((self._here / f"{rank}").exists() for rank in range(world)), f"all ranks are {phase}")
        if phase == WRITING:
            until(lambda: self.level() != "captured", "the agent begins to write")

    def level(self) -> str:
        """Of step LAST, as the agent has it; "" where it knows nothing of it."""
        return next((save.level for save in self.status().saves if save.step == LAST), "")

    def status(self) -> Status:
        found = status(self.run)
        assert found is not None
        return found

    def go_on(self) -> None:
        (self._here / "go on").touch()

    def results(self) -> list[Any]:
        return self.pool.results(timeout=60, catch=True)

    def end(self) -> None:
        for rank in range(self.world):
            self.pool.kill(rank)
        self.pool.close(at_once=True)

    def resumes_from(self) -> int:
        """What a new life goes on from; all of its ranks from the same, with the bits of that step."""
        after = Pool(self.world)
        try:
            found = after.run(look, self.run, self._sockets, self._scale)
        finally:
            after.close()
        assert [wrong for _, wrong in found] == [[]] * self.world
        assert len({step for step, _ in found}) == 1
        return int(found[0][0])


def least_after(phase: str) -> int:
    return {BEFORE: LAST - 1, BEGUN: LAST - 1, CAPTURE_IS_OVER: LAST, WRITING: LAST, COMMITTED: LAST}[phase]


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("phase", PHASES)
def test_trainers_killed_what_was_captured_on_all_ranks_is_resumed(
    in_background: Path, tmp_path: Path, phase: str, world: int
) -> None:
    stage = Stage(tmp_path, in_background, world, phase)
    stage.end()
    resumed = stage.resumes_from()
    assert least_after(phase) <= resumed <= (LAST - 1 if phase == BEFORE else LAST)
    nothing_is_left(in_background)


@pytest.mark.parametrize("phase", PHASES)
def test_both_killed_the_last_committed_step_is_resumed(in_background: Path, tmp_path: Path, phase: str) -> None:
    stage = Stage(tmp_path, in_background, 4, phase)
    agent = stage.status().pid
    os.kill(agent, signal.SIGSTOP)
    stage.end()
    kill(agent)
    latest = holdfast.Run(stage.run).latest()
    assert latest is not None
    assert latest.step >= LAST - (phase != COMMITTED)
    assert stage.resumes_from() == latest.step
    nothing_is_left(in_background)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("phase", PHASES)
def test_the_agent_killed_training_goes_on_and_saves_with_another(
    in_background: Path, tmp_path: Path, phase: str, world: int
) -> None:
    stage = Stage(tmp_path, in_background, world, phase)
    kill(stage.status().pid)
    stage.go_on()
    assert stage.results() == [None] * world
    stage.pool.close()
    assert stage.resumes_from() == LAST + 2
    nothing_is_left(in_background)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("phase", PHASES)
def test_one_rank_of_four_killed_the_others_go_on_and_then_all_resume_from_one_step(
    in_background: Path, tmp_path: Path, phase: str, victim: int
) -> None:
    stage = Stage(tmp_path, in_background, 4, phase, scale=2)
    stage.pool.kill(victim)
    stage.go_on()
    results = stage.results()
    assert [rank for rank, result in enumerate(results) if result is not None] == [victim], results
    resumed = stage.resumes_from()
    assert least_after(phase) <= resumed <= (LAST - 1 if phase == BEFORE else LAST)
    nothing_is_left(in_background)


@pytest.mark.parametrize("world", [1, 4])
def test_an_agent_that_outlives_its_trainers_finishes_what_they_captured_before_it_ends(
    in_background: Path, tmp_path: Path, world: int
) -> None:
    """The next life needs it no more: the step is committed by then."""
    stage = Stage(tmp_path, in_background, world, CAPTURE_IS_OVER)
    agent = stage.status().pid
    stage.end()
    os.kill(agent, signal.SIGTERM)
    until(lambda: not list(in_background.iterdir()), "the agent gives up its socket")
    latest = holdfast.Run(stage.run).latest()
    assert latest is not None
    assert latest.step == LAST, "from when it cannot be asked any more, nothing is missing that it had"
    until(lambda: not agents_in(in_background), "the agent ends")
    assert stage.resumes_from() == LAST
