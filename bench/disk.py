"""What the disk itself can do: as many bytes as the state has, by direct I/O, without any format.

Eight threads, blocks of 16 MiB, buffers in huge pages that were touched before, fsync at the end: the floor for a save to fresh
blocks, for a save over an existing file, and for a load.
"""

import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import remove, sync_path

THREADS = 8
BLOCK_BYTES = 16 << 20
PAGE_BYTES = 4096


class Disk:
    """Measures in the process of the caller; one turn is one value of each kind."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self._directory = directory
        self._nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        self._kept = directory / "kept"
        self._local = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, initializer=self._give_buffer)

    def _give_buffer(self) -> None:
        self._local.buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._local.buffer.madvise(mmap.MADV_HUGEPAGE)
        self._local.buffer[:] = os.urandom(BLOCK_BYTES)

    def warm_up(self) -> None:
        remove(self._directory)
        self._directory.mkdir(parents=True)
        self._write(self._kept)

    def turn(self) -> dict[str, float]:
        """Seconds for `write_fresh`, `write_over` and `read`.

        Raises:
            OSError: the file system does not do direct I/O.
        """
        fresh = self._directory / "fresh"
        fresh.unlink(missing_ok=True)
        os.sync()
        seconds = {"write_fresh": self._write(fresh)}
        fresh.unlink()
        os.sync()
        seconds["write_over"] = self._write(self._kept)
        seconds["read"] = self._each_block(self._kept, os.O_RDONLY)
        return seconds

    def _write(self, path: Path) -> float:
        start = time.perf_counter()
        self._each_block(path, os.O_RDWR | os.O_CREAT)
        sync_path(path)
        sync_path(path.parent)
        return time.perf_counter() - start

    def _each_block(self, path: Path, flags: int) -> float:
        start = time.perf_counter()
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        move = os.preadv if flags == os.O_RDONLY else os.pwritev

        def one(offset: int) -> None:
            nbytes = min(BLOCK_BYTES, self._nbytes - offset)
            moved = move(descriptor, [memoryview(self._local.buffer)[:nbytes]], offset)
            if moved != nbytes:
                raise OSError(f"{moved} of {nbytes} bytes moved at {offset}")

        try:
            list(self._threads.map(one, range(0, self._nbytes, BLOCK_BYTES)))
        finally:
            os.close(descriptor)
        return time.perf_counter() - start

    def close(self) -> None:
        self._threads.shutdown()
        remove(self._directory)
