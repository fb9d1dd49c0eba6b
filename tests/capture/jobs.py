"""A training job of some megabytes, and what its state was at each step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast


class Net(nn.Module):
    """Layers wide enough to be copied in the background, narrow ones, a buffer that the forward changes, a tied layer."""

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x)) * self.scale


class Job:
    """Args:
    make: the optimizer of the net's parameters.
    """

    def __init__(self, make: Any = torch.optim.AdamW, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.optimizer = make(self.net.parameters(), lr=1e-3, **options)
        self.progress: dict[str, Any] = {"step": 0, "seen": []}

    @property
    def state(self) -> holdfast.State:
        return holdfast.State(model=self.net, optimizer=self.optimizer, progress=self.progress)

    def backward(self) -> None:
        tokens = torch.randint(0, 50, (16,))
        loss = nn.functional.cross_entropy(self.net(tokens), tokens)
        loss.backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.progress["step"] += 1
        self.progress["seen"].append(self.progress["step"])

    def copy(self) -> dict[str, Any]:
        """The state now, in memory of its own."""
        return {
            "model": {name: tensor.detach().clone() for name, tensor in self.net.state_dict().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "progress": copy.deepcopy(self.progress),
            "rng": torch.get_rng_state(),
        }


def stored(run: Path | str, step: int) -> dict[str, Any]:
    """What a run holds of a step, in the shape of `Job.copy`: loaded by the library into a job that has other values."""
    job = Job(seed=99)
    job.train()
    before = torch.get_rng_state()
    holdfast.restore(run, job.state, step=step)
    found = job.copy()
    torch.set_rng_state(before)
    return found
