"""A training on a GPU with all that changes there: parameters, moments, statistics of batches, an average, a scale of losses."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import holdfast

CUDA = torch.device("cuda")


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 97, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(width, 31).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("largest", torch.zeros(1000))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.norm(x)
        self.largest.copy_(torch.cat([self.largest[1:], x.detach().abs().max().float().view(1)]))  # as FP8 keeps it
        return self.head(x + self.turned.sum(0)) * self.scale


class Job:
    """Args:
    options: of AdamW. is_scaled: with half precision and a GradScaler, some of whose steps are skipped.
    """

    def __init__(self, width: int = 256, seed: int = 0, is_scaled: bool = False, **options: Any) -> None:
        torch.manual_seed(seed)
        self.net = Net(width).to(CUDA)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, **options)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.scaler = torch.amp.GradScaler("cuda", enabled=is_scaled, init_scale=2.0**22, growth_interval=5)
        self._is_scaled = is_scaled

    @property
    def state(self) -> holdfast.State:
        return holdfast.State(model=self.net, optimizer=self.optimizer, average=self.average, scaler=self.scaler)

    def train(self, ckpt: holdfast.Checkpointer) -> None:
        tokens = torch.randint(0, 97, (32,), device=CUDA)
        with torch.autocast("cuda", torch.float16, enabled=self._is_scaled):
            loss = nn.functional.cross_entropy(self.net(tokens), tokens)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with ckpt.mutating(), torch.no_grad():  # the scaler may have left the optimizer's step out, and its hook with it
            torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 0.1)
            for mine, other in zip(self.average.buffers(), self.net.buffers(), strict=True):
                mine.copy_(other)

    def copy(self) -> dict[str, Any]:
        """The state now, in memory of its own; does not wait for the GPU, except for a scaler's scale."""
        return {
            "model": _cloned(self.net.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "average": _cloned(self.average.state_dict()),
            "scaler": dict(self.scaler.state_dict()),
            "rng": torch.cuda.get_rng_state(),
        }


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def stored(run: Any, step: int, job: Job) -> dict[str, Any]:
    """What a run holds of a step, in the shape of `Job.copy`: loaded into a job with other values."""
    before = torch.cuda.get_rng_state()
    holdfast.restore(run, job.state, step=step)
    found = job.copy()
    torch.cuda.set_rng_state(before)
    return found
