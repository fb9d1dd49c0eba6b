"""Filling live state from a checkpoint, after the match has said that everything fits.

Bytes are read straight into contiguous host tensors; for others each chunk is read aside and copied. Every chunk is checked
against the digest taken at capture, on the memory it ends in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import Corrupt
from ..format.index import Chunks
from ..live import Live
from ..tensors import byte_view, from_bytes, torch_dtype, write_flat
from ..tree import Path, build
from .checkpoint import Checkpoint
from .match import Fill, Match
from .reading import Bytes, Damage, first_damage


def read_into(checkpoint: Checkpoint, fills: list[Fill]) -> int:
    """Fill the targets; returns the bytes read.

    Raises:
        Corrupt: some targets may hold wrong bytes.
    """
    plan = _plan(checkpoint, fills)
    damages = checkpoint.read(plan.chunks, plan.target, plan.deliver)
    for fill in fills:
        if fill.live is not None:  # so that a backward pass that still needs the old values says so
            torch.autograd.graph.increment_version(fill.target)
    if damages:
        raise first_damage(damages, checkpoint.store.url, checkpoint.step)
    return int(plan.chunks.stored_bytes.sum(dtype=np.int64))


def check_bytes(checkpoint: Checkpoint, fills: list[Fill]) -> list[Damage]:
    """Read and check everything that `read_into` would, touching nothing."""
    chunks = _plan(checkpoint, fills).chunks
    return checkpoint.read(chunks, lambda i: None, lambda i, raw: None)


def put(matched: Match, live: Live) -> None:
    """Give the live objects what is not filled in place: values, whole trees, what was allocated, generators."""
    leaves: dict[Path, Any] = {fill.path: fill.target for fill in matched.fills}
    leaves |= dict(matched.values.values())
    below: dict[Path, dict[Path, Any]] = {}
    for path, value in leaves.items():
        subtree = live.subtree_of(path)
        if subtree is not None:
            below.setdefault(subtree, {})[path] = value
    for subtree, tree in below.items():
        live.subtrees[subtree](build(tree, matched.nodes, subtree))
    for fill in matched.fills:
        if live.subtree_of(fill.path) is not None:
            continue
        if fill.live is None:
            _place(live, fill.path, fill.target)
        elif fill.live.put is not None:
            fill.live.put(fill.target)
    for name, (path, value) in matched.values.items():
        if live.subtree_of(path) is not None:
            continue
        item = live.values.get(name)
        if item is None:
            _place(live, path, value)
        elif item.put is not None:
            item.put(value)


def _place(live: Live, path: Path, value: Any) -> None:
    if not any(place(path, value) for place in live.placers):
        raise AssertionError(f"nothing takes {path}")


@dataclass
class _Plan:
    chunks: Chunks
    target: Callable[[int], Bytes | None]
    deliver: Callable[[int, Bytes], None]


def _plan(checkpoint: Checkpoint, fills: list[Fill]) -> _Plan:
    """The chunks to read, and where each goes. A tensor that several names share is read once for each memory."""
    index, every = checkpoint.index, checkpoint.index.all_chunks()
    starts, sizes = every.raw_start.tolist(), every.raw_bytes.tolist()
    rows: list[int] = []
    spots: list[_Spot] = []
    done: set[tuple[int, int]] = set()
    for fill in fills:
        stored = checkpoint.index.canonical(fill.stored)
        key = (stored.row, fill.target.data_ptr())
        if fill.target.numel() == 0 or key in done:
            continue
        done.add(key)
        dtype = torch_dtype(stored.dtype.name)
        for entry in index.entries(stored):
            offset, shape = index.box(stored, entry)
            is_whole = shape == stored.shape
            target = fill.target if is_whole else fill.target[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))]
            wanted, at = math.prod(shape) * stored.dtype.itemsize, 0
            view = byte_view(target) if target.dtype == dtype else None
            for row in range(*index.chunk_range(entry)):
                if starts[row] != at:
                    break
                at += sizes[row]
                rows.append(row)
                spots.append(_Spot(target, dtype, starts[row], None if view is None else view[starts[row] : at]))
            if at != wanted:
                raise Corrupt(
                    f"the chunks of {stored.name} do not make up its {wanted} bytes in {index.path}", tensor=stored.name
                )
    joined = every.take(rows)

    def deliver(i: int, raw: Bytes) -> None:
        spot = spots[i]
        aligned = raw if raw.ctypes.data % spot.dtype.itemsize == 0 and raw.flags.writeable else raw.copy()
        write_flat(spot.target, spot.start // spot.dtype.itemsize, from_bytes(aligned, spot.dtype))

    return _Plan(joined, lambda i: spots[i].memory, deliver)


@dataclass(slots=True)
class _Spot:
    """Where the bytes of one chunk go."""

    target: torch.Tensor
    dtype: torch.dtype
    start: int
    memory: Bytes | None
