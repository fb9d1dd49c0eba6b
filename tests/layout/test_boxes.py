"""Boxes: what is wrong with those that do not cover a tensor once, and the boxes of a run of elements."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.layout.boxes import Box, Fault, covers_once, flat_boxes, intersect, overlap, volume


@pytest.mark.parametrize(
    ("shape", "boxes", "fault"),
    [
        ((10, 3), [((0, 0), (6, 3)), ((6, 0), (4, 3))], None),
        ((10, 3), [((6, 0), (4, 3)), ((0, 0), (6, 3))], None),
        ((10, 3), [((0, 0), (6, 3)), ((7, 0), (3, 3))], Fault((), 3)),
        ((10, 3), [((0, 0), (6, 3)), ((5, 0), (5, 3))], Fault((0, 1), 0)),
        ((10, 3), [((6, 0), (4, 3)), ((0, 0), (6, 2)), ((0, 1), (6, 2))], Fault((1, 2), 0)),
        ((10, 3), [((0, 0), (10, 3)), ((3, 1), (0, 1))], None),
        ((10, 3), [((0, 0), (11, 3))], Fault((0,), 0)),
        ((10, 3), [((0, 0), (10, 3)), ((-1, 0), (1, 3))], Fault((1,), 0)),
        ((10, 3), [((0,), (10,))], Fault((0,), 0)),
        ((10, 3), [], Fault((), 30)),
        ((0, 3), [], None),
        ((), [((), ())], None),
        ((), [], Fault((), 1)),
        ((), [((), ()), ((), ())], Fault((0, 1), 0)),
    ],
)
def test_what_is_wrong_is_said_by_the_numbers_of_the_boxes(shape: tuple[int, ...], boxes: list[Box], fault: Fault | None) -> None:
    assert covers_once(shape, boxes) == fault


@pytest.mark.parametrize("dim", [0, 1])
def test_ten_thousand_boxes_along_any_dimension_are_swept_in_a_moment(dim: int) -> None:
    shape = (10_000, 4) if dim == 0 else (4, 10_000)
    boxes: list[Box] = [((i, 0), (1, 4)) if dim == 0 else ((0, i), (4, 1)) for i in range(10_000)]
    start = time.monotonic()
    assert covers_once(shape, boxes) is None
    assert covers_once(shape, boxes[1:]) == Fault((), 4)
    assert time.monotonic() - start < 5


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_a_run_of_elements_is_a_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    numbers = np.arange(total).reshape(shape)
    boxes = flat_boxes(tuple(shape), start, stop)
    found = [n for o, e in boxes for n in numbers[tuple(slice(a, a + b) for a, b in zip(o, e, strict=True))].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * max(len(shape), 1) - 1


@given(st.integers(1, 3), st.data())
def test_two_boxes_meet_where_both_are(ndim: int, data: st.DataObject) -> None:
    one, other = (tuple(tuple(data.draw(st.integers(0, 4)) for _ in range(ndim)) for _ in range(2)) for _ in range(2))
    cells = [
        set(itertools.product(*(range(o, o + e) for o, e in zip(offset, extent, strict=True)))) for offset, extent in (one, other)
    ]
    met = intersect(one, other)
    assert (met is not None) == bool(cells[0] & cells[1])
    if met is not None:
        assert volume(met) == len(cells[0] & cells[1])
        assert overlap(one, other)
