"""Loading a checkpoint into a tree of new tensors, without any live state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..format import values
from ..format.names import dotted, path_of
from ..tensors import torch_dtype
from ..tree import Path, build
from .checkpoint import NODE, Checkpoint
from .fill import read_into
from .match import Fill
from .wishes import Wishes


def load_tree(checkpoint: Checkpoint, select: str | Sequence[str] | None, exclude: str | Sequence[str]) -> dict[str, Any]:
    """The selected part of a checkpoint as nested containers. Tied tensors share memory.

    Raises:
        Corrupt, Unsupported.
    """
    wishes = Wishes.of(select, exclude)
    made: dict[int, torch.Tensor] = {}
    fills: list[Fill] = []
    leaves: dict[Path, Any] = {}
    order = checkpoint.index.column("tensor.order", 0, len(checkpoint.index))
    for tensor in sorted(checkpoint.index.tensors(), key=lambda t: int(order[t.row])):
        if not wishes.wants(tensor.name):
            continue
        holder = checkpoint.index.canonical(tensor)
        if holder.row not in made:
            made[holder.row] = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype.name))
            fills.append(Fill.whole(tensor.name, tensor, made[holder.row], tensor.path))
        leaves[tensor.path] = made[holder.row]
    read_into(checkpoint, fills)
    nodes: dict[Path, str] = {}
    by_rank = checkpoint.rank_values
    for raw_path, data in checkpoint.commit.values:
        path = path_of(raw_path)
        if isinstance(data, dict) and NODE in data:
            nodes[path] = data[NODE]
        elif wishes.wants(dotted(path)):
            leaves[path] = values.decode(data, dotted(path))
    for pairs in checkpoint.commit.rank_values.values():
        for path in (path_of(raw_path) for raw_path, _ in pairs):
            if path not in leaves and wishes.wants(dotted(path)) and dotted(path) in by_rank:
                leaves[path] = by_rank[dotted(path)]
    tree = build(leaves, nodes, ())
    assert isinstance(tree, dict)
    return tree
