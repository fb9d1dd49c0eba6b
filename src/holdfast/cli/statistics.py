"""Statistics of one stored tensor, read piece by piece: extremes, mean, spread, what is not finite, and its logical digest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..format.digest import LogicalDigest, element_bits
from ..loading.checkpoint import Checkpoint
from .elements import Numbers, blocks, numbers, pieces


@dataclass
class Statistics:
    """Of all elements; of complex ones, of their magnitudes. The first four are of the finite elements, None without any."""

    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    """Of the elements as a whole population."""
    elements: int = 0
    zeros: int = 0
    nan: int = 0
    inf: int = 0
    """Of either sign."""
    digest: str = ""
    """The logical digest, as `Checkpoint.digest` gives it."""


def statistics(checkpoint: Checkpoint, name: str, advance: Callable[[int], None] = lambda nbytes: None) -> Statistics:
    """Read a tensor once, and sum it up.

    Args:
        advance: called with the number of bytes that were done.
    Raises:
        Corrupt: naming the place.  KeyError: there is no such tensor.
    """
    tensor = checkpoint.tensor(name)
    result, moments = Statistics(), _Moments()
    digest = LogicalDigest(tensor.dtype.name, tensor.shape)
    for raw in pieces(checkpoint, tensor):
        for block in blocks(raw, tensor.dtype.itemsize):
            bits = element_bits(block, tensor.dtype.itemsize)
            digest.add(bits, result.elements)
            result.elements += len(bits)
            _add(result, moments, numbers(block, tensor.dtype))
            advance(len(block))
    if moments.count:
        result.mean, result.std = moments.mean, math.sqrt(moments.squares / moments.count)
    result.digest = digest.hex()
    return result


class _Moments:
    """Mean and sum of squared distances from it, of blocks that are merged one by one (Chan, Golub, LeVeque 1979)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, values: Numbers) -> None:
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        both, distance = self.count + len(values), mean - self.mean
        self.squares += squares + distance * distance * self.count * len(values) / both
        self.mean += distance * len(values) / both
        self.count = both


def _add(result: Statistics, moments: _Moments, values: Numbers) -> None:
    with np.errstate(all="ignore"):
        if values.dtype.kind == "c":
            values = np.abs(values)
        result.zeros += int(np.count_nonzero(values == 0))
        if values.dtype.kind == "f":
            result.nan += int(np.count_nonzero(np.isnan(values)))
            result.inf += int(np.count_nonzero(np.isinf(values)))
            values = values[np.isfinite(values)]
        if len(values):
            low, high = values.min().item(), values.max().item()
            result.min = low if result.min is None else min(low, result.min)
            result.max = high if result.max is None else max(high, result.max)
            moments.add(values.astype(np.float64))
