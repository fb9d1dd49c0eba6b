"""Writing the image of a data file: extents are copied into aligned blocks, digested there, and written, several at once.

A digest is taken of the copy that is written, not of the source. The blocks are kept from save to save: fresh memory costs
several times what used memory does.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..format.datafile import BLOCK
from ..format.digest import digest
from ..plan.image import EXTENT_BYTES, Extent, Packer, Piece
from ..store.base import Writer

Bytes = npt.NDArray[np.uint8]
THREADS = 8
BUFFER_BYTES = EXTENT_BYTES + 2 * BLOCK
_HUGE_PAGE = 2 << 20


class Source(Protocol):
    """The bytes of an entry, row-major."""

    nbytes: int

    def copy_into(self, start: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `start`. Called from several threads."""
        ...


class Buffers:
    """Aligned blocks of BUFFER_BYTES of memory, made when first needed and then kept."""

    def __init__(self, count: int = THREADS) -> None:
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()
        self._left = count
        self._lock = threading.Lock()

    def take(self) -> Bytes:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            with self._lock:
                is_new = self._left > 0
                self._left -= is_new
            return _new_buffer() if is_new else self._free.get()

    def give(self, buffer: Bytes) -> None:
        self._free.put(buffer)


def _new_buffer() -> Bytes:
    """An aligned block. In huge pages where there are any: a direct write is cut into requests by its physical pieces, and with
    pages of 4 KiB that makes it slower by half."""
    memory = mmap.mmap(-1, BUFFER_BYTES + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE, start, EXTENT_BYTES)
    return whole[start : start + BUFFER_BYTES]


BUFFERS = Buffers()


class Meter:
    """How long at least one of several threads was at something. A context manager, entered by each of them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.perf_counter()
            self._inside += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self.seconds += time.perf_counter() - self._since


class Image:
    """One data file being written.

    Args:
        writer: where to; closed by `finish` or `abort`.
        reserved: bytes kept for prefix and header; a multiple of BLOCK.
    """

    def __init__(self, writer: Writer, reserved: int, threads: int = THREADS) -> None:
        self._writer = writer
        self._packer = Packer(reserved, BLOCK)
        self._pool = ThreadPoolExecutor(threads, "holdfast-write")
        self._sources: list[Source] = []
        self._digests: list[bytes] = []
        self._jobs: list[Future[None]] = []
        self._error: BaseException | None = None
        self.writing = Meter()

    @property
    def nbytes(self) -> int:
        """Bytes of the file so far."""
        return self._packer.at

    @property
    def chunk_count(self) -> int:
        return self._packer.slots

    def add(self, source: Source) -> int:
        """Append an entry; returns its offset in the file. Blocks while all buffers are in use.

        Raises:
            What an earlier write raised.
        """
        if self._error is not None:
            raise self._error
        offset = self._packer.at
        self._sources.append(source)
        extents = self._packer.add(source.nbytes)
        self._digests.extend([b""] * (self._packer.slots - len(self._digests)))
        self._submit(extents)
        return offset

    def finish(self, header: Callable[[], bytes]) -> list[bytes]:
        """Write what is left, then the header, and make the content durable; returns the chunks' digests in order.

        Args:
            header: called while the last extents are being written.
        """
        self._submit(self._packer.finish())
        head = header()
        for job in self._jobs:
            job.result()
        self._pool.shutdown()
        with self.writing:
            write_header(self._writer, head)
            self._writer.finish(self._packer.at)
        return self._digests

    def abort(self) -> None:
        """Stop and remove the file. Never raises."""
        self._error = self._error or RuntimeError("aborted")
        self._pool.shutdown(cancel_futures=False)
        self._writer.abort()

    def _submit(self, extents: list[Extent]) -> None:
        for extent in extents:
            self._jobs.append(self._pool.submit(self._run, extent, BUFFERS.take()))

    def _run(self, extent: Extent, buffer: Bytes) -> None:
        try:
            if self._error is None:
                self._write(extent, buffer)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            BUFFERS.give(buffer)

    def _write(self, extent: Extent, buffer: Bytes) -> None:
        edge = extent.start - extent.start % BLOCK
        for piece in extent.lead:
            self._copy(piece, max(piece.offset, edge), buffer, edge)
        for piece in extent.pieces:
            copied = self._copy(piece, piece.offset, buffer, edge)
            self._digests[piece.slot] = digest(copied)
        stop = extent.stop - extent.stop % BLOCK
        if extent.is_last and extent.stop % BLOCK:
            buffer[extent.stop - edge : stop + BLOCK - edge] = 0
            stop += BLOCK
        if stop > edge:
            with self.writing:
                self._writer.write(edge, buffer.data[: stop - edge])

    def _copy(self, piece: Piece, from_offset: int, buffer: Bytes, edge: int) -> Bytes:
        out = buffer[from_offset - edge : piece.offset + piece.nbytes - edge]
        self._sources[piece.source].copy_into(piece.start + from_offset - piece.offset, out)
        return out


def write_header(writer: Writer, header: bytes) -> None:
    """Write prefix and header, whose length is a multiple of BLOCK, at the start of a file."""
    for start in range(0, len(header), EXTENT_BYTES):
        part = header[start : start + EXTENT_BYTES]
        buffer = BUFFERS.take()
        try:
            buffer[: len(part)] = np.frombuffer(part, np.uint8)
            writer.write(start, buffer.data[: len(part)])
        finally:
            BUFFERS.give(buffer)


class ArraySource:
    """Bytes that lie in memory."""

    def __init__(self, data: Any) -> None:
        self._bytes = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
        self.nbytes = self._bytes.nbytes

    def copy_into(self, start: int, out: Bytes) -> None:
        np.copyto(out, self._bytes[start : start + len(out)])


class ByteRange:
    """A run of the bytes of another source."""

    def __init__(self, source: Source, start: int, nbytes: int) -> None:
        self._source, self.start, self.nbytes = source, start, nbytes

    @property
    def whole(self) -> Source:
        """The source that this is a run of."""
        return self._source

    def view(self, start: int, nbytes: int) -> Bytes | None:
        """The bytes themselves, where the other source has them in memory."""
        view = getattr(self._source, "view", None)
        return None if view is None else view(self.start + start, nbytes)

    def copy_into(self, start: int, out: Bytes) -> None:
        self._source.copy_into(self.start + start, out)
