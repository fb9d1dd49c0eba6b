"""What ranks do in these tests: steps, a long evaluation that one of them is told to leave, and the end of the `with`."""

from __future__ import annotations

import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import Preemption

SAVES_AT = 2
EVALUATES_AT = 3
LAST = 40


@dataclass
class Told:
    """What became of one rank."""

    answers: list[bool]
    """Of `should_stop`, call by call."""
    error: str = ""
    """Of an explicit save after the stop."""
    warned: tuple[str, ...] = ()
    is_restored: bool = False
    """The signals' handlers are as they were."""


def state(step: int) -> dict[str, Any]:
    """What a rank holds: a replicated tensor, and one of its own."""
    rank = dist.get_rank()
    return {"same": {"w": torch.full((50, 3), float(step))}, "own": {f"r{rank}": torch.full((9,), step + rank / 8)}}


def go_on(held: dict[str, Any], step: int) -> None:
    for role, tensors in state(step).items():
        for name, tensor in tensors.items():
            held[role][name].copy_(tensor)


def evaluate(directory: Path, seconds: float) -> None:
    """Say that this rank is in it, and come back some time after the test has sent its signal."""
    (directory / f"evaluating-{dist.get_rank()}").touch()
    end = time.monotonic() + 60
    while not (directory / "sent").exists():
        assert time.monotonic() < end, "the test did not send its signal"
        time.sleep(0.01)
    time.sleep(seconds)


def train(directory: Path, window: str, past_seconds: float | None, explicit: bool, file: str | None = None) -> Told:
    """Train until told to stop. Nothing after `SAVES_AT` is saved before that.

    Args:
        window: of Preemption. past_seconds: what an earlier save is said to have taken. explicit: save by hand before leaving.
        file: also a wish to stop.
    """
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    told, rank, held = Told([]), dist.get_rank(), state(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        preemption = Preemption(window=window, file=file)
        save = holdfast.Every(steps=1000)
        with holdfast.Checkpointer(directory / "run", held, save=save, preemption=preemption, deadline="40s") as ckpt:
            for step in range(ckpt.resume() + 1, LAST):
                dist.barrier()  # as gradients make it
                time.sleep(0.01 * rank)  # they come to their calls one after the other
                go_on(held, step)
                ckpt.step(step)
                if step == SAVES_AT:
                    ckpt.save()
                    if past_seconds is not None:
                        ckpt._stopping.note_save(past_seconds)
                if step == EVALUATES_AT:
                    evaluate(directory, 0.1 * rank)
                told.answers.append(ckpt.should_stop())
                if told.answers[-1]:
                    break
            assert ckpt.should_stop() == told.answers[-1]
            if explicit:
                try:
                    ckpt.save()
                except holdfast.HoldfastError as error:
                    told.error = f"{type(error).__name__}: {error}"
    told.warned = tuple(str(w.message) for w in caught if issubclass(w.category, RuntimeWarning))
    told.is_restored = before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    return told
