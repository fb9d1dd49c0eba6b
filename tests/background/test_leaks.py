"""Nothing leaks: descriptors, mappings, memory, threads, sockets and processes, of trainers and of agents."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from ranks import pool
from ranks.pools import Pool

import holdfast
from holdfast.handle import CAPTURED, DURABLE

from .job import Job, live_here
from .lives import agents_in, kill, nothing_is_left, status, until

SAVES = 100
FIRST = 20
"""Saves after which a process is taken to have all that it needs."""
GROWTH_BYTES = 16 << 20
"""By which memory may vary; the state has some 5 MB, so that one version in ten that stays would show."""
ARENA = "memfd:holdfast-arena"


@dataclass(frozen=True)
class Held:
    """What a process has."""

    descriptors: int
    arenas: int
    """Descriptors of arenas."""
    mappings: int
    """Of arenas."""
    private_bytes: int
    threads: int


def held_by(pid: int) -> Held:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed meanwhile
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    memory = psutil.Process(pid).memory_info()
    return Held(
        len(links),
        sum(ARENA in link for link in links),
        sum(ARENA in line for line in maps),
        memory.rss - memory.shared,
        psutil.Process(pid).num_threads(),
    )


def agent_of(run: Path) -> int:
    found = status(run)
    assert found is not None
    return int(found.pid)


def save_often(run: Path, sockets: Path) -> tuple[list[Held], list[Held]]:
    """A hundred saves. What the trainer has before, after some, after all, and when it has left; and what the agent has."""
    live_here(sockets)
    job, mine, agents = Job(), [], []
    gc.collect()
    mine.append(held_by(os.getpid()))
    with holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=2), on_full="wait", agent=holdfast.Agent(idle=60)
    ) as ckpt:
        ckpt.resume()
        for step in range(1, SAVES + 1):
            job.train(step)
            handle = ckpt.step(step)
            assert handle is not None
            if step in (FIRST, SAVES):
                handle.wait(DURABLE, 60)
                agents.append(held_by(agent_of(run)))
                mine.append(held_by(os.getpid()))
    del ckpt, handle
    gc.collect()
    until(lambda: held_by(os.getpid()).threads <= mine[0].threads, "threads end")
    mine.append(held_by(os.getpid()))
    return mine, agents


@pytest.mark.parametrize("world", [1, 4])
def test_a_hundred_saves_leave_trainers_and_agent_with_what_they_had(in_background: Path, tmp_path: Path, world: int) -> None:
    crew = Pool(world)
    try:
        told = crew.run(save_often, tmp_path / "run", in_background, timeout=100)
    finally:
        crew.close()
    for (before, some, all_, after), agents in told:
        assert some.arenas > before.arenas == after.arenas == 0
        assert some.mappings > before.mappings == after.mappings == 0
        assert (all_.arenas, all_.mappings) == (some.arenas, some.mappings)
        assert after.descriptors <= before.descriptors + 1, "one for the connection to the key-value store, which stays"
        assert all_.private_bytes - some.private_bytes < GROWTH_BYTES
        assert (agents[1].arenas, agents[1].mappings) == (agents[0].arenas, agents[0].mappings) == (2 * world, world)
        assert agents[1].threads <= agents[0].threads + world, "each rank that asks has one for a moment"
        assert agents[1].descriptors <= agents[0].descriptors + 2 * world, "files that are being written"
        assert agents[1].private_bytes - agents[0].private_bytes < GROWTH_BYTES
    nothing_is_left(in_background)


def outlive_agents(run: Path, sockets: Path, kills: int) -> list[Held]:
    """What a trainer has after a save with each of several agents."""
    live_here(sockets)
    job, mine, step = Job(), [], 0
    with holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), on_full="wait", agent=holdfast.Agent(idle=60)
    ) as ckpt:  # fmt: skip
        ckpt.resume()
        for number in range(kills + 1):
            handle = None
            while handle is None or handle.level != DURABLE:
                step += 1
                job.train(step)
                handle = ckpt.step(step)
                if handle is not None:
                    try:
                        handle.wait(DURABLE, 30)
                    except holdfast.Unavailable:
                        continue
            mine.append(held_by(os.getpid()))
            if number < kills:
                kill(agent_of(run))
    return mine


@pytest.mark.filterwarnings("ignore")
def test_the_memory_of_agents_that_died_is_let_go(in_background: Path, tmp_path: Path) -> None:
    crew = Pool(1)
    try:
        [held] = crew.run(outlive_agents, tmp_path / "run", in_background, 5)
    finally:
        crew.close()
    assert {(one.arenas, one.mappings) for one in held} == {(held[0].arenas, held[0].mappings)}
    assert held[-1].threads <= held[0].threads
    assert held[-1].descriptors <= held[1].descriptors
    nothing_is_left(in_background)


def change_structure(run: Path, sockets: Path, times: int) -> list[tuple[Held, Held]]:
    """What trainer and agent have after a save of each of several structures, each larger than the one before."""
    import torch

    live_here(sockets)
    state: dict[str, Any] = {"w": {}}
    found = []
    with holdfast.Checkpointer(run, state, save=holdfast.Every(steps=1), on_full="wait", agent=holdfast.Agent(idle=60)) as ckpt:
        ckpt.resume()
        for step in range(1, times + 1):
            state["w"][f"part{step}"] = torch.full((300_000,), float(step))
            handle = ckpt.step(step)
            assert handle is not None
            handle.wait(DURABLE, 30)
            found.append((held_by(os.getpid()), held_by(agent_of(run))))
    return found


def test_the_memory_of_earlier_structures_is_let_go(in_background: Path, tmp_path: Path) -> None:
    [found] = pool(1).run(change_structure, tmp_path / "run", in_background, 8)
    for trainer, agent in found[1:]:
        assert (trainer.arenas, agent.arenas) == (found[0][0].arenas, found[0][1].arenas)
    assert found[-1][0].mappings <= found[0][0].mappings + 1, "a slot that nobody copies into any more may have its last view"
    assert found[-1][1].mappings == found[0][1].mappings
    nothing_is_left(in_background)


def save_and_stay(run: Path, sockets: Path, idle: float, level: str) -> int:
    """Save one step and wait for the test to kill this rank. Never returns."""
    live_here(sockets)
    job = Job()
    ckpt = holdfast.Checkpointer(run, job.state, save=holdfast.Every(steps=1), agent=holdfast.Agent(idle=idle))
    step = ckpt.resume() + 1
    job.progress["step"] = step - 1
    job.train(step)
    handle = ckpt.step(step)
    assert handle is not None
    handle.wait(level, 30)
    (run.parent / f"{step}-{dist.get_rank()}").touch()
    threading.Event().wait()
    return step


def live_and_die(run: Path, sockets: Path, world: int, idle: float, step: int, level: str = DURABLE) -> None:
    crew = Pool(world)
    crew.start(save_and_stay, run, sockets, idle, level)
    until(lambda: all((run.parent / f"{step}-{rank}").exists() for rank in range(world)), f"step {step} is {level} on all ranks")
    crew.close(at_once=True)


@pytest.mark.parametrize("world", [1, 4])
def test_an_agent_whose_job_is_gone_finishes_and_ends_after_the_idle_time(
    in_background: Path, tmp_path: Path, world: int
) -> None:
    live_and_die(tmp_path / "run", in_background, world, 1.0, 1, CAPTURED)
    nothing_is_left(in_background)
    latest = holdfast.Run(tmp_path / "run").latest()
    assert latest is not None
    assert latest.step == 1


def test_an_agent_lets_go_of_the_memory_of_ranks_that_a_smaller_job_has_no_more(in_background: Path, tmp_path: Path) -> None:
    live_and_die(tmp_path / "run", in_background, 4, 60.0, 1)
    [agent] = agents_in(in_background)
    before = held_by(agent)
    live_and_die(tmp_path / "run", in_background, 1, 60.0, 2)
    assert agents_in(in_background) == [agent]
    after = held_by(agent)
    assert (before.arenas, before.mappings) == (8, 4)
    assert (after.arenas, after.mappings) == (2, 1)
    kill(agent)
