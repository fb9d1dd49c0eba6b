"""Boxes: n-dimensional half-open regions of a logical tensor's index space, each an offset and a shape.

Everything that moves bytes speaks boxes; nothing here knows about torch, files or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


def volume(box: Box) -> int:
    return math.prod(box[1])


def covers_once(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None if the boxes cover a tensor of `shape` exactly once, else what is wrong, in words.

    Volumes must add up and no two boxes may overlap. Boxes are swept along the first dimension, so that only those that
    meet there are compared.
    """
    for offset, extent in boxes:
        if len(offset) != len(shape) or any(o < 0 or e < 0 or o + e > d for o, e, d in zip(offset, extent, shape, strict=True)):
            return f"the box {list(offset)}+{list(extent)} leaves the tensor"
    filled = sorted((box for box in boxes if volume(box)), key=lambda box: box[0])
    open_boxes: list[Box] = []
    for box in filled:
        if shape:
            open_boxes = [other for other in open_boxes if other[0][0] + other[1][0] > box[0][0]]
        for other in open_boxes:
            if overlap(box, other):
                return f"the boxes {list(other[0])}+{list(other[1])} and {list(box[0])}+{list(box[1])} overlap"
        open_boxes.append(box)
    missing = math.prod(shape) - sum(volume(box) for box in filled)
    return f"{missing} of {math.prod(shape)} elements are missing" if missing else None


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    return all(a < c + d and c < a + b for a, b, c, d in zip(*one, *other, strict=True))
