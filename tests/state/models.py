"""Models small enough to read and with what real ones have, and a way to train them that is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORDS, WIDTH = 13, 6


class Block(nn.Module):
    """A linear layer, a batch norm (buffers that forward changes), and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding unless `tied=False`."""

    def __init__(self, *, blocks: int = 2, tied: bool = True, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(blocks))
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NET_NAMES = [
    "model.blocks.0.linear.bias",
    "model.blocks.0.linear.weight",
    "model.blocks.0.norm.bias",
    "model.blocks.0.norm.num_batches_tracked",
    "model.blocks.0.norm.running_mean",
    "model.blocks.0.norm.running_var",
    "model.blocks.0.norm.weight",
    "model.embed.weight",
    "model.head.weight",
]
"""The names of `Net(blocks=1)` as the role `model`."""


def words(step: int, size: int = 8) -> Tensor:
    """The batch of a step: a function of its number alone."""
    return torch.randint(0, WORDS, (size,), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    after: Callable[[Tensor], Any] = lambda loss: None,
) -> list[float]:
    """Train on the batches of `steps`; returns the losses. `after` is called with the loss after each step."""
    losses = []
    for step in steps:
        batch = words(step)

        def closure(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), batch.roll(1))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            loss = optimizer.step(closure)
        else:
            loss = closure()
            optimizer.step()
        losses.append(loss.item())
        after(loss.detach())
    return losses
