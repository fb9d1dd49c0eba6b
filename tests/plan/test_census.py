"""The census: from what each rank knows to who holds the same boxes, against looking at all ranks; and the shares that follow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Refused
from holdfast.layout.boxes import Box, covers_once
from holdfast.layout.layouts import Boxes, Flat, Layout, Mesh, Placement, Replicate, Shard, StridedShard, Whole
from holdfast.run.census import Census, Common, Structure, compare
from holdfast.run.contents import Contents, TensorItem
from holdfast.run.shares import plan, structure_of, written_by

Tensor = tuple[str, str, tuple[int, ...], Layout]
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2)], 6: [(6,), (2, 3), (3, 2)], 8: [(8,), (4, 2), (2, 2, 2)]}


@dataclass
class Nothing:
    nbytes: int

    def copy_into(self, start: int, out: Any) -> None:
        raise AssertionError("planning reads nothing")


@st.composite
def meshes(draw: st.DrawFn, ranks: Sequence[int], shape: tuple[int, ...]) -> Mesh:
    """Placements of a tensor on a mesh of ranks."""
    sizes = draw(st.sampled_from(MESHES[len(ranks)]))
    dims = st.sampled_from(range(len(shape))) if shape else st.nothing()
    placements: list[Placement] = []
    for number in range(len(sizes)):
        kinds = [st.just(Replicate())] + [dims.map(Shard)] * bool(shape)
        if shape and number < len(sizes) - 1:
            kinds.append(st.builds(StridedShard, dims, st.just(math.prod(sizes[number + 1 :]))))
        placements.append(draw(st.one_of(kinds)))
    return Mesh(tuple(draw(st.permutations(ranks))), sizes, tuple(placements))


@st.composite
def flats(draw: st.DrawFn, ranks: Sequence[int], shape: tuple[int, ...]) -> Flat:
    """A tensor somewhere in a flat buffer, sharded over all ranks or over each half of them."""
    copies = draw(st.sampled_from([1, 2])) if len(ranks) % 2 == 0 else 1
    groups = [tuple(ranks[i::copies]) for i in range(copies)]
    shift = draw(st.integers(0, 9))
    slot = max(1, -(-(math.prod(shape) + shift) // len(groups[0])) + draw(st.integers(0, 3)))
    return Flat(groups[0], slot, shift, tuple(groups[1:]))


@st.composite
def boxes(draw: st.DrawFn, ranks: Sequence[int], shape: tuple[int, ...]) -> Boxes:
    """Rows, spelled out."""
    if not shape:
        return Boxes((ranks[0],), (((), ()),))
    edges = sorted(draw(st.lists(st.integers(0, shape[0]), min_size=len(ranks) - 1, max_size=len(ranks) - 1)))
    rest = shape[1:]
    cut = itertools.pairwise([0, *edges, shape[0]])
    return Boxes(tuple(ranks), tuple(((a, *(0,) * len(rest)), (b - a, *rest)) for a, b in cut))


@st.composite
def jobs(draw: st.DrawFn) -> dict[int, list[Tensor]]:
    """What each rank of a job knows: pipeline stages of ranks, some cut into replicas with a mesh of their own each; names known
    to one stage or to several, as sharded tensors or as plain ones."""
    stages, size = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    known: dict[int, list[Tensor]] = {rank: [] for rank in range(stages * size)}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.sampled_from([(), (0,), (1,), (7,), (8, 3), (5, 1, 4), (16, 6), (12, 0), (24,)]))
        for stage in sorted(draw(st.sets(st.integers(0, stages - 1), min_size=1))):
            ranks = tuple(range(stage * size, (stage + 1) * size))
            kind = draw(st.sampled_from(["whole", "mesh", "flat", "boxes", "two meshes"]))
            groups = [ranks]
            if kind == "two meshes" and size % 2 == 0:
                groups = [ranks[: size // 2], ranks[size // 2 :]]
            for group in groups:
                layout: Layout = Whole()
                if kind != "whole":
                    layout = draw({"flat": flats, "boxes": boxes}.get(kind, meshes)(group, shape))
                for rank in group:
                    known[rank].append((f"t.{number}", "float32", shape, layout))
    return known


def common_of(known: dict[int, list[Tensor]]) -> Common:
    """As the ranks and the leader find it out: each structure once, through bytes."""
    groups: dict[str, list[int]] = {}
    tables: dict[str, bytes] = {}
    for rank, tensors in known.items():
        structure = Structure.of(tensors)
        groups.setdefault(structure.digest(), []).append(rank)
        tables[structure.digest()] = structure.encode()
    common = compare([Structure.decode(tables[digest]) for digest in groups], list(groups.values()))
    return Common.decode(common.encode())


def boxes_of(shape: tuple[int, ...], layout: Layout, rank: int) -> list[Box]:
    return [piece.box for piece in layout.pieces(shape, rank)]


@settings(deadline=None)
@given(jobs())
def test_the_holders_of_a_tensor_are_all_ranks_that_hold_the_same_boxes_of_it(known: dict[int, list[Tensor]]) -> None:
    common = common_of(known)
    for rank, tensors in known.items():
        census = Census(Structure.of(tensors), common, rank)
        for name, _, shape, layout in tensors:
            ours = boxes_of(shape, layout, rank)
            same = {r for r, others in known.items() for n, _, s, other in others if n == name and boxes_of(s, other, r) == ours}
            holders, is_declared = census.holders(name, shape, layout)
            assert list(holders) == sorted(holders)
            if ours:
                assert rank in holders
                assert set(holders) == same, (name, rank)
                assert is_declared == (same == set(layout.holders(shape, rank)))


@settings(deadline=None)
@given(jobs())
def test_holders_agree_on_who_they_are(known: dict[int, list[Tensor]]) -> None:
    common = common_of(known)
    said = {
        (rank, name): Census(Structure.of(tensors), common, rank).holders(name, shape, layout)[0]
        for rank, tensors in known.items()
        for name, _, shape, layout in tensors
        if boxes_of(shape, layout, rank)
    }
    for (_, name), holders in said.items():
        assert {said[other, name] for other in holders} == {holders}


@settings(deadline=None)
@given(jobs())
def test_each_element_is_written_by_one_of_the_ranks_that_hold_it(known: dict[int, list[Tensor]]) -> None:
    common = common_of(known)
    written: dict[str, list[Box]] = {}
    held: dict[str, np.ndarray] = {}
    for rank, tensors in known.items():
        contents = contents_of(tensors, rank)
        census = Census(structure_of(contents), common, rank)
        for item in written_by(plan(contents, census), contents).tensors:
            if item.source is not None:
                assert item.box is not None
                assert item.source.nbytes == 4 * math.prod(item.box[1])
                written.setdefault(item.name, []).append(item.box)
        for name, _, shape, layout in tensors:
            mask = held.setdefault(name, np.zeros(shape, bool))
            for offset, extent in boxes_of(shape, layout, rank):
                mask[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = True
    for name, mask in held.items():
        if not overlaps(known, name):
            assert mask.all()
            assert covers_once(mask.shape, written.get(name, [])) is None, (name, written.get(name))


def overlaps(known: dict[int, list[Tensor]], name: str) -> bool:
    """Whether boxes of a tensor share elements and are not the same: two layouts of one name, which no plan unites."""
    distinct = {tuple(boxes_of(s, layout, rank)) for rank, ts in known.items() for n, _, s, layout in ts if n == name}
    shape = next(s for ts in known.values() for n, _, s, _ in ts if n == name)
    return covers_once(shape, [box for of_rank in distinct for box in of_rank if math.prod(box[1])]) is not None


def contents_of(tensors: Sequence[Tensor], rank: int) -> Contents:
    items = []
    for name, dtype, shape, layout in tensors:
        known = [
            TensorItem(name, tuple(name.split(".")), dtype, shape, "t", Nothing(4 * math.prod(box[1])), box=box)
            for box in boxes_of(shape, layout, rank)
        ]
        items += known or [TensorItem(name, tuple(name.split(".")), dtype, shape, "t", None)]
    return Contents(items, layouts={name: layout for name, _, _, layout in tensors if not isinstance(layout, Whole)})


@given(st.lists(st.tuples(st.text(max_size=5), st.just("float32"), st.just((2,)), st.just(Whole())), unique_by=lambda t: t[0]))
def test_a_structure_does_not_depend_on_the_order_of_a_rank_and_comes_back_from_its_bytes(tensors: list[Tensor]) -> None:
    structure = Structure.of(tensors)
    assert Structure.of(tensors[::-1]).digest() == structure.digest()
    assert Structure.decode(structure.encode()) == structure
    assert [row.name for row in structure.rows] == sorted(t[0] for t in tensors)


@pytest.mark.parametrize("other", [("t.a", "float32", (4,), Whole()), ("t.a", "bfloat16", (3,), Whole())])
def test_one_name_with_two_shapes_or_dtypes_is_refused_and_both_ranks_are_named(other: Tensor) -> None:
    ours = Structure.of([("t.a", "float32", (3,), Whole()), ("t.b", "float32", (), Whole())])
    with pytest.raises(Refused, match=r"t\.a is float32 \[3\] on rank 4, and \w+ \[\d\] on rank 7: .*PerRank"):
        compare([ours, Structure.of([other])], [[4, 5], [7]])


def test_pipeline_stages_have_only_their_shared_names_in_common() -> None:
    stages = [Structure.of([(f"t.{n}", "float32", (2,), Whole()), ("t.tied", "float32", (2,), Whole())]) for n in range(4)]
    common = compare(stages, [[2 * n + 1, 2 * n] for n in range(4)])
    assert common.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert set(common.shared) == {"t.tied"}
    assert [group for group, _ in common.shared["t.tied"]] == [0, 1, 2, 3]


def test_replicas_that_say_so_need_no_proof_and_plain_tensors_do() -> None:
    mesh = Mesh((0, 1, 2, 3), (2, 2), (Replicate(), Shard(0)))
    structure = Structure.of([("t.plain", "float32", (4,), Whole()), ("t.sharded", "float32", (4,), mesh)])
    census = Census(structure, compare([structure], [range(4)]), 1)
    assert census.holders("t.sharded", (4,), mesh) == ((1, 3), True)
    assert census.holders("t.plain", (4,), Whole()) == ((0, 1, 2, 3), False)
    alone = Census(structure, compare([structure], [[1]]), 1)
    assert alone.holders("t.plain", (4,), Whole()) == ((1,), True)
