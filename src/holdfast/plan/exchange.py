"""Who reads what, where ranks share memory: chunks that several of them need are read by one, in windows.

A window is a run of chunks, in file order, that fits a slot of the ranks' shared memory; of each window every reader reads a
run of chunks, so that all readers have read about the same number of bytes at any time. Pure, and equal on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..format.columns import Array
from ..format.index import Chunks

ALIGNMENT = 64
"""Of a chunk in its slot: any element type may be viewed there."""
_FREE_PART = 40
"""Reading up to this part of the bytes again is cheaper than a meeting of the ranks."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What one rank reads, and what it gets from others. Chunks are named by their rows in the index."""

    alone: Array
    """Rows that this rank reads for itself; ascending."""
    shared: Array
    """Rows that one reads for all, in file order."""
    is_mine: Array
    """Of each shared row, whether this rank needs it."""
    reader: Array
    """Of each shared row, the number of its reader."""
    at: Array
    """Of each shared row, bytes from the start of its slot."""
    first: Array
    """Window w holds the shared rows `first[w]` to `first[w + 1]`."""

    @property
    def windows(self) -> int:
        return len(self.first) - 1

    def part(self, window: int, reader: int) -> tuple[int, int]:
        """The shared rows of a window that a reader reads: a half-open range."""
        low, high = int(self.first[window]), int(self.first[window + 1])
        return (
            low + int(np.searchsorted(self.reader[low:high], reader, "left")),
            low + int(np.searchsorted(self.reader[low:high], reader, "right")),
        )


def slot_bytes(chunks: Chunks, wanted: int) -> int:
    """The size of a slot: what is wanted, or what the largest chunk takes."""
    return max(wanted, int(_padded(chunks.raw_bytes.max(initial=0))))


def plan_sharing(chunks: Chunks, needs: Sequence[Array], position: int, slot: int, twins: int = 1) -> Sharing:
    """Divide what the ranks of a node need.

    Args:
        chunks: of the whole index. needs: of each rank of the node, a packed bitmap of the rows that it needs.
        position: of this rank among them. slot: bytes.
        twins: nodes that need the same, each of which reads a part of everything.
    Returns:
        The division; its readers are numbered by node, then by position.
    """
    total = len(chunks)
    holders = np.zeros(total, np.uint16)
    for one in needs:
        holders += np.unpackbits(one, count=total)
    mine = np.unpackbits(needs[position], count=total).astype(bool)
    stored = chunks.stored_bytes.astype(np.int64)
    again = int((stored * np.maximum(holders.astype(np.int64) - 1, 0)).sum())
    if twins == 1 and again * _FREE_PART <= int(stored[holders > 0].sum()):
        is_shared = np.zeros(total, bool)
    else:
        is_shared = holders >= (2 if twins == 1 else 1)
    rows = np.flatnonzero(is_shared)
    rows = rows[np.lexsort((chunks.offset[rows], chunks.file[rows]))]
    sizes = _padded(chunks.raw_bytes[rows])
    first, at = _windows(sizes, slot)
    reader = _readers(stored[rows], first, twins * len(needs))
    return Sharing(np.flatnonzero(mine & ~is_shared), rows, mine[rows], reader, at, first)


def _padded(nbytes: Array) -> Array:
    return -(-nbytes.astype(np.int64) // ALIGNMENT) * ALIGNMENT


def _windows(sizes: Array, slot: int) -> tuple[Array, Array]:
    """Where windows begin, and where each chunk lies in its window."""
    stops = np.cumsum(sizes)
    starts = stops - sizes
    first, base = [0], np.zeros(len(sizes), np.int64)
    while first[-1] < len(sizes):
        low = first[-1]
        high = int(np.searchsorted(stops, starts[low] + slot, "right"))
        base[low:high] = starts[low]
        first.append(high)
    return np.array(first, np.int64), starts - base


def _readers(stored: Array, first: Array, readers: int) -> Array:
    """Of each chunk its reader: runs in file order, such that after each window the loads are as level as chunks allow."""
    reader = np.zeros(len(stored), np.int64)
    loads = np.zeros(readers, np.int64)
    for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        sizes = stored[low:high]
        stops = np.cumsum(sizes)
        bounds = np.cumsum(_level(loads, int(stops[-1])) - loads)
        reader[low:high] = np.minimum(np.searchsorted(bounds, stops - sizes / 2, "left"), readers - 1)
        loads += np.bincount(reader[low:high], sizes, readers).astype(np.int64)
    return reader


def _level(loads: Array, more: int) -> Array:
    """Loads to which `more` was added where they were least."""
    ascending = np.sort(loads)
    room = ascending * np.arange(1, len(loads) + 1) - np.cumsum(ascending)  # to lift all below the i-th to it
    lifted = int(np.searchsorted(room, more, "right"))
    level: Array = np.maximum(loads, (more + ascending[:lifted].sum()) / lifted)
    return level
