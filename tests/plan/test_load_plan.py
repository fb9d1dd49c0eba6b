"""Load plans, against arrays that say of every element of every tensor in which chunk it lies."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.index import FileRow, Index
from holdfast.layout.boxes import Box, intersect, volume
from holdfast.plan.load import Wanted, plan_load, runs_of
from holdfast.run.assemble import build_columns
from holdfast.run.contents import TensorItem
from holdfast.run.files import Placed, Placement


@dataclass
class Bytes:
    nbytes: int

    def copy_into(self, start: int, out: Any) -> None:
        raise AssertionError("planning reads nothing")


@dataclass
class Stored:
    """Tensors in an index, and for each element of each the row of its chunk and of its entry."""

    index: Index
    chunk: dict[str, np.ndarray]
    entry: dict[str, np.ndarray]

    def want(self, name: str, box: Box) -> Wanted:
        return Wanted(self.index.tensor(self.index.find(name)), box)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


@st.composite
def boxes_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A grid of boxes that is the whole tensor."""
    edges = [sorted({0, d, *draw(st.lists(st.integers(0, d), max_size=2))}) for d in shape]
    cells = itertools.product(*(itertools.pairwise(line) for line in edges))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def stored(draw: st.DrawFn) -> Stored:
    """A few tensors, cut into boxes, and these into chunks of any sizes, that lie in any order in a few files."""
    shapes = {f"t.{n}": tuple(draw(st.lists(st.integers(0, 6), max_size=4))) for n in range(draw(st.integers(1, 3)))}
    entries = {name: draw(boxes_of(shape)) for name, shape in shapes.items()}
    itemsize = {name: draw(st.sampled_from([("uint8", 1), ("float32", 4)])) for name in shapes}
    items, placed = [], Placed(files=[FileRow(f"f{n}", 1, 1, 1 << 40, "", 0, bytes(16)) for n in range(3)])
    place = iter(draw(st.permutations(range(sum(volume(box) for boxes in entries.values() for box in boxes)))))
    for name, boxes in entries.items():
        kind, size = itemsize[name]
        for box in boxes:
            items.append(TensorItem(name, tuple(name.split(".")), kind, shapes[name], "t", Bytes(volume(box) * size), box=box))
            cuts = [0, *draw(st.lists(st.integers(1, max(1, volume(box) - 1)), max_size=6)), volume(box)]
            starts = np.array(sorted(set(cuts)), np.int64) * size
            count = len(starts) - 1
            where = np.array([next(place) for _ in range(count)], np.int64)  # a place of its own for each chunk
            placed.places[items[-1].key] = Placement(
                where % 3,
                where * 1000,
                starts[:-1],
                np.diff(starts),
                np.diff(starts),
                np.zeros((count, 16), np.uint8),
                np.zeros(count, np.int64),
            )
        if not boxes:
            items.append(TensorItem(name, tuple(name.split(".")), kind, shapes[name], "t", None))
    index = Index(build_columns(items, placed))
    return with_elements(index)


def with_elements(index: Index) -> Stored:
    chunk, entry = {}, {}
    for tensor in index.tensors():
        chunk[tensor.name], entry[tensor.name] = (np.full(tensor.shape, -1, np.int64) for _ in range(2))
        for number in index.entries(tensor):
            box = index.box(tensor, number)
            rows = range(*index.chunk_range(number))
            sizes = (index.columns["chunk.raw_bytes"][rows.start : rows.stop] // tensor.dtype.itemsize).tolist()
            chunk[tensor.name][slices(box)] = np.repeat(np.array(rows, np.int64), sizes).reshape(box[1])
            entry[tensor.name][slices(box)] = number
    return Stored(index, chunk, entry)


@st.composite
def wanted_of(draw: st.DrawFn, found: Stored) -> list[Wanted]:
    wanted = []
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(sorted(found.chunk)))
        shape = found.chunk[name].shape
        offset = tuple(draw(st.integers(0, d)) for d in shape)
        wanted.append(found.want(name, (offset, tuple(draw(st.integers(0, d - o)) for o, d in zip(offset, shape, strict=True)))))
    return wanted


@settings(deadline=None)
@given(st.data())
def test_every_wanted_element_is_in_a_chunk_of_the_plan_and_none_is_read_twice_in_file_order(data: st.DataObject) -> None:
    found = data.draw(stored())
    wanted = data.draw(wanted_of(found))
    plan = plan_load(found.index, wanted)
    needed = {c for want in wanted for c in found.chunk[want.tensor.name][slices(want.box)].reshape(-1).tolist()}
    assert needed <= set(plan.chunks.tolist())
    assert len(set(plan.chunks.tolist())) == len(plan.chunks)
    columns = found.index.columns
    place = list(zip(columns["chunk.file"][plan.chunks].tolist(), columns["chunk.offset"][plan.chunks].tolist(), strict=True))
    assert place == sorted(place)


@settings(deadline=None)
@given(st.data())
def test_the_joins_of_a_chunk_are_the_wanted_boxes_that_it_has_elements_of(data: st.DataObject) -> None:
    found = data.draw(stored())
    wanted = data.draw(wanted_of(found))
    plan = plan_load(found.index, wanted)
    entry_of_chunk = {c: e for n in found.chunk for c, e in zip(found.chunk[n].flat, found.entry[n].flat, strict=True)}
    assert plan.first.tolist()[0] == 0
    assert plan.first.tolist()[-1] == len(plan.joins)
    assert len(plan.first) == len(plan.chunks) + 1
    joined = set()
    for number, chunk in enumerate(plan.chunks.tolist()):
        joins = plan.joins[plan.first[number] : plan.first[number + 1]].tolist()
        assert len(joins) == len(set(joins)) > 0
        assert {int(plan.entry[join]) for join in joins} == {entry_of_chunk[chunk]}
        joined |= {(chunk, int(plan.wanted[join])) for join in joins}
    for number, want in enumerate(wanted):
        for chunk in set(found.chunk[want.tensor.name][slices(want.box)].reshape(-1).tolist()):
            assert (chunk, number) in joined


@settings(deadline=None)
@given(st.data())
def test_a_chunk_without_a_wanted_element_is_read_only_where_several_dimensions_are_cut(data: st.DataObject) -> None:
    found = data.draw(stored())
    wanted = data.draw(wanted_of(found))
    plan = plan_load(found.index, wanted)
    for number, chunk in enumerate(plan.chunks.tolist()):
        for join in plan.joins[plan.first[number] : plan.first[number + 1]].tolist():
            want, entry = wanted[int(plan.wanted[join])], int(plan.entry[join])
            name, box = want.tensor.name, found.index.box(want.tensor, entry)
            if np.isin(chunk, found.chunk[name][slices(want.box)]):
                continue
            part = intersect(box, want.box)
            assert part is not None
            cut = [d for d, (n, m) in enumerate(zip(part[1], box[1], strict=True)) if n != m]
            assert len(cut) >= 2, "one cut dimension leaves a regular pattern, which the plan follows exactly"
            assert any(n > 1 for n in part[1][: cut[-2]]), "nor are rows outside the second innermost cut read"
            inside = found.chunk[name][slices(box)].reshape(-1)
            first, last = np.flatnonzero(np.isin(inside, found.chunk[name][slices(want.box)]))[[0, -1]]
            assert inside[first] <= chunk <= inside[last], "never outside the first and the last wanted element"


@settings(deadline=None)
@given(st.integers(1, 4), st.data())
def test_runs_say_where_the_wanted_elements_lie(ndim: int, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 5)) for _ in range(ndim))
    offset = tuple(data.draw(st.integers(0, d - 1)) for d in shape)
    extent = tuple(data.draw(st.integers(1, d - o)) for o, d in zip(offset, shape, strict=True))
    runs = runs_of(((0,) * ndim, shape), (offset, extent))
    numbers = np.arange(math.prod(shape)).reshape(shape)[slices((offset, extent))].reshape(-1)
    assert (runs.first, runs.last, runs.total) == (numbers[0], numbers[-1] + 1, math.prod(shape))
    said = [n for n in range(runs.first, runs.last) if (n - runs.first) % runs.period < runs.length]
    assert set(numbers.tolist()) <= set(said)
    if sum(n != m for n, m in zip(extent, shape, strict=True)) <= 1 or runs.period == runs.length:
        assert numbers.tolist() == said


def test_a_tensor_without_elements_and_a_plan_of_nothing_read_nothing() -> None:
    item = TensorItem("t.a", ("t", "a"), "float32", (0, 3), "t", Bytes(0), box=((0, 0), (0, 3)))
    nothing = np.zeros(0, np.int64)
    placed = Placed(
        places={item.key: Placement(nothing, nothing, nothing, nothing, nothing, np.zeros((0, 16), np.uint8), nothing)}
    )
    found = with_elements(Index(build_columns([item], placed)))
    for wanted in ([], [found.want("t.a", ((0, 0), (0, 3)))]):
        plan = plan_load(found.index, wanted)
        assert len(plan.chunks) == len(plan.joins) == 0
        assert plan.first.tolist() == [0]
