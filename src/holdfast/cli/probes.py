"""What a directory's filesystem really does, by trying: create-once, fsync, direct I/O, and how fast it is.

Each probe works in a scratch directory, which is removed, and through the store that saves use. A probe raises what goes wrong.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..store import posix
from ..store.base import BLOCK
from ..store.local import LocalStore

PROBE_BYTES = 128 << 20
_PIECE_BYTES = 4 << 20
_IN_FLIGHT = 4
_FSYNCS = 16


@dataclass(frozen=True)
class Latency:
    """Of writing a block and making it durable."""

    median_seconds: float
    max_seconds: float


@dataclass(frozen=True)
class Speed:
    """Bytes a second of a large file, durable where it is written; reading does not come from the page cache."""

    fresh: float
    over_existing: float
    read: float


@contextlib.contextmanager
def scratch(directory: str) -> Iterator[LocalStore]:
    """A store below `directory`, in a directory whose name no run lists, removed when the block ends."""
    with tempfile.TemporaryDirectory(prefix=".holdfast-doctor-", dir=directory) as path:
        yield LocalStore(path)


def is_create_once(store: LocalStore) -> bool:
    """Whether the second of two creates of one name fails and leaves the first one's content."""
    store.create("once/record.json", b"first")
    try:
        store.create("once/record.json", b"second")
    except FileExistsError:
        return store.read("once/record.json") == b"first"
    return False


def fsync_latency(store: LocalStore) -> Latency:
    """Raises:
    OSError: fsync does not work here.
    """
    fd = posix.open_fd(os.path.join(store.root, "fsync"), os.O_RDWR | os.O_CREAT)
    try:
        seconds = []
        for number in range(_FSYNCS):
            start = time.perf_counter()
            posix.pwrite(fd, bytes(BLOCK), number * BLOCK)
            posix.fsync(fd)
            seconds.append(time.perf_counter() - start)
    finally:
        posix.close_fd(fd)
    return Latency(statistics.median(seconds), max(seconds))


def has_direct_io(store: LocalStore) -> bool:
    """Whether the filesystem takes an aligned write around the page cache."""
    if not posix.DIRECT:
        return False
    try:
        fd = posix.open_fd(os.path.join(store.root, "direct"), os.O_RDWR | os.O_CREAT | posix.DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK) as block:
            return posix.pwrite(fd, memoryview(block), 0) == BLOCK
    except OSError:
        return False
    finally:
        posix.close_fd(fd)


def speed(store: LocalStore, nbytes: int) -> Speed:
    """Write a file of about `nbytes` as a save does, write another one over its blocks, and read that.

    Raises:
        NoSpace, Unavailable.
    """
    nbytes = max(_PIECE_BYTES, nbytes // _PIECE_BYTES * _PIECE_BYTES)
    fresh = _write(store, "first", nbytes)
    store.retire("first", nbytes)
    over_existing = _write(store, "second", nbytes)
    _drop_from_cache(os.path.join(store.root, "second"))
    return Speed(nbytes / fresh, nbytes / over_existing, nbytes / _read(store, "second", nbytes))


def _write(store: LocalStore, name: str, nbytes: int) -> float:
    """Seconds until a file is durable. Random bytes: a filesystem may not compress them away."""
    with mmap.mmap(-1, _PIECE_BYTES) as piece:
        piece.write(os.urandom(_PIECE_BYTES))
        start = time.perf_counter()
        writer = store.write(name, nbytes)
        try:
            with ThreadPoolExecutor(_IN_FLIGHT, "holdfast-probe") as pool, memoryview(piece) as data:
                list(pool.map(lambda at: writer.write(at, data), range(0, nbytes, _PIECE_BYTES)))
            writer.finish(nbytes)
        except BaseException:
            writer.abort()
            raise
        return time.perf_counter() - start


def _read(store: LocalStore, name: str, nbytes: int) -> float:
    reader = store.open(name)
    try:
        start = time.perf_counter()
        with ThreadPoolExecutor(_IN_FLIGHT, "holdfast-probe") as pool:
            list(pool.map(lambda at: reader.read_into(at, [bytearray(_PIECE_BYTES)]), range(0, nbytes, _PIECE_BYTES)))
        return time.perf_counter() - start
    finally:
        reader.close()


def _drop_from_cache(path: str) -> None:
    if hasattr(os, "posix_fadvise"):
        fd = posix.open_fd(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            posix.close_fd(fd)
