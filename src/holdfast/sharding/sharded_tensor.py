"""ShardedTensor: its metadata names the box and the rank of every shard, so each rank knows what all the others hold.

A rank may have several shards, one, or none. Metadata and local shards that disagree are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..layout.boxes import Box
from ..layout.layouts import Boxes
from .local import Sharded


@dataclass(frozen=True, slots=True)
class ManyShards(Sharded):
    """A rank's part that lies in several memories: `local` is the first of them."""

    others: tuple[torch.Tensor, ...]
    """The further ones, in the order in which the layout lists this rank's boxes."""

    def pieces(self, rank: int) -> list[tuple[Box, torch.Tensor]]:
        boxes = [piece.box for piece in self.layout.pieces(self.shape, rank)]
        return list(zip(boxes, (self.local, *self.others), strict=True))

    def like(self, dtype: torch.dtype) -> ManyShards:
        first, *others = (torch.empty_like(t, dtype=dtype, requires_grad=False) for t in (self.local, *self.others))
        return ManyShards(self.shape, self.layout, first, tuple(others))


def of_sharded_tensor(tensor: Any) -> Sharded:
    """What this rank has of a `torch.distributed._shard.sharded_tensor.ShardedTensor`.

    Raises:
        Unsupported: a shard without a rank, or local shards that its metadata does not list.
    """
    metadata = tensor.metadata()
    shape = tuple(int(n) for n in metadata.size)
    layout = Boxes(tuple(_rank_of(shard) for shard in metadata.shards_metadata), tuple(map(_box_of, metadata.shards_metadata)))
    mine = {_box_of(shard.metadata): shard.tensor for shard in tensor.local_shards()}
    expected = [piece.box for piece in layout.pieces(shape, torch.distributed.get_rank())]
    if len(mine) != len(tensor.local_shards()) or set(mine) != set(expected):
        raise Unsupported(
            f"a ShardedTensor of shape {list(shape)} has the local shards {sorted(mine)} on rank {torch.distributed.get_rank()}, "
            f"where its metadata says {sorted(expected)}; make it again with ShardedTensor._init_from_local_shards"
        )
    if not expected:
        empty = torch.empty((0,) * len(shape), dtype=metadata.tensor_properties.dtype)
        return Sharded(shape, layout, empty)
    first, *others = (mine[box] for box in expected)
    return ManyShards(shape, layout, first, tuple(others)) if others else Sharded(shape, layout, first)


def _rank_of(shard: Any) -> int:
    rank = None if shard.placement is None else shard.placement.rank()
    if rank is None:
        raise Unsupported(
            f"a ShardedTensor has a shard placed at {shard.placement}, which names no rank; place it at 'rank:N/DEVICE'"
        )
    return int(rank)


def _box_of(shard: Any) -> Box:
    return tuple(int(n) for n in shard.shard_offsets), tuple(int(n) for n in shard.shard_sizes)
