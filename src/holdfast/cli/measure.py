"""How two stored tensors differ, read piece by piece beside each other, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format.digest import element_bits
from ..format.dtypes import Dtype
from ..format.index import NO_DIGEST, Index, TensorRow
from ..loading.checkpoint import Checkpoint
from .elements import Numbers, blocks, numbers, pieces

Raw = npt.NDArray[np.uint8]


@dataclass
class Distance:
    """Between two tensors of one shape. Elements differ where their bits do; where the dtypes differ, where their values do."""

    elements: int = 0
    differing: int = 0
    max_abs: float = 0
    """The largest difference of two finite elements."""
    relative_l2: float = 0.0
    """Length of the difference as a vector, by the length of the first tensor; of finite elements."""
    not_finite: int = 0
    """Differing elements of which at least one is NaN or infinite: the two measures above leave them out."""


def have_equal_chunks(a: Checkpoint, left: TensorRow, b: Checkpoint, right: TensorRow) -> bool:
    """Whether the indexes prove two tensors of one dtype and shape equal: the same boxes, cuts and digests.

    False proves nothing: the same bytes may be cut in another way, or have no digests.
    """
    left, right = a.index.canonical(left), b.index.canonical(right)
    ours, theirs = list(a.index.entries(left)), list(b.index.entries(right))
    if len(ours) != len(theirs):
        return False
    return all(
        a.index.box(left, x) == b.index.box(right, y) and _are_equal(a.index, x, b.index, y)
        for x, y in zip(ours, theirs, strict=True)
    )


def _are_equal(a: Index, x: int, b: Index, y: int) -> bool:
    one, other = a.chunks(x), b.chunks(y)
    columns = ("raw_start", "raw_bytes", "algorithm", "digest")
    has_digests = not (one.algorithm == NO_DIGEST).any()
    return has_digests and all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def distance(a: Checkpoint, left: TensorRow, b: Checkpoint, right: TensorRow) -> Distance:
    """Read two tensors of one shape, and measure.

    Raises:
        Corrupt: naming the place.
    """
    result = Distance()
    squares = [0.0, 0.0]
    for one, other in _beside(_blocks_of(a, left), left.dtype.itemsize, _blocks_of(b, right), right.dtype.itemsize):
        _add(result, squares, one, left.dtype, other, right.dtype)
    if squares[0]:
        result.relative_l2 = math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf
    return result


def _blocks_of(checkpoint: Checkpoint, tensor: TensorRow) -> Iterator[Raw]:
    for piece in pieces(checkpoint, tensor):
        yield from blocks(piece, tensor.dtype.itemsize)


def _beside(left: Iterator[Raw], left_size: int, right: Iterator[Raw], right_size: int) -> Iterator[tuple[Raw, Raw]]:
    """The bytes of the same elements of both sides, however each side is cut."""
    one = other = np.empty(0, np.uint8)
    while True:
        one = one if len(one) else next(left, one)
        other = other if len(other) else next(right, other)
        count = min(len(one) // left_size, len(other) // right_size)
        if not count:
            return
        yield one[: count * left_size], other[: count * right_size]
        one, other = one[count * left_size :], other[count * right_size :]


def _add(result: Distance, squares: list[float], one: Raw, left: Dtype, other: Raw, right: Dtype) -> None:
    result.elements += len(one) // left.itemsize
    if left == right and np.array_equal(one, other):
        squares[1] += _sum_of_squares(numbers(one, left))
        return
    x, y = numbers(one, left), numbers(other, right)
    with np.errstate(all="ignore"):
        if left == right:
            unequal = element_bits(one, left.itemsize) != element_bits(other, right.itemsize)
            unequal = unequal.any(axis=1) if unequal.ndim == 2 else unequal
        else:
            unequal = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        finite = np.isfinite(x) & np.isfinite(y)
        gap = _gap(x[finite], y[finite])
        result.differing += int(np.count_nonzero(unequal))
        result.not_finite += int(np.count_nonzero(unequal & ~finite))
        result.max_abs = max(result.max_abs, gap.max().item() if len(gap) else 0)
        squares[0] += _sum_of_squares(gap)
        squares[1] += _sum_of_squares(x)


def _gap(x: Numbers, y: Numbers) -> Numbers:
    """|x - y|; exact for integers of one kind, whose difference fits uint64 though not int64."""
    if x.dtype == y.dtype and x.dtype.kind in "iu":
        return np.where(x > y, x.astype(np.uint64) - y.astype(np.uint64), y.astype(np.uint64) - x.astype(np.uint64))
    kind: Any = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    gap: Numbers = np.abs(x.astype(kind) - y.astype(kind))
    return gap


def _sum_of_squares(values: Numbers) -> float:
    magnitudes = np.abs(values.astype(np.complex128 if values.dtype.kind == "c" else np.float64))
    return float(np.square(magnitudes[np.isfinite(magnitudes)]).sum())
