"""A small language model in the manner of Llama, and how it is spread over ranks with torch's own means.

Nothing in it knows of holdfast. The output layer is tied to the embedding, there are fewer key heads than query heads, and no
dimension is a multiple of three.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention, silu

from holdfast.demo.hops.layout import CONTEXT

VOCABULARY, WIDTH, HEAD, HEADS, KEY_HEADS, HIDDEN, LAYERS = 256, 64, 16, 4, 2, 176, 2


class Attention(nn.Module):
    """Causal, with rotary positions. A tensor-parallel rank computes the heads that its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.wv = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for project in (self.wq, self.wk, self.wv))
        k, v = (heads.repeat_interleave(HEADS // KEY_HEADS, dim=1) for heads in (_turned(k, turn), v))
        mixed = scaled_dot_product_attention(_turned(q, turn), k, v, is_causal=True)
        attended: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return fed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention, self.ffn = Attention(), FeedForward()

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), turn)
        fed: Tensor = self.ffn(self.norm2(x))
        return x + fed


class Llama(nn.Module):
    """Tokens of shape (batch, length) in, logits of shape (batch, length, vocabulary) out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.04)
        self.head.weight = self.embed.weight
        angles = torch.outer(torch.arange(CONTEXT), 10_000 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        logits: Tensor = self.head(self.norm(x))
        return logits


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: each pair of elements turned by an angle that grows with the position."""
    cos, sin = turn
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def spread(model: Llama, mesh: DeviceMesh) -> None:
    """Tensor parallelism over the dimension `tensor` of the mesh where it has one, then FSDP2 over `data`."""
    if mesh["tensor"].size() > 1:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        for layer in model.layers:
            plan = {f"attention.{name}": columns for name in ("wq", "wk", "wv")} | {"ffn.w1": columns, "ffn.w3": columns}
            parallelize_module(layer, mesh["tensor"], {**plan, "attention.wo": rows, "ffn.w2": rows})
        whole = Replicate()  # tokens in, and logits out
        embed = RowwiseParallel(input_layouts=whole, output_layouts=whole)
        ends = {"embed": embed, "head": ColwiseParallel(input_layouts=whole, output_layouts=whole)}
        parallelize_module(model, mesh["tensor"], ends)
        model.head.weight = model.embed.weight  # each was cut by itself; they are one tensor
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
