"""A job that saves in the background and is killed: its state at each step is known, and it tells what it was promised.

All arithmetic is on whole numbers that float64 holds exactly: parameters are `base - weight * n * (n + 1) / 2` after step n, and
momenta `weight * n`. So each element is another one at each step, and a mixture of two steps shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from joint.states import mesh_of, shard
from torch import nn
from torch.distributed.tensor import DTensor

import holdfast
from holdfast.handle import CAPTURED, DURABLE, Handle

SHAPES = {"rows": (67, 4096), "plain": (20_481,), "bias": (3,)}
"""`rows` is sharded over the ranks, which no number of them from 2 to 4 divides; the others are whole on each."""
FOR_EVER = 1_000_000
"""More steps than any life has; float64 still has their numbers."""


def live_here(agents: Path) -> None:
    """Save as users do, by agents whose sockets lie in this directory; for the process of a rank."""
    os.environ.pop("HOLDFAST_SYNC", None)
    os.environ["HOLDFAST_AGENT_DIR"] = str(agents)
    os.environ["HOLDFAST_AGENT_LOG"] = str(agents.with_name("agents.log"))  # for whoever looks at a failure


def whole(name: str, step: int, scale: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A parameter and its momentum after `step`."""
    shape = (SHAPES[name][0] * scale, *SHAPES[name][1:])
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    weight = (1 + index % 3).double()
    return (index % 1000).double() - weight * (step * (step + 1) // 2), weight * step


class Job:
    """What a rank holds; `scale` times as much as it need be."""

    def __init__(self, scale: int = 1) -> None:
        world = dist.get_world_size()
        self._mesh = mesh_of(*range(world)) if world > 1 else None
        self._scale = scale
        self.model = nn.Module()
        for name in SHAPES:
            parameter = nn.Parameter(self._cut(name, whole(name, 0, scale)[0]))
            parameter.grad = self._cut(name, whole(name, 1, scale)[1])
            self.model.register_parameter(name, parameter)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1.0, 1.0, foreach=False)
        self.progress = {"step": 0}

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def train(self, step: int) -> None:
        self.optimizer.step()
        self.progress["step"] = step

    def wrong(self, step: int) -> list[str]:
        """What is not, in every bit, as it should be after `step`."""
        found = [] if self.progress == {"step": step} else [f"progress is {self.progress}"]
        for name, parameter in self.model.named_parameters():
            momentum = self.optimizer.state.get(parameter, {}).get("momentum_buffer")
            for key, have, wanted in zip(
                (name, f"{name}.momentum"), (parameter, momentum), whole(name, step, self._scale), strict=True
            ):
                if have is None:
                    found += [f"{key} is not there"] if step else []
                elif not torch.equal(_local(have), _local(self._cut(name, wanted))):
                    found.append(key)
        return found

    def _cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return shard(tensor, self._mesh) if name == "rows" and self._mesh is not None else tensor.clone()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


class Diary:
    """What a rank has told, a line each. What was written is there whoever is killed then; only a power cut would take it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def tell(self, **line: Any) -> None:
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def diary_of(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}-{rank}")


@contextlib.contextmanager
def telling(handles: queue.SimpleQueue[Handle | None], level: str, told: Diary) -> Iterator[None]:
    """Tells of each handle, in order, when it has come to a level, or has failed."""

    def tell() -> None:
        while (handle := handles.get()) is not None:
            try:
                handle.wait(level)
                told.tell(**{level: handle.step})
            except holdfast.HoldfastError as error:
                told.tell(lost=handle.step, level=level, error=type(error).__name__, text=str(error))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    yield
    handles.put(None)
    thread.join()


def train(run: Path, diary: Path, agents: Path, seed: int, most: int = FOR_EVER, idle: float = 60.0) -> None:
    """One life of the job on a rank: resume, check, and save each step in the background, until `most` steps are done.

    Tells: resumed and wrong; step, before each call of `step` that may save; captured, durable or lost of each save; warned.
    """
    live_here(agents)
    rank = dist.get_rank()
    told, rng = Diary(diary_of(diary, rank)), random.Random(f"{seed} {rank}")
    handles: tuple[queue.SimpleQueue[Any], queue.SimpleQueue[Any]] = queue.SimpleQueue(), queue.SimpleQueue()
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: told.tell(warned=str(message))  # type: ignore[assignment]
    try:
        with telling(handles[0], CAPTURED, told), telling(handles[1], DURABLE, told):
            _train(run, told, handles, rng, most, idle)
    except Exception as error:
        told.tell(crashed=f"{type(error).__name__}: {error}")
        raise


def _train(run: Path, told: Diary, handles: Sequence[queue.SimpleQueue[Any]], rng: random.Random, most: int, idle: float) -> None:
    job = Job()
    with holdfast.Checkpointer(
        run, job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=2), agent=holdfast.Agent(idle=idle)
    ) as ckpt:
        step = ckpt.resume()
        told.tell(resumed=step, wrong=job.wrong(step))
        for _ in range(most):
            step += 1
            job.train(step)
            time.sleep(rng.random() * 0.01)  # ranks are not all equally fast
            told.tell(step=step)
            if (handle := ckpt.step(step)) is not None:
                for line in handles:
                    line.put(handle)
    told.tell(ended=step)
