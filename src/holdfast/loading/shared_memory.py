"""Memory that the ranks of a node share while they load: a bitmap of each rank's needs, then a ring of slots.

It has no name in any directory: the first rank makes it and the others open it as that process's descriptor, so that it is
gone with the last of them, however they end.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from .reading import Bytes

_PAGE = 4096


class SharedMemory:
    """One mapping of the memory.

    Args:
        fd: the descriptor, which is closed with this. bitmaps: how many, of `bitmap` bytes. slots: how many, of `slot` bytes.
    """

    def __init__(self, fd: int, bitmaps: int, bitmap: int, slots: int, slot: int) -> None:
        self.fd, self.slots = fd, slots
        self._bitmap, self._slot = bitmap, slot
        self._ring = _whole_pages(bitmaps * bitmap)
        nbytes = self._ring + slots * slot
        try:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def bitmap(self, position: int) -> Bytes:
        """The needs of the rank at a position."""
        return self._bytes[position * self._bitmap :][: self._bitmap]

    def slot(self, window: int) -> Bytes:
        """The slot in which a window lies."""
        return self._bytes[self._ring + window % self.slots * self._slot :][: self._slot]

    def close(self) -> None:
        """Let go of it. The memory goes when the last view has gone, which after an error may be later."""
        os.close(self.fd)
        del self._bytes
        with contextlib.suppress(BufferError):
            self._map.close()


def make() -> int:
    """A new descriptor of shared memory.

    Raises:
        OSError: this system has none to give.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create")
    return os.memfd_create("holdfast-exchange")


def open_of(pid: int, fd: int) -> int:
    """A descriptor of our own of what process `pid` has at `fd`.

    Raises:
        OSError: it is in another pid namespace, or another user's.
    """
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
