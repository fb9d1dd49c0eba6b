"""Filling live state from a checkpoint, after the match has said that everything fits.

Bytes are read straight into contiguous host tensors; for others each chunk is read aside and copied, on a device by the device,
while the next one is read. Every chunk is checked against the digest taken at capture, on the memory it ends in; for a device, on
the host memory it is copied from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from ..format.columns import Array
from ..format.index import Chunks, Index
from ..layout.boxes import Box, flat_boxes, intersect
from ..live import Live
from ..plan.load import Runs, Wanted, plan_load, runs_of
from ..tensors import byte_view, from_bytes, torch_dtype, write_flat
from ..tree import Path, build
from .checkpoint import Checkpoint
from .landing import Landings
from .match import Fill, Match
from .reading import Bytes, Damage, first_damage


def read_into(checkpoint: Checkpoint, fills: list[Fill]) -> int:
    """Fill the targets; returns the bytes read.

    Raises:
        Corrupt: some targets may hold wrong bytes.
    """
    source = Direct(checkpoint, reads_of(checkpoint, fills))
    fill_from(source, checkpoint, fills)
    return source.read_bytes


def fill_from(source: Source, checkpoint: Checkpoint, fills: list[Fill]) -> None:
    """Fill the targets of `fills` with what a source of their reads gives.

    Raises:
        Corrupt: some targets may hold wrong bytes.
    """
    settle(fills)  # what was given to the targets' devices before comes first
    try:
        damages = source.fill()
    finally:
        settle(fills)
        touch(fills)
    if damages:
        raise first_damage(damages, checkpoint.store.url, checkpoint.step)


class Source(Protocol):
    """Where the bytes of a rank's reads come from.

    Attributes:
        read_bytes: what this rank has read from the store to fill its targets.
    """

    read_bytes: int

    def check(self) -> list[Damage]:
        """Read and check everything that `fill` would, touching nothing; or this rank's part of it, where others do the rest."""
        ...

    def fill(self) -> list[Damage]:
        """Fill the targets; returns damage, in file order."""
        ...


class Direct:
    """A source that reads everything from the store."""

    def __init__(self, checkpoint: Checkpoint, reads: Reads) -> None:
        self._checkpoint, self._reads = checkpoint, reads
        self.read_bytes = 0

    def check(self) -> list[Damage]:
        return self._checkpoint.read(self._reads.chunks, lambda i: None, lambda i, raw: None)

    def fill(self) -> list[Damage]:
        reads = self._reads
        self.read_bytes = int(reads.chunks.stored_bytes.sum(dtype=np.int64))
        return self._checkpoint.read(reads.chunks, reads.target, reads.deliver, room=reads.room)


def settle(fills: list[Fill]) -> None:
    """Return when devices have done to the targets all that they were given."""
    landings = Landings()
    for fill in fills:
        landings.of(fill.sharded.local)
    landings.settle()


def touch(fills: list[Fill]) -> None:
    """Say to autograd that the targets have changed, so that a backward pass that still needs the old values says so."""
    for fill in fills:
        if fill.live is not None:
            torch.autograd.graph.increment_version(fill.sharded.local)


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
class Reads:
    """The chunks to read, and where each goes."""

    rows: Array
    """Of the chunks, in the index; each once."""
    chunks: Chunks
    target: Callable[[int], Bytes | None]
    deliver: Callable[[int, Bytes], None]
    room: Callable[[int, int], Bytes]
    """Memory for the stored bytes of chunk i, which has no target."""
    settle: Callable[[], None]
    """Returns when nothing that was delivered is needed any more: a device may still be fetching it."""


def reads_of(checkpoint: Checkpoint, fills: list[Fill]) -> Reads:
    """What this rank reads for its targets. A tensor that several names share is read once for each memory."""
    index = checkpoint.index
    wanted: list[Wanted] = []
    views: list[torch.Tensor] = []
    done: set[tuple[int, int]] = set()
    for fill in fills:
        stored = index.canonical(fill.stored)
        key = (stored.row, fill.sharded.local.data_ptr())
        if fill.sharded.local.numel() == 0 or key in done:
            continue
        done.add(key)
        for box, view in fill.sharded.pieces(fill.rank):
            wanted.append(Wanted(stored, box))
            views.append(view)
    plan = plan_load(index, wanted)
    regions: dict[int, Region] = {}
    landings = Landings()

    def region(join: int) -> Region:
        if join not in regions:
            number = int(plan.wanted[join])
            is_host = landings.of(views[number]) is None
            regions[join] = _region(index, wanted[number], int(plan.entry[join]), views[number], is_host)
        return regions[join]

    chunks = index.all_chunks().take(plan.chunks)
    starts, sizes, first = chunks.raw_start.tolist(), chunks.raw_bytes.tolist(), plan.first.tolist()

    def target(i: int) -> Bytes | None:
        return region(int(plan.joins[first[i]])).memory(starts[i], sizes[i]) if first[i + 1] - first[i] == 1 else None

    def deliver(i: int, raw: Bytes) -> None:
        for join in plan.joins[first[i] : first[i + 1]].tolist():
            place = region(join)
            landings.put(place.view, partial(place.take, starts[i], raw), raw)

    def room(i: int, nbytes: int) -> Bytes:
        return landings.room(region(int(plan.joins[first[i]])).view, nbytes)

    return Reads(plan.chunks, chunks, target, deliver, room, landings.settle)


@dataclass(slots=True)
class Region:
    """The elements that a stored entry and a target share, and where they lie in both."""

    view: torch.Tensor
    """Of the target."""
    dtype: torch.dtype
    """The stored one."""
    extent: tuple[int, ...]
    """Of the entry."""
    box: Box
    """In the entry."""
    runs: Runs
    bytes: Bytes | None
    """The view's memory, where the elements follow one another in it as they do in the entry."""

    def memory(self, start: int, nbytes: int) -> Bytes | None:
        """The memory that a run of the entry's bytes belongs into, if all of it does, and lies side by side."""
        low = start - self.runs.first * self.dtype.itemsize
        if self.bytes is None or low < 0 or low + nbytes > len(self.bytes):
            return None
        return self.bytes[low : low + nbytes]

    def take(self, start: int, raw: Bytes) -> None:
        """Copy what belongs here out of the entry's bytes from `start` on."""
        aligned = raw if raw.ctypes.data % self.dtype.itemsize == 0 and raw.flags.writeable else raw.copy()
        flat, first = from_bytes(aligned, self.dtype), start // self.dtype.itemsize
        if self.runs.period == self.runs.length:
            low, high = max(first, self.runs.first), min(first + len(flat), self.runs.last)
            if low < high:
                write_flat(self.view, low - self.runs.first, flat[low - first : high - first])
            return
        at = 0
        for block in flat_boxes(self.extent, first, first + len(flat)):
            size = math.prod(block[1])
            if (part := intersect(block, self.box)) is not None:
                source = flat[at : at + size].view(block[1])[_slices(part, block[0])]
                self.view.detach()[_slices(part, self.box[0])].copy_(source)
            at += size


def _region(index: Index, wanted: Wanted, entry: int, view: torch.Tensor, is_host: bool) -> Region:
    stored = index.box(wanted.tensor, entry)
    part = intersect(stored, wanted.box)
    assert part is not None
    runs, dtype = runs_of(stored, wanted.box), torch_dtype(wanted.tensor.dtype.name)
    inside = (tuple(p - s for p, s in zip(part[0], stored[0], strict=True)), part[1])
    target = view[_slices(part, wanted.box[0])]
    is_direct = is_host and runs.period == runs.length and target.dtype == dtype
    return Region(target, dtype, stored[1], inside, runs, byte_view(target) if is_direct else None)


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, o, n in zip(box[0], origin, box[1], strict=True))
