"""The image of a data file: in which order entries lie, where they are cut into chunks, and which runs are written at once.

An extent is a run of whole chunks that one thread copies, digests and writes. Chunks are cut on a grid that depends on
nothing but the entry's size, so that the same tensor has the same chunks in every step and every tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 4 << 20
EXTENT_BYTES = 8 << 20


def file_order(item_bytes: Sequence[int]) -> npt.NDArray[np.int64]:
    """The order of entries in a file: by item size, descending, then as given, so that each is aligned to its item."""
    return np.argsort(-np.asarray(item_bytes, np.int64), kind="stable")


def chunk_grid(nbytes: int) -> list[tuple[int, int]]:
    """(start, bytes) of each chunk of an entry of `nbytes`; none for an empty one."""
    return [(start, min(CHUNK_BYTES, nbytes - start)) for start in range(0, nbytes, CHUNK_BYTES)]


@dataclass(slots=True)
class Piece:
    """One chunk on its way into the image."""

    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    source: int
    """Which entry, in the order in which they were added."""
    start: int
    """Bytes from the start of the entry."""
    slot: int
    """The chunk's number in the file, for its digest."""


@dataclass(slots=True)
class Extent:
    """A run of whole chunks, and before it what shares its first block."""

    pieces: list[Piece]
    lead: list[Piece] = field(default_factory=list)
    """The chunks before, as far as they reach into this extent's first block; they are copied again, not digested again."""
    is_last: bool = False
    """Whether the file ends with it, so that its last block is padded."""

    @property
    def start(self) -> int:
        return self.pieces[0].offset

    @property
    def stop(self) -> int:
        return self.pieces[-1].offset + self.pieces[-1].nbytes


class Packer:
    """Packs entries side by side from `start`, and hands out extents as they fill.

    Args:
        start: where the first entry lies; a multiple of `block`.
    """

    def __init__(self, start: int, block: int) -> None:
        self.at = start
        self.slots = 0
        self._entries = 0
        self._block = block
        self._open: list[Piece] = []
        self._open_bytes = 0
        self._tail: list[Piece] = []

    def add(self, nbytes: int) -> list[Extent]:
        """Place the next entry; returns the extents that are complete now."""
        ready = []
        for start, size in chunk_grid(nbytes):
            if self._open_bytes + size > EXTENT_BYTES and self._open:
                ready.append(self._close())
            self._open.append(Piece(self.at, size, self._entries, start, self.slots))
            self._open_bytes += size
            self.at += size
            self.slots += 1
        self._entries += 1
        return ready

    def finish(self) -> list[Extent]:
        """The last extent, if there is one."""
        return [replace(self._close(), is_last=True)] if self._open else []

    def _close(self) -> Extent:
        first = self._open[0].offset
        edge = first - first % self._block
        lead = [p for p in self._tail if p.offset + p.nbytes > edge] if first > edge else []
        extent = Extent(self._open, lead)
        next_edge = extent.stop - extent.stop % self._block
        self._tail = [p for p in lead + self._open if p.offset + p.nbytes > next_edge]
        self._open, self._open_bytes = [], 0
        return extent
