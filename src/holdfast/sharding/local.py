"""What a rank has of a logical tensor: DTensor and plain tensors here, other styles in the modules beside.

Nothing communicates, nothing is copied: the layout says what the other ranks have.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..errors import Unsupported
from ..layout.boxes import Box
from ..layout.layouts import Flat, Layout, Mesh, Placement, Replicate, Shard, StridedShard, Whole


@dataclass(frozen=True, slots=True)
class Sharded:
    """What this rank has of a logical tensor."""

    shape: tuple[int, ...]
    """Global."""
    layout: Layout
    local: torch.Tensor
    """This rank's memory, the live one. In a Flat layout 1-D, the elements of this rank one after the other; else n-d."""

    def pieces(self, rank: int) -> list[tuple[Box, torch.Tensor]]:
        """The boxes that this rank holds, each with the view of its memory, of the box's shape."""
        if isinstance(self.layout, Whole):
            return [(((0,) * len(self.shape), self.shape), self.local)]
        found = []
        for box, at in self.layout.pieces(self.shape, rank):
            if isinstance(self.layout, Flat):
                view = self.local[at[0] : at[0] + math.prod(box[1])].view(box[1])
            else:
                view = self.local[tuple(slice(a, a + n) for a, n in zip(at, box[1], strict=True))]
            found.append((box, view))
        return found

    @classmethod
    def of_whole(cls, tensor: torch.Tensor) -> Sharded:
        """A plain tensor."""
        return cls(tuple(tensor.shape), Whole(), tensor)

    def like(self, dtype: torch.dtype) -> Sharded:
        """New memory for another tensor of the same shape and layout."""
        return Sharded(self.shape, self.layout, torch.empty_like(self.local, dtype=dtype, requires_grad=False))


def this_rank() -> int:
    """The global rank of this process; 0 where nothing is distributed."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())


def sharded(name: str, tensor: torch.Tensor) -> Sharded:
    """What this rank has of the logical tensor that `tensor` is, or is a shard of.

    Raises:
        Unsupported: a placement that has no boxes, such as Partial.
    """
    if is_dtensor(tensor):
        return _of_dtensor(name, tensor)
    if is_sharded_tensor(tensor):
        from .sharded_tensor import of_sharded_tensor

        return of_sharded_tensor(tensor)
    return Sharded(tuple(tensor.shape), Whole(), tensor)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a shard of a larger one that says so itself."""
    return is_dtensor(tensor) or is_sharded_tensor(tensor)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor; without loading torch's distributed tensors where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded_tensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(tensor, module.ShardedTensor)


def _of_dtensor(name: str, tensor: Any) -> Sharded:
    layout = _layout(tensor.device_mesh, tuple(_placement(name, p) for p in tensor.placements))
    return Sharded(tuple(tensor.shape), layout, tensor._local_tensor)


@lru_cache(maxsize=1024)
def _layout(mesh: Any, placements: tuple[Placement, ...]) -> Mesh:
    """One for all tensors that lie alike: torch works out the ranks of a mesh anew each time it is asked."""
    return Mesh(_ranks_of(mesh), tuple(mesh.mesh.shape), placements)


@lru_cache(maxsize=256)
def _ranks_of(mesh: Any) -> tuple[int, ...]:
    return tuple(int(r) for r in mesh.mesh.reshape(-1).tolist())


def _placement(name: str, placement: Any) -> Placement:
    kind = type(placement).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(int(placement.dim))
    if kind == "_StridedShard":
        return StridedShard(int(placement.dim), int(placement.split_factor))
    raise Unsupported(f"{name} is a DTensor with the placement {placement}, which no stored box has; redistribute it first")
