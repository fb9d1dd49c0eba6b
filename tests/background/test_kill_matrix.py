"""Every phase of a save, and who is killed in it: trainer, agent, both, one rank of four. What the next life resumes from.

The ranks stop at the phase themselves, all of them, and say so; then the test kills. An agent is held at a phase by SIGSTOP.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from ranks.pools import Pool

import holdfast
from holdfast.agent.place import socket_path
from holdfast.agent.serve import Agent, listen
from holdfast.handle import CAPTURED, DURABLE
from holdfast.run.status import Status
from holdfast.store.locate import open_store
from holdfast.store.wrap import Wrapped

from .job import Job, live_here
from .lives import PATIENCE_SECONDS, agents_in, kill, nothing_is_left, status, until

T = TypeVar("T")
pytestmark = pytest.mark.slow
LAST = 3
"""The step in whose save something is killed; those before are durable by then."""
BEFORE, BEGUN, CAPTURE_IS_OVER, WRITING, COMMITTED = "before", "during capture", "captured", "during the write", "committed"
HELD = "captured by an agent that was stopped before, and has not read a word of it"
PHASES = [BEFORE, BEGUN, CAPTURE_IS_OVER, WRITING, COMMITTED]
TELLINGS = 10
SCALE = 8
"""Of the job: some 70 MB of state, so that phases take long enough to be met."""


def arrive(run: Path, here: Path, sockets: Path, phase: str, scale: int, idle: float) -> None:
    """Train up to a phase of the save of step LAST, say so, and go on when told to: two more steps, and out of the `with`."""
    live_here(sockets)
    rank = dist.get_rank()
    job = Job(scale)
    with holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=9), deadline=30, on_full="wait",
        agent=holdfast.Agent(idle=idle),
    ) as ckpt:  # fmt: skip
        assert ckpt.resume() == 0
        for step in range(1, LAST):
            job.train(step)
            handle = ckpt.step(step)
            assert handle is not None
            handle.wait(DURABLE, 30)
        job.train(LAST)
        if phase == HELD:
            if rank == 0:
                os.kill(agents_in(sockets)[0], signal.SIGSTOP)
            dist.barrier()
        if phase != BEFORE:
            handle = ckpt.step(LAST)
            assert handle is not None
            if phase in (CAPTURE_IS_OVER, WRITING, HELD):
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

    def __init__(self, directory: Path, sockets: Path, world: int, phase: str, scale: int = SCALE, idle: float = 60) -> None:
        self.run, self._here, self._sockets, self.world, self._scale = (
            directory / "run",
            directory / "here",
            sockets,
            world,
            scale,
        )
        self._here.mkdir()
        self.pool = Pool(world)
        self.pool.start(arrive, self.run, self._here, sockets, phase, scale, idle)
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
def test_a_job_that_comes_back_waits_for_what_an_agent_has_captured_and_not_written(
    in_background: Path, tmp_path: Path, world: int
) -> None:
    stage = Stage(tmp_path, in_background, world, HELD)
    [agent] = agents_in(in_background)
    stage.end()
    latest = holdfast.Run(stage.run).latest()
    assert latest is not None
    assert latest.step == LAST - 1, "the agent did nothing since it was stopped"
    after = Pool(world).start(look, stage.run, in_background, SCALE)
    time.sleep(1.0)  # it waits; one that did not would have the older step by now
    os.kill(agent, signal.SIGCONT)
    try:
        assert after.results() == [(LAST, [])] * world
    finally:
        after.close()
    nothing_is_left(in_background)


class Slow(Wrapped):
    """A store whose disk takes its time to make a file durable."""

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation == "finish":
            time.sleep(0.7)
        return run()


def test_an_agent_that_ends_can_be_found_until_all_that_it_has_is_committed(
    in_background: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is a thread of this test, so that it has a slow disk."""
    url = open_store(tmp_path / "run").url
    monkeypatch.setattr("holdfast.agent.serve.open_store", lambda url: Slow(open_store(url)))
    path = socket_path(url)
    thread = threading.Thread(target=Agent(listen(path), path, url, 60.0, False).run)
    thread.start()
    stage = Stage(tmp_path, in_background, 1, CAPTURE_IS_OVER, scale=1, idle=0.2)
    stage.end()
    until(lambda: not path.exists(), "the agent gives up its socket")
    latest = holdfast.Run(stage.run).latest()
    thread.join(PATIENCE_SECONDS)
    assert latest is not None
    assert latest.step == LAST


def die_when_captured(run: Path, sockets: Path) -> None:
    """Two steps; this process is gone at the instant at which it hears that the second is captured."""
    live_here(sockets)
    job = Job()
    ckpt = holdfast.Checkpointer(run, job.state, save=holdfast.Every(steps=1), agent=holdfast.Agent(idle=60))
    step = ckpt.resume()
    for level in (DURABLE, CAPTURED):
        step += 1
        job.train(step)
        handle = ckpt.step(step)
        assert handle is not None
        handle.wait(level, 30)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_trainer_was_told_to_be_captured_outlives_it_from_that_instant_on(in_background: Path, tmp_path: Path) -> None:
    for life in range(TELLINGS):
        crew = Pool(1)
        crew.start(die_when_captured, tmp_path / "run", in_background)
        crew.results(timeout=60, catch=True)
        after = Pool(1)
        try:
            assert after.run(look, tmp_path / "run", in_background, 1) == [(2 * life + 2, [])]
        finally:
            after.close()
    nothing_is_left(in_background)
