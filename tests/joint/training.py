"""A training job whose state at each step is known: it resumes, checks what it got, and saves each step until it is killed.

All arithmetic is exact or rounded once, so that any number of ranks, however the tensors are cut, comes to the same bits.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast

from .states import mesh_of, shard

SHAPES = {"wide": (11, 6), "tall": (5, 40), "bias": (3,), "one": (1,)}
FROZEN = 3000
"""Elements that never change: later steps refer to an earlier one for them."""
MOMENTUM, RATE = 0.5, 0.25

Truth = dict[str, torch.Tensor]


def gradient(name: str, step: int) -> torch.Tensor:
    """Small whole numbers: halving and adding them rounds at most once an operation."""
    generator = torch.Generator().manual_seed(7 * step + sum(map(ord, name)))
    return torch.randint(-8, 9, SHAPES[name], generator=generator).float()


def begin() -> Truth:
    """The whole state of step 0: parameters, and the momentum of each."""
    made: Truth = {}
    for name, shape in SHAPES.items():
        made[name] = torch.arange(float(torch.Size(shape).numel())).view(shape)
        made[f"{name}.momentum"] = torch.zeros(shape)
    return made


def go_on(truth: Truth, step: int) -> None:
    """The whole state of `step` from that of the step before, in place."""
    for name in SHAPES:
        truth[f"{name}.momentum"].mul_(MOMENTUM).add_(gradient(name, step))
        truth[name].sub_(RATE * truth[f"{name}.momentum"])


class Job:
    """What a rank holds: sharded over all ranks where there are several, and some of it replicated."""

    def __init__(self, world: int) -> None:
        self._mesh = mesh_of(*range(world)) if world > 1 else None
        self.model = nn.Module()
        for name, tensor in begin().items():
            if name in SHAPES:
                self.model.register_parameter(name, nn.Parameter(self._cut(name, tensor)))
        self.model.register_buffer("frozen", torch.arange(float(FROZEN)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM, foreach=False)
        self.progress = {"step": 0}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def train(self, step: int) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = self._cut(name, gradient(name, step))
        self.optimizer.step()
        self.progress["step"] = step

    def wrong(self, truth: Truth, step: int) -> list[str]:
        """What is not as it should be at `step`."""
        found = [] if self.progress == {"step": step} else [f"progress is {self.progress}"]
        if not torch.equal(self.model.get_buffer("frozen"), torch.arange(float(FROZEN))):
            found.append("frozen")
        for name, parameter in self.model.named_parameters():
            have = {name: parameter.detach()}
            have[f"{name}.momentum"] = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            for key, tensor in have.items():
                wanted = self._cut(name, truth[key])
                if tensor is None:
                    found += [f"{key} is not there"] if step else []
                elif _bits(tensor) != _bits(wanted):
                    found.append(key)
        return found

    def _cut(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor; `bias` is plain on all ranks."""
        return whole.clone() if self._mesh is None or name == "bias" else shard(whole, self._mesh)


def _bits(tensor: torch.Tensor) -> bytes:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous().numpy().tobytes()


class Diary:
    """What a rank has told, a line each; durable when it returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")
        os.fsync(self._fd)


def read_diary(path: Path) -> list[dict[str, Any]]:
    """All whole lines."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train(run: Path, diary: Path, truth: Truth, deadline: float, most: int, seed: int) -> None:
    """One life of a job: resume, check, and save each step, until a save fails or `most` steps are done."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told, rng = Diary(diary.with_name(f"{diary.name}-{rank}")), random.Random(f"{seed} {rank}")
    job = Job(world)
    try:
        with holdfast.Checkpointer(
            run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=2), deadline=deadline
        ) as ckpt, warnings.catch_warnings():  # fmt: skip
            warnings.simplefilter("error", RuntimeWarning)
            step = ckpt.resume()
            told.tell(resumed=step, wrong=job.wrong(truth, step))
            for _ in range(most):
                step += 1
                job.train(step)
                if rng.random() < 0.1:
                    torch.randn(200_000 * rng.randrange(3))  # ranks are not all equally fast
                ckpt.step(step)
                told.tell(saved=step)
    except (holdfast.HoldfastError, RuntimeWarning) as error:
        told.tell(failed=type(error).__name__, text=str(error))
