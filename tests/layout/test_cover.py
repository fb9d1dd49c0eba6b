"""The proof that boxes cover tensors exactly once, against counting every element."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.layout import cover
from holdfast.layout.boxes import Box, covers_once
from holdfast.layout.cover import Cuts, ranges, run_blocks, uncovered

Tensor = tuple[tuple[int, ...], list[Box]]


def cuts_of(tensors: Sequence[Tensor], is_held: Sequence[bool] | None = None) -> Cuts:
    """Tensors and their boxes as columns."""
    boxes = [box for _, of_tensor in tensors for box in of_tensor]
    return Cuts(
        np.cumsum([0, *(len(shape) for shape, _ in tensors)]),
        np.array([d for shape, _ in tensors for d in shape], np.int64),
        np.cumsum([0, *(len(of_tensor) for _, of_tensor in tensors)]),
        np.cumsum([0, *(len(offset) for offset, _ in boxes)]),
        np.array([x for offset, extent in boxes for x in (*offset, *extent)], np.int64),
        np.ones(len(tensors), bool) if is_held is None else np.array(is_held),
    )


def is_covered(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether every element lies in exactly one box, and every box in the tensor: by counting."""
    count = np.zeros(shape, np.int64)
    for offset, extent in boxes:
        if len(offset) != len(shape) or any(o < 0 or e < 0 or o + e > d for o, e, d in zip(offset, extent, shape, strict=True)):
            return False
        count[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))] += 1
    return bool((count == 1).all())


def expected(tensors: Sequence[Tensor]) -> list[int]:
    return [row for row, (shape, boxes) in enumerate(tensors) if not is_covered(shape, boxes)]


def grid(shape: Sequence[int], edges: Sequence[Sequence[int]]) -> list[Box]:
    """The cells between `edges`, which in each dimension begin at 0 and end at its length."""
    cells = itertools.product(*(itertools.pairwise(line) for line in edges))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def whole_tensors(draw: st.DrawFn) -> Tensor:
    """A tensor cut into a grid, some cells of which are cut again, in any order, with empty boxes between."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    edges = [sorted({0, d, *draw(st.lists(st.integers(0, d), max_size=2))}) if d else [0, 0] for d in shape]
    boxes = []
    for offset, extent in grid(shape, edges):
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        if shape and extent[dim] > 1 and draw(st.booleans()):
            at = draw(st.integers(1, extent[dim] - 1))
            boxes.append((offset, (*extent[:dim], at, *extent[dim + 1 :])))
            boxes.append(
                ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*extent[:dim], extent[dim] - at, *extent[dim + 1 :]))
            )
        else:
            boxes.append((offset, extent))
    if shape and draw(st.booleans()):
        boxes.append((tuple(draw(st.integers(0, d)) for d in shape), (0,) * len(shape)))
    return shape, draw(st.permutations(boxes))


@st.composite
def wrong_tensors(draw: st.DrawFn) -> Tensor:
    """The same with a box lost, doubled, moved, stretched, or given another number of dimensions."""
    shape, boxes = draw(whole_tensors())
    if not boxes:
        return shape, boxes
    number, dim = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, max(len(shape) - 1, 0)))
    offset, extent = boxes[number]
    how = draw(st.sampled_from(["lose", "double", "move", "stretch", "dimension"]))
    if how == "lose":
        boxes = boxes[:number] + boxes[number + 1 :]
    elif how == "double":
        boxes = [*boxes, (offset, extent)]
    elif how == "dimension":
        boxes[number] = ((*offset, 0), (*extent, 1))
    elif shape:
        by = draw(st.integers(-2, 2))
        changed = list(offset if how == "move" else extent)
        changed[dim] += by
        boxes[number] = (tuple(changed), extent) if how == "move" else (offset, tuple(changed))
    return shape, boxes


@st.composite
def any_tensors(draw: st.DrawFn) -> Tensor:
    """Boxes at random in a small tensor, most of which do not cover it."""
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    box = st.tuples(st.tuples(*(st.integers(-1, d) for d in shape)), st.tuples(*(st.integers(-1, d + 1) for d in shape)))
    return shape, draw(st.lists(box, max_size=4))


@given(st.lists(st.one_of(whole_tensors(), wrong_tensors(), any_tensors()), max_size=8))
def test_the_tensors_that_are_not_covered_are_those_that_counting_finds(tensors: list[Tensor]) -> None:
    assert uncovered(cuts_of(tensors)).tolist() == expected(tensors)


@given(whole_tensors())
def test_a_tensor_that_is_cut_up_is_covered(tensor: Tensor) -> None:
    assert is_covered(*tensor)
    assert uncovered(cuts_of([tensor])).tolist() == []


@given(st.one_of(whole_tensors(), wrong_tensors(), any_tensors()))
@example(((2, 2), [((0, 0), (1, 2)), ((0, 0), (1, 2))]))
@example(((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1)), ((0, 0), (1, 1)), ((1, 1), (1, 1))]))
def test_the_sweep_and_the_proof_agree(tensor: Tensor) -> None:
    assert (covers_once(*tensor) is None) == (not len(uncovered(cuts_of([tensor])))) == is_covered(*tensor)


@pytest.mark.parametrize("ndim", [1, 2, 3, 4, 5, 6, 7])
def test_boxes_whose_volumes_add_up_are_not_enough(ndim: int) -> None:
    """Of the cells of a grid one is missing and another is there twice, up to more dimensions than corners are taken in."""
    shape = (4,) * ndim
    boxes = grid(shape, [[0, 2, 4]] * ndim)
    assert len(uncovered(cuts_of([(shape, boxes)]))) == 0
    for lost, doubled in itertools.islice(itertools.permutations(range(len(boxes)), 2), 12):
        wrong = [box for number, box in enumerate(boxes) if number != lost] + [boxes[doubled]]
        assert uncovered(cuts_of([(shape, boxes), (shape, wrong)])).tolist() == [1]


def test_a_tensor_that_is_not_held_needs_no_boxes() -> None:
    tensors: list[Tensor] = [((3,), []), ((3,), []), ((), []), ((0, 3), [])]
    assert uncovered(cuts_of(tensors, [False, True, True, True])).tolist() == [1, 2]


def test_lengths_that_corners_do_not_hold_are_swept() -> None:
    huge = 1 << 40
    halves: list[Box] = [((0, 0), (huge, 5)), ((0, 5), (7, huge - 5)), ((7, 5), (huge - 7, huge - 5))]
    tensors: list[Tensor] = [((huge, huge), halves), ((huge, huge), halves[:2]), ((2,), [((0,), (2,))])]
    assert uncovered(cuts_of(tensors)).tolist() == [1]
    shape = ((1 << 32) - 1, (1 << 32) - 1, 4)  # in 64 bits a step along the last dimension would be none
    boxes = grid(shape, [[0, 7, shape[0]], [0, 7, shape[1]], [0, 2, 4]])
    assert uncovered(cuts_of([(shape, boxes), (shape, [*boxes[:-1], boxes[-2]])])).tolist() == [1]


def test_many_tensors_whose_corners_do_not_fit_together_are_told_apart() -> None:
    large = 1 << 28
    good: Tensor = ((large, large), [((0, 0), (1, large)), ((1, 0), (large - 1, 9)), ((1, 9), (large - 1, large - 9))])
    bad: Tensor = (good[0], [*good[1][:2], ((1, 8), (large - 1, large - 9))])
    tensors = [bad if number in (3, 500, 999) else good for number in range(1000)]
    assert uncovered(cuts_of(tensors)).tolist() == [3, 500, 999]


def test_numbers_that_wrap_around_are_not_believed() -> None:
    big = 2**62
    boxes: list[list[Box]] = [
        [((big,), (big,))],
        [((big,), (3 * big - 2**63,))],
        [((-(2**63),), (2**63 - 1,))],
        [((4,), (2**63 - 1,))],
    ]
    assert uncovered(cuts_of([((8,), of_tensor) for of_tensor in boxes])).tolist() == [0, 1, 2, 3]


@given(st.data())
def test_blocks_change_nothing(data: st.DataObject) -> None:
    tensors = data.draw(st.lists(st.one_of(whole_tensors(), wrong_tensors()), max_size=12))
    before, cover._BLOCK_RUNS = cover._BLOCK_RUNS, data.draw(st.integers(1, 9))
    try:
        assert uncovered(cuts_of(tensors)).tolist() == expected(tensors)
    finally:
        cover._BLOCK_RUNS = before


def test_blocks_hold_every_run_once() -> None:
    for counts in ([], [0], [0] * 5, [300_000], [1] * 600_000, [0] * 600_000, [5, 400_000, 0, 3], [200_000] * 3):
        offsets = np.cumsum([0, *counts])
        blocks = list(run_blocks(offsets))
        assert [first for first, _ in blocks] == [0, *(last for _, last in blocks)][: len(blocks)]
        assert max((last for _, last in blocks), default=0) == len(counts)
        assert all(last - first == 1 or max(last - first, offsets[last] - offsets[first]) <= 1 << 18 for first, last in blocks)


def test_ranges_are_runs_of_numbers() -> None:
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_a_million_boxes_take_a_moment() -> None:
    side = 1024
    at = np.arange(side * side)
    boxes = np.stack([at // side * 4, at % side * 2, np.full(len(at), 4), np.full(len(at), 2)], axis=1)
    random.Random(0).shuffle(order := list(range(len(at))))
    cuts = Cuts(
        np.array([0, 2]), np.array([side * 4, side * 2]), np.array([0, len(at)]), np.arange(len(at) + 1) * 2,
        boxes[order].reshape(-1), np.ones(1, bool),
    )  # fmt: skip
    start = time.monotonic()
    assert len(uncovered(cuts)) == 0
    assert time.monotonic() - start < 10
    cuts.boxes[4 * 77] ^= 4
    assert uncovered(cuts).tolist() == [0]
