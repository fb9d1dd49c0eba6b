"""Boxes: n-dimensional half-open regions of a logical tensor's index space, each an offset and a shape.

Everything that moves bytes speaks boxes; nothing here knows about torch, files or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Box = tuple[tuple[int, ...], tuple[int, ...]]


def volume(box: Box) -> int:
    return math.prod(box[1])


class Fault(NamedTuple):
    """Why boxes do not cover a tensor exactly once."""

    boxes: tuple[int, ...]
    """The one that leaves the tensor, or two that overlap, by their numbers; none if elements are missing."""
    missing: int
    """Elements of the tensor that are in no box, where no two boxes overlap."""


def covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> Fault | None:
    """None if the boxes cover a tensor of `shape` exactly once, else what is wrong.

    Volumes must add up and no two boxes may overlap. Boxes are swept along the dimension in which they begin at the most
    different places, so that few are compared. For millions of boxes see `cover.uncovered`.
    """
    for number, (offset, extent) in enumerate(boxes):
        if len(offset) != len(shape) or any(o < 0 or e < 0 or o + e > d for o, e, d in zip(offset, extent, shape, strict=True)):
            return Fault((number,), 0)
    filled = [number for number, box in enumerate(boxes) if volume(box)]
    if pair := _overlapping(boxes, filled, len(shape)):
        return Fault(pair, 0)
    missing = math.prod(shape) - sum(volume(boxes[number]) for number in filled)
    return Fault((), missing) if missing else None


def _overlapping(boxes: Sequence[Box], filled: list[int], ndim: int) -> tuple[int, int] | None:
    if not ndim:
        return (filled[0], filled[1]) if len(filled) > 1 else None
    dim = max(range(ndim), key=lambda d: len({boxes[number][0][d] for number in filled}))
    begun: list[int] = []
    for number in sorted(filled, key=lambda n: boxes[n][0][dim]):
        box = boxes[number]
        begun = [n for n in begun if boxes[n][0][dim] + boxes[n][1][dim] > box[0][dim]]
        for other in begun:
            if overlap(box, boxes[other]):
                return other, number
        begun.append(number)
    return None


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    return all(a < c + d and c < a + b for a, b, c, d in zip(*one, *other, strict=True))


def intersect(one: Box, other: Box) -> Box | None:
    """The box of the elements in both, or None where there is none."""
    low = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return (
        (low, tuple(h - a for a, h in zip(low, high, strict=True)))
        if all(a < h for a, h in zip(low, high, strict=True))
        else None
    )


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The row-major elements `start` to `stop` of a tensor as boxes, in order: at most two for each dimension and one.

    Source: the decomposition of irregular shards in ByteCheckpoint (NSDI 2025, section 4.2).
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head, tail = start - first * row, stop - last * row
    if first == last:
        return _in_row(first, flat_boxes(shape[1:], head, tail))
    found: list[Box] = []
    if head:
        found += _in_row(first, flat_boxes(shape[1:], head, row))
        first += 1
    full = last + (tail == row) - first
    if full:
        found.append(((first, *(0,) * (len(shape) - 1)), (full, *shape[1:])))
    if tail < row:
        found += _in_row(last, flat_boxes(shape[1:], 0, tail))
    return found


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, *offset), (1, *extent)) for offset, extent in boxes]
