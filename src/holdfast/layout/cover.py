"""Whether boxes cover tensors exactly once, for millions of boxes: a proof by corners, in columns.

Give each corner of a box the sign (-1)^(number of its upper coordinates). The signed corners of some boxes determine how often
each element lies in them, and the other way round. So boxes cover a tensor exactly once if and only if their signed corners,
added up, are those of the tensor's own box. What is wrong where they are not, `boxes.covers_once` finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .boxes import Box, covers_once

Array = npt.NDArray[Any]

_BLOCK_RUNS = 1 << 18
_MOST_CUT_DIMS = 6
_MOST_BITS = 60


@dataclass(frozen=True, slots=True)
class Cuts:
    """Tensors, and the boxes that they are cut into, as columns of int64. Offsets begin at 0 and never fall; that shapes and
    boxes make sense is not assumed."""

    shape_offsets: Array
    shapes: Array
    """The shape of tensor i: from `shape_offsets[i]` to `shape_offsets[i + 1]`."""
    entries: Array
    """The boxes of tensor i: from `entries[i]` to `entries[i + 1]`."""
    box_offsets: Array
    boxes: Array
    """Box i, offset and then extents: from `2 * box_offsets[i]` to `2 * box_offsets[i + 1]`."""
    is_held: Array
    """For each tensor, whether its elements must lie in its boxes."""

    def shape(self, row: int) -> tuple[int, ...]:
        return tuple(self.shapes[self.shape_offsets[row] : self.shape_offsets[row + 1]].tolist())

    def boxes_of(self, row: int) -> list[Box]:
        """The boxes of a tensor, in their order."""
        found: list[Box] = []
        for entry in range(int(self.entries[row]), int(self.entries[row + 1])):
            flat = self.boxes[2 * self.box_offsets[entry] : 2 * self.box_offsets[entry + 1]].tolist()
            found.append((tuple(flat[: len(flat) // 2]), tuple(flat[len(flat) // 2 :])))
        return found


def uncovered(cuts: Cuts) -> Array:
    """Rows, ascending, of the tensors that have a box outside them, or an element that is not in exactly one box."""
    bad = np.zeros(len(cuts.is_held), bool)
    for first, last in run_blocks(cuts.entries):
        dims = np.diff(cuts.shape_offsets[first : last + 1])
        for ndim in np.unique(dims).tolist():
            _check_tensors(cuts, first + np.flatnonzero(dims == ndim), ndim, bad)
    return np.flatnonzero(bad)


def _check_tensors(cuts: Cuts, rows: Array, ndim: int, bad: Array) -> None:
    """Mark the tensors `rows`, which have `ndim` dimensions, in `bad`."""
    counts = cuts.entries[rows + 1] - cuts.entries[rows]
    entry, tensor = ranges(cuts.entries[rows], counts), np.repeat(np.arange(len(rows)), counts)
    start = cuts.box_offsets[entry]
    is_inside = cuts.box_offsets[entry + 1] - start == ndim
    if not is_inside.all():
        bad[rows[tensor[~is_inside]]] = True
        start, tensor = start[is_inside], tensor[is_inside]
        is_inside = is_inside[is_inside]
    is_filled, is_whole = np.ones(len(start), bool), cuts.is_held[rows]
    is_cut, bits = np.zeros((ndim, len(rows)), bool), np.zeros(len(rows))
    for dim in range(ndim):
        shape = cuts.shapes[cuts.shape_offsets[rows] + dim]
        low, size, full = cuts.boxes[2 * start + dim], cuts.boxes[2 * start + ndim + dim], shape[tensor]
        is_inside &= (low >= 0) & (low <= full) & (size >= 0) & (size <= full - low)
        is_filled &= size > 0
        is_whole &= shape != 0
        is_cut[dim, tensor[size != full]] = True
        bits += np.where(is_cut[dim], np.log2(np.maximum(shape, 0) + 1.0), 0)
    bad[rows[tensor[~is_inside]]] = True
    is_sound, times = ~bad[rows], is_cut.sum(axis=0)
    is_large = is_sound & ((bits > _MOST_BITS) | (times > _MOST_CUT_DIMS))
    for row in rows[is_large].tolist():
        bad[row] = covers_once(cuts.shape(row), cuts.boxes_of(row)) is not None
    is_sound &= ~is_large
    turn = np.cumsum(np.where(is_sound, np.exp2(np.minimum(bits, _MOST_BITS)), 0)) // 2.0**_MOST_BITS
    kind = np.where(is_sound, turn.astype(np.int64) * (_MOST_CUT_DIMS + 1) + times, -1)
    kind_of_box = np.where(is_filled, kind[tensor], -1)
    for one in np.unique(kind[is_sound]).tolist():
        chosen, boxes = np.flatnonzero(kind == one), kind_of_box == one
        local = np.cumsum(kind == one) - 1
        dims = np.nonzero(is_cut[:, chosen].T)[1].reshape(len(chosen), one % (_MOST_CUT_DIMS + 1))
        bad[rows[chosen[_differing(cuts, rows[chosen], ndim, dims, start[boxes], local[tensor[boxes]], is_whole[chosen])]]] = True


def _differing(cuts: Cuts, rows: Array, ndim: int, dims: Array, start: Array, tensor: Array, is_whole: Array) -> Array:
    """Which of some tensors, cut in equally many dimensions, have other signed corners than their boxes.

    Each corner is a number; a tensor has as many of its own as there are corners in it, `shape + 1` in each dimension.

    Args:
        dims: of shape (tensors, dimensions that are cut): which ones; in the others every box is as long as its tensor.
        start: where the offset and the extents of each filled box are; tensor: which of the tensors it belongs to.
        is_whole: the tensors that have an element to be covered.
    """
    number = dims.shape[1]
    shape = cuts.shapes[cuts.shape_offsets[rows][:, None] + dims]
    steps = np.ones((len(rows), number + 1), np.int64)
    np.cumprod(shape + 1, axis=1, out=steps[:, 1:])
    base = np.cumsum(steps[:, -1]) - steps[:, -1]
    sides, whole = [], []
    for i in range(number):
        dim, step = dims[tensor, i], steps[tensor, i]
        low = cuts.boxes[2 * start + dim]
        sides.append((low * step, (low + cuts.boxes[2 * start + ndim + dim]) * step))
        whole.append((np.zeros(1, np.int64), (shape[:, i] * steps[:, i])[is_whole]))
    plus, minus = _corners(base[tensor], sides)
    whole_plus, whole_minus = _corners(base[is_whole], whole)
    left, right = np.concatenate([plus, whole_minus]), np.concatenate([minus, whole_plus])
    left.sort()
    right.sort()
    if np.array_equal(left, right):
        return np.zeros(0, np.int64)
    found: Array = np.searchsorted(base, _not_in_both(left, right), side="right") - 1
    return found


def _corners(base: Array, sides: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """The corners of boxes that have the sign plus, and those that have the sign minus."""
    plus: list[Array] = [base]
    minus: list[Array] = []
    for low, high in sides:
        plus, minus = [p + low for p in plus] + [m + high for m in minus], [p + high for p in plus] + [m + low for m in minus]
    return np.concatenate(plus), np.concatenate([base[:0], *minus])


def _not_in_both(left: Array, right: Array) -> Array:
    """The numbers that two arrays do not hold equally often."""
    numbers, at = np.unique(np.concatenate([left, right]), return_inverse=True)
    counts = np.bincount(at[: len(left)], minlength=len(numbers)) - np.bincount(at[len(left) :], minlength=len(numbers))
    found: Array = numbers[counts != 0]
    return found


def ranges(starts: Array, counts: Array) -> Array:
    """The numbers `start`, `start + 1`, ... of each run, `count` of them, one run after the other."""
    ends = np.cumsum(counts)
    numbers: Array = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
    return numbers


def run_blocks(offsets: Array) -> Iterator[tuple[int, int]]:
    """First and last run, half-open, of blocks of runs, so that temporaries stay small: run i owns the rows `offsets[i]` to
    `offsets[i + 1]`, and a block of several runs at most 262,144 runs and rows."""
    first, last = 0, len(offsets) - 1
    while first < last:
        full = int(np.searchsorted(offsets, offsets[first] + _BLOCK_RUNS, side="right")) - 1
        then = min(max(full, first + 1), first + _BLOCK_RUNS, last)
        yield first, then
        first = then
