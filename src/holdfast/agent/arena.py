"""The arena of one rank: shared memory for several versions of its part of the state, each laid out as the file's image.

It is a memfd: no name in any directory, gone with the last process that has it open, and passed by descriptor. Its pages are
made before the first capture, since the first touch of memory costs several times a copy; and asking for them says at once
that there is no room, where a touch would kill.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import NoSpace

Bytes = npt.NDArray[np.uint8]
PAGE = 4096
_STEP = 64 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE = 23


class Arena:
    """So many slots of equal size.

    Args:
        fd: of the memory, which has at least `slots * slot_bytes`; owned by this object.
        slot_bytes: a multiple of PAGE.
    """

    def __init__(self, fd: int, slots: int, slot_bytes: int) -> None:
        self.fd, self.slots, self.slot_bytes = fd, slots, slot_bytes
        self._memory: Any = mmap.mmap(fd, max(PAGE, slots * slot_bytes), mmap.MAP_SHARED)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.reserved: set[int] = set()
        """Slots whose pages were made, through this object."""
        self._populated: set[int] = set()

    @classmethod
    def create(cls, slots: int, nbytes: int) -> Arena:
        """An arena for `slots` versions of `nbytes` each; its pages are not there yet: see `populate`."""
        slot = -(-nbytes // PAGE) * PAGE
        fd = os.memfd_create("holdfast-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, max(PAGE, slots * slot))
            return cls(fd, slots, slot)
        except BaseException:
            os.close(fd)
            raise

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def slot(self, number: int) -> Bytes:
        """The memory of one slot."""
        return self._bytes[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def reserve(self, slot: int) -> None:
        """Make the pages of a slot; takes about a second for 2 GB.

        Raises:
            NoSpace: there is not so much memory.
        """
        first = slot * self.slot_bytes
        for start in range(first, first + self.slot_bytes, _STEP):
            try:
                os.posix_fallocate(self.fd, start, min(_STEP, first + self.slot_bytes - start))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.ENOMEM):
                    raise NoSpace(f"no memory for {self.nbytes >> 20} MiB of snapshots: lower memory=, or save less") from error
                raise
        self.reserved.add(slot)

    def populate(self, slot: int) -> None:
        """Have this process reach the pages of a slot without a fault each; a hint, taken once."""
        if slot in self._populated:
            return
        self._populated.add(slot)
        base, first = self._bytes.ctypes.data, slot * self.slot_bytes
        for start in range(
            first, first + self.slot_bytes, _STEP
        ):  # in steps: the kernel holds the lock of the mappings meanwhile
            size = min(_STEP, first + self.slot_bytes - start)
            _libc.madvise(ctypes.c_void_p(base + start), ctypes.c_size_t(size), ctypes.c_int(_MADV_POPULATE_WRITE))

    def resident_bytes(self) -> int:
        """Bytes of it that this process has touched."""
        if self._memory is None:
            return 0
        start = f"{self._bytes.ctypes.data:x}-"
        with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/self/smaps") as file:
            lines = iter(file)
            next(line for line in lines if line.startswith(start))
            return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) << 10
        return 0

    def close(self) -> None:
        """Let go of it; memory that views still show goes with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._bytes = np.empty(0, np.uint8)
        self._memory = None
