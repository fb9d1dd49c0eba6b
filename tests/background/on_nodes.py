"""Ranks of several nodes on one machine: which node a rank is on, and what each of them does in the tests of several nodes."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import holdfast
from holdfast.agent.links import ask
from holdfast.agent.messages import Ask, Told
from holdfast.handle import DURABLE, Handle
from holdfast.run.store_board import board_folder
from holdfast.store.locate import open_store

from .job import Job, live_here
from .lives import until
from .test_leaks import held_by

NODES = ("a", "b")


def live_on_a_node(sockets: Path) -> str:
    """Be a rank of one of two nodes, as many ranks on each; returns which."""
    live_here(sockets)
    node = NODES[dist.get_rank() * len(NODES) // dist.get_world_size()]
    os.environ["HOLDFAST_NODE"] = node
    return node


def checkpointer(run: Path, job: Job, deadline: float = 30, idle: float = 60) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=9), on_full="wait", deadline=deadline,
        agent=holdfast.Agent(idle=idle),
    )  # fmt: skip


def save_steps(run: Path, sockets: Path, steps: int) -> list[str]:
    """Resume, check, and save some steps. What was wrong."""
    live_on_a_node(sockets)
    job = Job()
    with checkpointer(run, job) as ckpt:
        step = ckpt.resume()
        wrong = job.wrong(step)
        for number in range(step + 1, step + steps + 1):
            job.train(number)
            ckpt.step(number)
    return wrong


@dataclass(frozen=True)
class AgentHas:
    """What the agent of this rank's node has, and how many files the board of all."""

    descriptors: int
    arenas: int
    mappings: int
    threads: int
    on_board: int


def save_often(run: Path, sockets: Path, first: int, saves: int) -> tuple[AgentHas, AgentHas]:
    """What there is after the first saves, and after all."""
    node = live_on_a_node(sockets)
    job, found = Job(), []
    with checkpointer(run, job) as ckpt:
        ckpt.resume()
        for step in range(1, saves + 1):
            job.train(step)
            handle = ckpt.step(step)
            assert handle is not None
            handle.wait(DURABLE, 30)
            if step in (first, saves):
                told = ask(open_store(run).url, node, Ask(), 5.0)
                assert isinstance(told, Told)
                held = held_by(told.status.pid)
                on_board = len(list((run / board_folder(1)).iterdir()))
                found.append(AgentHas(held.descriptors, held.arenas, held.mappings, held.threads, on_board))
    return found[0], found[1]


def look(run: Path, sockets: Path, scale: int = 1) -> tuple[int, list[str]]:
    """The step that is resumed from, and what is wrong with it."""
    live_on_a_node(sockets)
    job = Job(scale)
    with checkpointer(run, job) as ckpt:
        step = ckpt.resume()
        return step, job.wrong(step)


def look_in_memory(run: Path, sockets: Path, scale: int) -> tuple[int, list[str], list[int]]:
    """As `look`, and how many bytes this rank has read from the memory of its node's agent: of each loading."""
    from holdfast.agent import recall

    read: list[int] = []
    forget = recall.Remembering.forget

    def count(self: recall.Remembering) -> None:
        read.append(self.read_bytes)
        forget(self)

    recall.Remembering.forget = count  # type: ignore[method-assign]
    try:
        return (*look(run, sockets, scale), read)
    finally:
        recall.Remembering.forget = forget  # type: ignore[method-assign]


def save_and_stay(run: Path, sockets: Path, level: str, scale: int = 1) -> None:
    """One durable step, and another up to a level; then wait for the test to kill this rank."""
    live_on_a_node(sockets)
    job = Job(scale)
    ckpt = checkpointer(run, job)
    assert ckpt.resume() == 0
    for step, wanted in ((1, DURABLE), (2, level)):
        job.train(step)
        handle = ckpt.step(step)
        assert handle is not None
        handle.wait(wanted, 30)
    (run.parent / f"stays-{dist.get_rank()}").touch()
    threading.Event().wait()


def save_when_told(run: Path, sockets: Path, deadline: float, most: int) -> dict[int, str]:
    """One durable step; others when the test says so, until one has not failed. How those have ended: an error, or nothing."""
    live_on_a_node(sockets)
    job, outcomes, step = Job(), {}, 1
    with checkpointer(run, job, deadline) as ckpt:
        assert ckpt.resume() == 0
        job.train(step)
        handle = ckpt.step(step)
        assert handle is not None
        handle.wait(DURABLE, 30)
        (run.parent / f"stays-{dist.get_rank()}").touch()
        until(lambda: (run.parent / "go on").exists(), "the test lets it go on")
        while step < most and outcomes.get(step) != "":
            step += 1
            job.train(step)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                handle = ckpt.step(step)
            outcomes[step] = _ended(handle)
    return outcomes


def _ended(handle: Handle | None) -> str:
    if handle is None:
        return "left out"
    try:
        handle.wait(DURABLE, 30)
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def has_stayed(run: Path, world: int) -> bool:
    return all((run.parent / f"stays-{rank}").exists() for rank in range(world))
