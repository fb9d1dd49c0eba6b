"""Tensors of every dtype, shape and layout, made of given bits, and their bits again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


def random(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of random bits: NaNs with payloads, infinities and subnormals among them."""
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    raw = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        raw %= 2
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor's elements."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def strided(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every other element of each dimension, from the second on."""
    base = random(dtype, tuple(2 * n + 1 for n in shape), seed)
    return base[tuple(slice(1, 1 + 2 * n, 2) for n in shape)]


def offset(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Contiguous, but not at the start of its storage."""
    return random(dtype, (math.prod(shape) + 3,), seed)[3:].view(shape)


def transposed(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return random(dtype, shape[::-1], seed).permute(tuple(reversed(range(len(shape)))))


def rolled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Dense, with the last dimension outermost in memory, as channels-last is."""
    return (
        random(dtype, (*shape[-1:], *shape[:-1]), seed).permute(*range(1, len(shape)), 0) if shape else random(dtype, shape, seed)
    )


def conjugated(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A lazily conjugated view; for real dtypes, where there is one, a lazily negated one."""
    if dtype.is_complex:
        return random(dtype, shape, seed).conj()
    if dtype in (torch.float32, torch.float64):
        return random(torch.complex64 if dtype == torch.float32 else torch.complex128, shape, seed).conj().imag
    return random(dtype, shape, seed)


def leaf(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A parameter."""
    tensor = random(dtype, shape, seed)
    return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point and dtype.itemsize > 1)


LAYOUTS: list[Callable[[torch.dtype, tuple[int, ...], int], torch.Tensor]] = [
    random,
    strided,
    offset,
    transposed,
    rolled,
    conjugated,
    leaf,
]


@dataclass(frozen=True)
class Kind:
    """What a tensor is made like; two of a kind have the same dtype, shape and layout, and other bits."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Callable[[torch.dtype, tuple[int, ...], int], torch.Tensor]

    def make(self, seed: int) -> torch.Tensor:
        return self.layout(self.dtype, self.shape, seed)


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 7]), max_size=4).map(tuple)
kinds = st.builds(Kind, st.sampled_from(DTYPES), shapes, st.sampled_from(LAYOUTS))
