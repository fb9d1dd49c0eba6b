"""The model of the matrix: a small transformer with a mixture of experts, built with all that makes states hard to reshard.

62 trainable parameters (with AdamW's moments some 250 tensors) in float32 and bfloat16, int64 buffers, an output layer tied to
the embedding, an empty tensor, scalars, a transposed one, dimensions that 2, 3 and 4 do not divide, and first dimensions of 1,
2 and 3, whose shards are empty on some ranks. The same seed gives the same logical tensors under every layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, HEAD, HIDDEN, EXPERTS, EXPERT_HIDDEN, RANK, LENGTH, BLOCKS = 29, 12, 6, 13, 5, 10, 7, 5, 4
MOE_BLOCK = 1
ADAPTED_BLOCKS = (0, 3)
LARGE_SIDE = 4099
"""A square of this side in float32 is just above 64 MiB, and 4099 is a prime."""


class Attention(nn.Module):
    """Its heads are counted by what the projections give, so that each tensor-parallel rank computes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / HEAD**0.5, -1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Experts(nn.Module):
    """Stacked experts. Where the weights are cut, each rank computes with what it has, and the results are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, EXPERT_HIDDEN, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, EXPERT_HIDDEN) / EXPERT_HIDDEN**0.5)

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        w1, w2, groups = self.w1, self.w2, []
        if isinstance(w1, DTensor):
            for dimension, placement in enumerate(w1.placements):
                if placement.is_shard(0):
                    mine = torch.arange(EXPERTS).chunk(w1.device_mesh.size(dimension))[w1.device_mesh.get_local_rank(dimension)]
                groups.append(w1.device_mesh.get_group(dimension))
            x, gates = _Copy.apply(x, groups), _Copy.apply(gates, groups)
            gates = gates[..., mine] if w1.placements[0].is_shard(0) else gates
            w1, w2 = w1.to_local(), w2.to_local()
        hidden = torch.relu(torch.einsum("btd,efd->btef", x, w1))
        mixed = torch.einsum("btef,edf,bte->btd", hidden, w2, gates)
        return _Sum.apply(mixed, groups) if groups else mixed


class Moe(nn.Module):
    """The two best experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = torch.softmax(self.router(x), -1)
        return self.experts(x, gates * (gates >= gates.topk(2).values[..., -1:]))


class Adapter(nn.Sequential):
    """Two bfloat16 matrices."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False))
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(torch.bfloat16)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn = Moe() if number == MOE_BLOCK else Mlp()
        if number in ADAPTED_BLOCKS:
            self.adapter = Adapter()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        x = x + self.attention(self.norm1(x))
        x = x + self.ffn(self.norm2(x)) * self.scale
        return x + self.adapter(x) if hasattr(self, "adapter") else x


class Model(nn.Module):
    """The whole model, or a part of it for a pipeline stage: names are the same in both.

    Args:
        blocks: those that this stage holds. The stage of block 0 embeds; the stage of the last block has the output layer
            *and* the embedding that it is tied to.
        large: with a frozen parameter above 64 MiB, in the stage of block 0.
    """

    def __init__(self, *, blocks: range = range(BLOCKS), large: bool = False) -> None:
        super().__init__()
        self.is_first, self.is_last = 0 in blocks, BLOCKS - 1 in blocks
        embed, every = nn.Embedding(VOCABULARY, WIDTH), [Block(number) for number in range(BLOCKS)]
        if self.is_first or self.is_last:
            self.embed = embed
        self.blocks = nn.ModuleDict({str(number): every[number] for number in blocks})
        if self.is_first:
            self.register_buffer("empty", torch.empty(0, 5))
            self.start = nn.Parameter(torch.randn(2))
            self.mix = nn.Parameter(torch.randn(3, WIDTH))
            self.register_buffer("positions", torch.arange(LENGTH).flip(0))
        if self.is_last:
            self.norm = nn.RMSNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("transposed", torch.linspace(-1, 1, 13 * WIDTH).view(13, WIDTH).t())
        if large and self.is_first:
            self.large = nn.Parameter(torch.arange(LARGE_SIDE**2, dtype=torch.float32).view(LARGE_SIDE, -1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first:
            x = self.embed(x) + self.mix[self.positions % 3] + self.start.sum() / 10
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x) + self.transposed.sum(1) / 50) if self.is_last else x


class _Copy(torch.autograd.Function):
    """The same forward; the sum over groups backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, groups: list[Any]) -> torch.Tensor:
        context.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, context.groups), None


class _Sum(torch.autograd.Function):
    """The sum over groups forward; the same backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, groups: list[Any]) -> torch.Tensor:
        return _sum(x, groups)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _sum(x: torch.Tensor, groups: list[Any]) -> torch.Tensor:
    total = x.contiguous().clone()
    for group in groups:
        dist.all_reduce(total, group=group)
    return total
