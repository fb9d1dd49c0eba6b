"""A decoder-only transformer over bytes, small enough for one core and large enough for a save to take a while.

Nothing in it knows of holdfast. It has what makes a resume hard to get right: dropout, so that each step depends on the
state of the random generator, and an output layer tied to the embedding, so that one tensor has two names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; 0.4 million parameters unless told."""

    vocabulary: int = 256
    context: int = 64
    """The longest sequence, in tokens."""
    width: int = 128
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return attended


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        fed: Tensor = self.drop(self.down(gelu(self.up(self.norm2(x)))))
        return x + fed


class Transformer(nn.Module):
    """Tokens of shape (batch, length) in, logits of shape (batch, length, vocabulary) out."""

    def __init__(self, shape: Shape | None = None) -> None:
        super().__init__()
        self.shape = shape = shape or Shape()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(_initialise)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
