"""The boxes that layouts say a rank holds, against cutting real tensors: as DTensor's placements do, and flat buffers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from holdfast.layout.layouts import Boxes, Flat, Layout, Mesh, Placement, Replicate, Shard, StridedShard, Whole

strided_shard: Any = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard
SIZES = [(1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 3), (4, 1), (2, 2, 2), (3, 1, 2)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def split(tensor: torch.Tensor, placement: Any, ranks: int, coordinate: int) -> torch.Tensor:
    """One rank's part, as torch cuts it."""
    if isinstance(placement, TorchReplicate):
        return tensor
    parts: torch.Tensor = placement._split_tensor(tensor, ranks, with_padding=False)[0][coordinate]
    return parts


def torch_placement(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if isinstance(placement, StridedShard):
        return strided_shard(placement.dim, split_factor=placement.factor)
    return TorchReplicate()


def held(layout: Layout, shape: tuple[int, ...], rank: int, local: torch.Tensor) -> torch.Tensor:
    """`local` again, each element taken from where the layout says that it is in the whole tensor."""
    found = torch.full_like(local, -1)
    for box, at in layout.pieces(shape, rank):
        place = found[tuple(slice(a, a + n) for a, n in zip(at, box[1], strict=True))]
        assert (place == -1).all(), "two pieces lie over each other"
        place.copy_(numbered(shape)[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))])
    return found


def coordinates(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh]:
    """A tensor of any shape, also shorter than the mesh, cut along any dimensions, also twice."""
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    sizes = draw(st.sampled_from(SIZES))
    kinds = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    ranks = draw(st.permutations(range(100, 100 + math.prod(sizes))))
    return shape, Mesh(tuple(ranks), sizes, tuple(draw(kinds) for _ in sizes))


@settings(deadline=None)
@given(meshes())
def test_a_mesh_holds_what_torch_cuts(case: tuple[tuple[int, ...], Mesh]) -> None:
    shape, mesh = case
    for rank, where in zip(mesh.ranks, coordinates(mesh.mesh), strict=True):
        local = numbered(shape)
        for placement, ranks, coordinate in zip(mesh.placements, mesh.mesh, where, strict=True):
            local = split(local, torch_placement(placement), ranks, coordinate)
        assert torch.equal(held(mesh, shape, rank, local), local)


@settings(deadline=None)
@given(meshes())
def test_the_holders_on_a_mesh_are_those_who_differ_in_replicated_dimensions_only(case: tuple[tuple[int, ...], Mesh]) -> None:
    shape, mesh = case
    pieces = {rank: mesh.pieces(shape, rank) for rank in mesh.ranks}
    for rank in mesh.ranks:
        holders = mesh.holders(shape, rank)
        assert rank in holders
        assert all(pieces[other] == pieces[rank] for other in holders)
        if pieces[rank]:
            assert set(holders) == {other for other in mesh.ranks if pieces[other] == pieces[rank]}


@settings(deadline=None)
@given(st.sampled_from([2, 3, 4]), st.sampled_from([2, 3, 4]), st.integers(0, 50), st.sampled_from([0, 1]))
def test_fsdp_over_tensor_ranks_holds_what_was_cut_by_those_first(data: int, tensor: int, rows: int, dim: int) -> None:
    shape = (rows, 3) if dim == 0 else (3, rows)
    mesh = Mesh(tuple(range(data * tensor)), (data, tensor), (StridedShard(dim, tensor), Shard(dim)))
    for rank, (row, column) in enumerate(coordinates((data, tensor))):
        local = split(split(numbered(shape), TorchShard(dim), tensor, column), TorchShard(dim), data, row)
        if rows % (data * tensor) == 0:
            blocks = split(numbered(shape), strided_shard(dim, split_factor=tensor), data, row)
            assert torch.equal(local, split(blocks, TorchShard(dim), tensor, column))
        assert torch.equal(held(mesh, shape, rank, local), local)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(2, 4), st.integers(0, 30))
def test_a_strided_shard_alone_is_a_piece_of_each_block(data: int, factor: int, rows: int) -> None:
    mesh = Mesh(tuple(range(data)), (data,), (StridedShard(0, factor),))
    for rank in range(data):
        local = split(numbered((rows, 2)), strided_shard(0, split_factor=factor), data, rank)
        assert torch.equal(held(mesh, (rows, 2), rank, local), local)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 5), max_size=3).map(tuple), st.integers(1, 5), st.integers(0, 12), st.integers(0, 5), st.booleans()
)
def test_a_flat_layout_holds_slices_of_the_buffer(shape: tuple[int, ...], ranks: int, shift: int, more: int, twice: bool) -> None:
    total = math.prod(shape)
    slot = max(1, -(-(shift + total) // ranks)) + more
    buffer = torch.full((slot * ranks,), -1)
    buffer[shift : shift + total] = torch.arange(total)
    replicas = (tuple(range(50, 50 + ranks)),) if twice else ()
    flat = Flat(tuple(range(10, 10 + ranks)), slot, shift, replicas)
    for number in range(ranks):
        mine = buffer[number * slot : (number + 1) * slot]
        mine = mine[mine >= 0]
        for rank in (10 + number, 50 + number)[: 1 + twice]:
            found = torch.full_like(mine, -1)
            for box, (at,) in flat.pieces(shape, rank):
                part = numbered(shape)[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
                found[at : at + math.prod(box[1])] = part.reshape(-1)
            assert torch.equal(found, mine)
            assert flat.range(shape, rank)[1] - flat.range(shape, rank)[0] == len(mine)
            assert flat.holders(shape, rank) == ((10 + number, 50 + number) if twice else (10 + number,))
    assert set(flat.members()) == {*flat.ranks, *itertools.chain(*replicas)}


def test_boxes_are_those_spelled_out_and_equal_ones_have_the_same_holders() -> None:
    rows = [((0, 0), (2, 3)), ((2, 0), (1, 3)), ((0, 0), (2, 3)), ((3, 0), (1, 3)), ((2, 0), (1, 3)), ((3, 0), (1, 3))]
    layout = Boxes((4, 5, 6, 5, 7, 7), tuple(rows))
    assert [piece.box for piece in layout.pieces((4, 3), 5)] == [rows[1], rows[3]]
    assert [piece.box for piece in layout.pieces((4, 3), 4)] == [rows[0]]
    assert layout.holders((4, 3), 4) == (4, 6)
    assert layout.holders((4, 3), 5) == (5, 7)
    assert all(piece.at == (0, 0) for rank in (4, 5, 6, 7) for piece in layout.pieces((4, 3), rank))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 3)])
def test_a_plain_tensor_is_one_box_and_names_nobody_else(shape: tuple[int, ...]) -> None:
    assert [tuple(piece) for piece in Whole().pieces(shape, 3)] == [(((0,) * len(shape), shape), (0,) * len(shape))]
    assert Whole().holders(shape, 3) == (3,)
    assert Whole().members() == ()
