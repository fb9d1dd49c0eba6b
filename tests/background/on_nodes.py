"""Ranks of several nodes on one machine: which node a rank is on, and what each of them does in the tests of several nodes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch.distributed as dist

import holdfast
from holdfast.handle import CAPTURED, DURABLE

from .job import Job, live_here

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


def look(run: Path, sockets: Path, scale: int = 1) -> tuple[int, list[str]]:
    """The step that is resumed from, and what is wrong with it."""
    live_on_a_node(sockets)
    job = Job(scale)
    with checkpointer(run, job) as ckpt:
        step = ckpt.resume()
        return step, job.wrong(step)


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


def has_stayed(run: Path, world: int) -> bool:
    return all((run.parent / f"stays-{rank}").exists() for rank in range(world))


__all__ = ["CAPTURED", "DURABLE", "NODES", "checkpointer", "has_stayed", "live_on_a_node", "look", "save_and_stay", "save_steps"]
