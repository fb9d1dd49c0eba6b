"""Layouts: which boxes of a logical tensor each rank holds, as a value that any rank can evaluate for any other.

Planning without a meeting rests on this: whoever knows a tensor's shape and layout knows who holds what, and who else holds
the same. Torch-free; the adapters that make layouts from live tensors are in `sharding/`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from .boxes import Box, flat_boxes

Shape = tuple[int, ...]
Runs = list[tuple[int, int]]
"""(start, length) pairs along one dimension, in the order in which they lie in local memory."""


class Piece(NamedTuple):
    """A box that a rank holds, and where it lies in its memory."""

    box: Box
    at: tuple[int, ...]
    """Its offset in the local tensor; in a flat layout the one element from which its elements follow one another."""


class Replicate(msgspec.Struct, frozen=True, tag="R"):
    """Every rank along this mesh dimension holds the same."""


class Shard(msgspec.Struct, frozen=True, tag="S"):
    """Cut along a tensor dimension as `torch.chunk` cuts: the last ranks may hold less, or nothing."""

    dim: int


class StridedShard(msgspec.Struct, frozen=True, tag="T"):
    """Cut into `factor` blocks, and each of them among the ranks: FSDP2 over tensor parallelism, where the tensor was first
    cut along a mesh dimension further right. Source: `torch.distributed.tensor.placement_types._StridedShard`."""

    dim: int
    factor: int


Placement = Replicate | Shard | StridedShard


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """A plain tensor. Who else holds one of this name is not declared: it is found out, and equality is proved by digests."""

    def pieces(self, shape: Shape, rank: int) -> list[Piece]:
        return [Piece(((0,) * len(shape), shape), (0,) * len(shape))]

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        return (rank,)

    def members(self) -> tuple[int, ...]:
        return ()


class Mesh(msgspec.Struct, frozen=True, tag="mesh"):
    """Placements on a mesh of ranks, applied from the left: DTensor on any mesh, and hand-sharded tensors."""

    ranks: tuple[int, ...]
    """Global ranks of the mesh, row-major."""
    mesh: tuple[int, ...]
    """Its shape."""
    placements: tuple[Placement, ...]
    """One for each mesh dimension."""

    def pieces(self, shape: Shape, rank: int) -> list[Piece]:
        return _mesh_pieces(self.mesh, self.placements, shape, self._coordinate(rank))

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        if not any(isinstance(p, Replicate) for p in self.placements):
            return (rank,)
        where = tuple(
            slice(None) if isinstance(p, Replicate) else c for p, c in zip(self.placements, self._coordinate(rank), strict=True)
        )
        return tuple(sorted(np.array(self.ranks).reshape(self.mesh)[where].reshape(-1).tolist()))

    def members(self) -> tuple[int, ...]:
        return self.ranks

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        return tuple(int(c) for c in np.unravel_index(self.ranks.index(rank), self.mesh))


class Flat(msgspec.Struct, frozen=True, tag="flat"):
    """Equal slots of a flat buffer in which the tensor lies: FSDP1, ZeRO. The i-th rank holds the row-major elements
    `i * slot - shift` to `(i + 1) * slot - shift`, as far as they exist."""

    ranks: tuple[int, ...]
    slot: int
    """Elements that each rank has of the buffer; at least 1."""
    shift: int = 0
    """Element of the buffer at which the tensor begins."""
    replicas: tuple[tuple[int, ...], ...] = ()
    """Further groups of as many ranks, whose i-th rank holds what the i-th of `ranks` does: hybrid sharding."""

    def range(self, shape: Shape, rank: int) -> tuple[int, int]:
        """First and last row-major element, half-open, that a rank holds."""
        number, total = self._number(rank), math.prod(shape)
        low = min(max(0, number * self.slot - self.shift), total)
        return low, min(max(low, (number + 1) * self.slot - self.shift), total)

    def pieces(self, shape: Shape, rank: int) -> list[Piece]:
        low, high = self.range(shape, rank)
        found, at = [], 0
        for box in flat_boxes(shape, low, high):
            found.append(Piece(box, (at,)))
            at += math.prod(box[1])
        return found

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        if not self.replicas:
            return (rank,)
        number = self._number(rank)
        return tuple(sorted(group[number] for group in (self.ranks, *self.replicas)))

    def members(self) -> tuple[int, ...]:
        return sum(self.replicas, self.ranks)

    def _number(self, rank: int) -> int:
        return next(group for group in (self.ranks, *self.replicas) if rank in group).index(rank)


class Boxes(msgspec.Struct, frozen=True, tag="boxes"):
    """One box for each rank, spelled out: `ShardedTensor`, whose metadata says all of them."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]
    """As many as ranks; a rank may stand several times."""

    def pieces(self, shape: Shape, rank: int) -> list[Piece]:
        return [Piece(box, (0,) * len(shape)) for box in self._of(rank)]

    def holders(self, shape: Shape, rank: int) -> tuple[int, ...]:
        ours = self._of(rank)
        return tuple(sorted(r for r in set(self.ranks) if self._of(r) == ours))

    def members(self) -> tuple[int, ...]:
        return self.ranks

    def _of(self, rank: int) -> list[Box]:
        return [box for r, box in zip(self.ranks, self.boxes, strict=True) if r == rank]


Layout = Whole | Mesh | Flat | Boxes


@lru_cache(maxsize=1 << 16)
def _grid(mesh: tuple[int, ...], placements: tuple[Placement, ...], shape: Shape, where: tuple[int, ...]) -> tuple[Runs, ...]:
    runs: list[Runs] = [[(0, d)] for d in shape]
    for number, dim, factor in _order(mesh, placements):
        ranks, coordinate = mesh[number], where[number]
        blocks = [chunk_of(runs[dim], factor, block) for block in range(factor)] if factor > 1 else [runs[dim]]
        runs[dim] = [run for block in blocks for run in chunk_of(block, ranks, coordinate)]
    return tuple(runs)


@lru_cache(maxsize=1 << 10)
def _order(mesh: tuple[int, ...], placements: tuple[Placement, ...]) -> tuple[tuple[int, int, int], ...]:
    """The mesh dimensions that cut, in the order in which they do: each with the tensor dimension, and into how many blocks that
    is cut first.

    A strided shard stands for a cut that came after those further right whose ranks make up its factor. Cut in that order, dims
    that do not divide come out as FSDP2 has them: its blocks are those of the tensor ranks, also where these are of other sizes.
    """
    order: dict[int, list[tuple[int, int, int]]] = {}
    for number in reversed(range(len(mesh))):
        placement = placements[number]
        if isinstance(placement, Replicate):
            continue
        of_dim = order.setdefault(placement.dim, [])
        factor = placement.factor if isinstance(placement, StridedShard) else 1
        products = [math.prod(mesh[n] for n, _, _ in of_dim[:at]) for at in range(len(of_dim) + 1)]
        at = products.index(factor) if factor in products else 0
        of_dim.insert(at, (number, placement.dim, 1 if factor in products else factor))
    return tuple(cut for of_dim in order.values() for cut in of_dim)


def _mesh_pieces(mesh: tuple[int, ...], placements: tuple[Placement, ...], shape: Shape, where: tuple[int, ...]) -> list[Piece]:
    runs = [_joined(of_dim) for of_dim in _grid(mesh, placements, shape, where)]
    pieces = [Piece(((), ()), ())]
    for of_dim in runs:
        at, longer = 0, []
        for start, length in of_dim:
            longer += [Piece(((*b[0], start), (*b[1], length)), (*a, at)) for b, a in pieces]
            at += length
        pieces = longer
    return [piece for piece in pieces if math.prod(piece.box[1])]


def _joined(runs: Runs) -> Runs:
    """The same elements in the same order, in as few runs as there can be."""
    found: Runs = []
    for start, length in runs:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


def chunk_of(runs: Runs, count: int, number: int) -> Runs:
    """Of the elements that `runs` list, those in chunk `number` when `torch.chunk` cuts the list into `count`."""
    total = sum(length for _, length in runs)
    size = -(-total // count)
    low, high, at = min(number * size, total), min((number + 1) * size, total), 0
    found: Runs = []
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            found.append((start + first - at, last - first))
        at += length
    return found
