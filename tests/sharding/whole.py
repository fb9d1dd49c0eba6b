"""Whole tensors from every rank's pieces and back, knowing only boxes: the judge of what adapters say."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from holdfast.layout.boxes import covers_once
from holdfast.sharding.local import Sharded


def whole(parts: Mapping[str, Sharded]) -> dict[str, torch.Tensor]:
    """Every tensor that some rank has a part of, put together on all ranks. Asserts that the ranks agree about its layout,
    that its pieces cover it once, and that ranks which are said to hold the same do."""
    rank = dist.get_rank()
    ours = {
        name: (p.shape, p.layout, [(box, view.detach().clone()) for box, view in p.pieces(rank)], p.layout.holders(p.shape, rank))
        for name, p in parts.items()
    }
    everyone: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ours)
    return {
        name: _joined(name, [(r, held[name]) for r, held in enumerate(everyone) if name in held]) for name in _names(everyone)
    }


def fill(parts: Mapping[str, Sharded], values: Mapping[str, torch.Tensor]) -> None:
    """Write whole tensors into this rank's pieces."""
    for name, part in parts.items():
        for (offset, shape), view in part.pieces(dist.get_rank()):
            view.detach().copy_(values[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])


def _names(everyone: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for held in everyone for name in held))


def _joined(name: str, held: list[tuple]) -> torch.Tensor:
    rank, (shape, layout, pieces, _) = held[0]
    by_rank = {rank: pieces for rank, (_, _, pieces, _) in held}
    boxes, result = [], torch.full(shape, -77.0, dtype=pieces[0][1].dtype if pieces else torch.float32)
    for rank, (its_shape, its_layout, pieces, holders) in held:
        assert (its_shape, its_layout) == (shape, layout), f"ranks differ about {name}: {its_layout} and {layout}"
        assert set(holders) <= set(layout.members()) or not layout.members(), name
        for holder in holders:
            for (box, ours), (its_box, theirs) in zip(pieces, by_rank.get(holder, pieces), strict=True):
                assert box == its_box, name
                assert torch.equal(ours, theirs), f"{name}: ranks {rank} and {holder} differ at {box}"
        if rank == min(holders, default=-1):
            for (offset, extent), view in pieces:
                boxes.append((offset, extent))
                result = result.to(view.dtype)
                result[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))] = view
    assert covers_once(shape, boxes) is None, f"{name}: {covers_once(shape, boxes)}"
    return result
