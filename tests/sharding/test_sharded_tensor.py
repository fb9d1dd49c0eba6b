"""ShardedTensors: any number of boxes of any size on each rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardMetadata, empty
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec

from holdfast.errors import Unsupported
from holdfast.layout.layouts import Boxes
from holdfast.sharding.local import sharded
from holdfast.sharding.sharded_tensor import of_sharded_tensor

from .whole import fill, whole

BOXES = [((0, 0), (3, 5)), ((3, 0), (4, 2)), ((3, 2), (4, 3)), ((7, 0), (2, 5))]
"""They tile a tensor of 9 by 5."""


def values() -> torch.Tensor:
    return torch.arange(45.0).view(9, 5)


def made(owners: list[int]) -> ShardedTensor:
    """The boxes, each on the rank that `owners` says, with the values of the whole."""
    spec = EnumerableShardingSpec(
        [ShardMetadata(list(o), list(n), f"rank:{r}/cpu") for (o, n), r in zip(BOXES, owners, strict=True)]
    )
    tensor = empty(spec, 9, 5)
    for shard in tensor.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(values()[row : row + rows, column : column + columns])
    return tensor


def put_together(owners: list[int]) -> None:
    tensor = made(owners)
    part = sharded("table", tensor)
    assert part.shape == (9, 5)
    assert part.layout == Boxes(tuple(owners), tuple(BOXES))
    assert torch.equal(whole({"table": part})["table"], values())
    fill({"table": part}, {"table": values() * 2})
    if dist.get_rank() in owners:
        assert all(shard.tensor.sum() for shard in tensor.local_shards()), "the live memory was written"
    assert torch.equal(whole({"table": of_sharded_tensor(tensor)})["table"], values() * 2)


@pytest.mark.parametrize("owners", [[0, 1, 2, 1], [0, 0, 0, 0], [2, 1, 1, 0], [1, 1, 1, 2]])
def test_boxes_of_any_rank_make_the_whole(owners):
    pool(3).run(put_together, owners)


def chunked() -> None:
    spec = ChunkShardingSpec(dim=0, placements=["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"])
    tensor = empty(spec, 4, 3)
    for shard in tensor.local_shards():
        shard.tensor.copy_(torch.arange(12.0).view(4, 3).narrow(0, shard.metadata.shard_offsets[0], len(shard.tensor)))
    assert torch.equal(whole({"t": of_sharded_tensor(tensor)})["t"], torch.arange(12.0).view(4, 3))


def test_chunks_that_do_not_divide_and_one_that_is_empty():
    pool(3).run(chunked)


def on_a_subgroup() -> None:
    group = dist.new_group([1, 2])
    rank = dist.get_rank()
    if rank:
        box = Shard.from_tensor_and_offsets(torch.full((rank, 2), float(rank)), [rank - 1, 0], rank)
        tensor = ShardedTensor._init_from_local_shards([box], 3, 2, process_group=group)
        part = of_sharded_tensor(tensor)
        assert part.layout == Boxes((1, 2), (((0, 0), (1, 2)), ((1, 0), (2, 2))))
        assert part.local is box.tensor
    parts = {"t": part} if rank else {}
    assert whole(parts)["t"].tolist() == [[1, 1], [2, 2], [2, 2]]


def test_ranks_are_those_of_the_job_in_a_subgroup():
    pool(3).run(on_a_subgroup)


def like_it() -> None:
    part = of_sharded_tensor(made([0, 1, 1, 1]))
    moments = part.like(torch.bfloat16)
    assert [(box, view.shape) for box, view in moments.pieces(dist.get_rank())] == [
        (box, view.shape) for box, view in part.pieces(dist.get_rank())
    ]
    assert all(view.dtype == torch.bfloat16 for _, view in moments.pieces(dist.get_rank()))


def test_memory_of_the_same_layout_can_be_made():
    pool(2).run(like_it)


def lying() -> None:
    tensor = made([0, 1, 0, 1])
    tensor._local_shards.pop()
    of_sharded_tensor(tensor)


def test_local_shards_that_the_metadata_does_not_list_are_refused():
    for error in pool(2).run(lying, catch=True):
        assert isinstance(error, Unsupported)
        assert "its metadata says" in str(error)
