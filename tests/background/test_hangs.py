"""An agent that hangs holds up no step, is told of by a later one, and serves again when it goes on; or another one does."""

from __future__ import annotations

import os
import signal
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import pool

import holdfast
from holdfast.handle import DURABLE

from .job import Job, live_here
from .lives import agents_in, kill, nothing_is_left, status

pytestmark = pytest.mark.slow
MEANWHILE = 60
"""Steps that are taken while the agent hangs."""
DEADLINE = 3.0


class Trainer:
    """A rank that counts its steps, and notes what it is warned of."""

    def __init__(self, run: Path, sockets: Path, deadline: float) -> None:
        live_here(sockets)
        self.job, self.at, self.warned = Job(), 0, []  # type: ignore[var-annotated]
        self.ckpt = holdfast.Checkpointer(
            run, self.job.state, save=holdfast.Every(steps=1), deadline=deadline, agent=holdfast.Agent(idle=60)
        )
        self.ckpt.resume()

    def step(self) -> Any:
        self.at += 1
        self.job.train(self.at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle = self.ckpt.step(self.at)
        self.warned += [str(warning.message) for warning in caught]
        return handle

    def step_until(self, what: Any, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, (self.at, self.warned)
            self.step()
            time.sleep(0.005)
            dist.barrier()

    def save_one(self) -> None:
        """Take steps until one was saved and is durable, on all ranks."""
        handles: list[Any] = []
        self.step_until(lambda: _all(any(h is not None and h.level == DURABLE for h in handles)) or handles.append(self.step()))


def _all(mine: bool) -> bool:
    """Whether it is so on all ranks."""
    import torch

    count = torch.tensor(int(mine))
    dist.all_reduce(count)
    return int(count) == dist.get_world_size()


def hang(run: Path, sockets: Path, then_kill: bool) -> int:
    """Steps while the agent hangs until its absence is told; then with it again, or with another. The steps taken."""
    trainer = Trainer(run, sockets, DEADLINE)
    trainer.save_one()
    found = status(run) if dist.get_rank() == 0 else None
    agent = found.pid if found else 0
    dist.barrier()
    if agent:
        os.kill(agent, signal.SIGSTOP)
    dist.barrier()
    for _ in range(MEANWHILE):
        trainer.step()
    trainer.step_until(lambda: _all(any("is not durable after" in text for text in trainer.warned)))
    if agent and then_kill:
        kill(agent)
    elif agent:
        os.kill(agent, signal.SIGCONT)
    trainer.save_one()
    trainer.ckpt.close()
    return trainer.at


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("then_kill", [False, True])
def test_an_agent_that_hangs_holds_up_no_step_is_told_of_and_saving_works_again(
    in_background: Path, tmp_path: Path, world: int, then_kill: bool
) -> None:
    taken = pool(world).run(hang, tmp_path / "run", in_background, then_kill)
    latest = holdfast.Run(tmp_path / "run").latest()
    assert latest is not None
    assert {latest.step} == set(taken)
    nothing_is_left(in_background)


def hang_for_ever(run: Path, sockets: Path) -> tuple[list[str], str]:
    """What a trainer is told of whose agent hangs for good: by steps, and at the end."""
    trainer = Trainer(run, sockets, 1.0)
    trainer.save_one()
    found = status(run)
    assert found is not None
    os.kill(found.pid, signal.SIGSTOP)
    end = "nothing"
    try:
        for _ in range(MEANWHILE):
            trainer.step()
        trainer.ckpt.close()
    except holdfast.HoldfastError as error:
        end = type(error).__name__
    finally:
        kill(found.pid)
    return trainer.warned, end


def test_leaving_with_an_agent_that_hangs_ends_with_an_error(in_background: Path, tmp_path: Path) -> None:
    [(_, end)] = pool(1).run(hang_for_ever, tmp_path / "run", in_background)
    assert end == "Deadline"


def break_the_line(run: Path, sockets: Path) -> tuple[list[str], list[int]]:
    """Shut down the connection of one rank with its agent, which goes on to live; then save. The warnings, and the agents."""
    trainer = Trainer(run, sockets, 30.0)
    trainer.save_one()
    agents = agents_in(sockets)
    is_cut = dist.get_rank() == dist.get_world_size() - 1

    def is_told() -> bool:
        if is_cut and not trainer.warned:  # again, if nothing was under way that could be lost
            for name in os.listdir("/proc/self/fd"):
                if _is_line(int(name), sockets):
                    with socket.socket(fileno=os.dup(int(name))) as end:
                        end.shutdown(socket.SHUT_RDWR)
        return _all(not is_cut or bool(trainer.warned))

    trainer.step_until(is_told)
    for _ in range(4):  # more than there are slots
        trainer.save_one()
    agents += agents_in(sockets)
    dist.barrier()
    trainer.ckpt.close()
    return trainer.warned, agents


def _is_line(fd: int, sockets: Path) -> bool:
    try:
        with socket.socket(fileno=os.dup(fd)) as end:
            return end.family == socket.AF_UNIX and str(end.getpeername()).startswith(str(sockets))
    except OSError:
        return False


@pytest.mark.parametrize("world", [1, 4])
def test_a_rank_whose_connection_breaks_comes_back_to_the_same_agent(in_background: Path, tmp_path: Path, world: int) -> None:
    told = pool(world).run(break_the_line, tmp_path / "run", in_background)
    warned, agents = told[-1]
    assert "is gone" in warned[0]
    assert len(agents) == 2
    assert len(set(agents)) == 1
    nothing_is_left(in_background)
