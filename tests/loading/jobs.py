"""A training job small enough to run many times: its whole state is a count, and weights that tell how far it came."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import holdfast

EACH = holdfast.Every(steps=1)
"""Save every step."""


class Job:
    """A linear layer to which each step adds one, and a count of the samples that it has seen."""

    def __init__(self, size: int = 4) -> None:
        self.model = nn.Linear(size, size)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.data = {"samples": 0}
        self.state = holdfast.State(rng=False, model=self.model, data=self.data)

    @property
    def at(self) -> float:
        """The step whose state this is; all weights say the same."""
        (value,) = {float(v) for p in self.model.parameters() for v in p.detach().flatten()}
        assert self.data["samples"] == value * 10
        return value

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(1)
        self.data["samples"] += 10


def run_job(run: Any, steps: int, **settings: Any) -> Job:
    """Resume a job in `run`, train it up to `steps`, and leave the `with` as a job does."""
    job = Job()
    with holdfast.Checkpointer(run, job.state, **{"save": EACH, "keep": holdfast.Keep(last=None), **settings}) as ckpt:
        for step in range(ckpt.resume(), steps):
            job.step()
            ckpt.step(step + 1, metrics={"loss": 1 / (step + 1)})
    return job


def steps_of(run: Any) -> list[int]:
    """The committed steps of the lineage."""
    return [step.step for step in holdfast.Run(run).steps()]
