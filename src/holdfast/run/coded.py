"""Writing a data file of coded chunks: several threads code at once, what they made is packed in order and written in blocks.

Where a chunk lies is known when all before it are coded; the header is built, and written, last. The digest is taken of the
copy that is coded. What a codec does not make smaller stays as it is.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..format.codec import RAW, Codec, decode, encode
from ..format.datafile import BLOCK
from ..format.digest import digest
from ..plan.image import CHUNK_BYTES, EXTENT_BYTES, chunk_grid
from ..store.base import Writer
from .image import BUFFERS, Buffers, Bytes, Meter, Source, write_header

WRITERS = 4
CODERS = max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))
_chunk_buffers = Buffers(CODERS + 2)
"""Each holds the raw bytes of a chunk, and behind them room for what they are coded to."""


@dataclass(frozen=True, slots=True)
class CodedChunk:
    """A chunk as it lies in the file."""

    offset: int
    """Bytes from the start of the file."""
    raw_start: int
    raw_bytes: int
    stored_bytes: int
    codec: Codec
    """What it was coded with: the one asked for, or `raw`."""
    digest: bytes


@dataclass(slots=True)
class _Ready:
    """A coded chunk that waits for those before it."""

    stored: Bytes
    buffer: Bytes
    raw_start: int
    raw_bytes: int
    codec: Codec
    digest: bytes


class CodedImage:
    """One data file being written. Memory: CODERS + 2 chunks, raw and coded, and the blocks on their way to the store.

    Args:
        writer: where to; closed by `finish` or `abort`.
        reserved: bytes kept for prefix and header; a multiple of BLOCK.
    """

    def __init__(self, writer: Writer, reserved: int) -> None:
        self._writer = writer
        self.nbytes = reserved
        """Of the file so far."""
        self.chunks: list[CodedChunk] = []
        """In the order in which their entries were added; complete after `settle`."""
        self.writing, self.coding = Meter(), Meter()
        self._coders = ThreadPoolExecutor(CODERS, "holdfast-code")
        self._writers = ThreadPoolExecutor(WRITERS, "holdfast-write")
        self._jobs: list[Future[None]] = []
        self._writes: list[Future[None]] = []
        self._ready: dict[int, _Ready] = {}
        self._packing = threading.Lock()
        self._block: Bytes | None = None
        self._filled = 0
        self._error: BaseException | None = None

    def add(self, source: Source, codec: Codec) -> int:
        """Append an entry; returns how many chunks it has. Blocks while all buffers are in use.

        Raises:
            What an earlier chunk raised.
        """
        grid = chunk_grid(source.nbytes)
        for start, nbytes in grid:
            buffer = _chunk_buffers.take()
            if self._error is not None:
                _chunk_buffers.give(buffer)
                raise self._error
            self._jobs.append(self._coders.submit(self._run, len(self._jobs), source, start, nbytes, codec, buffer))
        return len(grid)

    def settle(self) -> None:
        """Code and pack all that was added, so that `chunks` and `nbytes` are complete.

        Raises:
            What a source, a codec or the store raised.
        """
        for job in self._jobs:
            job.result()
        self._coders.shutdown()
        if self._error is not None:
            raise self._error
        with self._packing:
            self._flush()

    def finish(self, header: bytes) -> None:
        """Write what is left, then the header, and make the content durable. After `settle`."""
        for write in self._writes:
            write.result()
        self._writers.shutdown()
        with self.writing:
            write_header(self._writer, header)
            self._writer.finish(self.nbytes)

    def abort(self) -> None:
        """Stop and remove the file. Never raises."""
        self._error = self._error or RuntimeError("aborted")
        self._coders.shutdown()
        self._writers.shutdown()
        for ready in self._ready.values():
            _chunk_buffers.give(ready.buffer)
        self._ready.clear()
        if self._block is not None:
            BUFFERS.give(self._block)
            self._block = None
        self._writer.abort()

    def _run(self, number: int, source: Source, start: int, nbytes: int, codec: Codec, buffer: Bytes) -> None:
        try:
            if self._error is not None:
                raise self._error
            source.copy_into(start, buffer[:nbytes])
            with self.coding:
                ready = _code(start, nbytes, codec, buffer)
        except BaseException as error:
            self._error = self._error or error
            _chunk_buffers.give(buffer)
            raise
        with self._packing:
            self._ready[number] = ready
            self._pack_what_follows()

    def _pack_what_follows(self) -> None:
        while self._error is None and (ready := self._ready.pop(len(self.chunks), None)) is not None:
            try:
                self.chunks.append(
                    CodedChunk(self.nbytes, ready.raw_start, ready.raw_bytes, len(ready.stored), ready.codec, ready.digest)
                )
                self._pack(ready.stored)
            finally:
                _chunk_buffers.give(ready.buffer)

    def _pack(self, stored: Bytes) -> None:
        at = 0
        while at < len(stored):
            if self._block is None:
                self._block = BUFFERS.take()
            size = min(len(stored) - at, EXTENT_BYTES - self._filled)
            self._block[self._filled : self._filled + size] = stored[at : at + size]
            at, self._filled, self.nbytes = at + size, self._filled + size, self.nbytes + size
            if self._filled == EXTENT_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Hand the block to a writer, the last one padded."""
        if self._block is None:
            return
        block, size = self._block, -(-self._filled // BLOCK) * BLOCK
        block[self._filled : size] = 0
        offset = self.nbytes - self._filled
        self._block, self._filled = None, 0
        self._writes.append(self._writers.submit(self._write, offset, block, size))

    def _write(self, offset: int, block: Bytes, size: int) -> None:
        try:
            if self._error is None:
                with self.writing:
                    self._writer.write(offset, block.data[:size])
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            BUFFERS.give(block)


def _code(start: int, nbytes: int, codec: Codec, buffer: Bytes) -> _Ready:
    """Code the raw bytes at the beginning of a buffer into the rest of it."""
    raw = buffer[:nbytes]
    stored = encode(codec, raw, buffer[CHUNK_BYTES:])
    if stored is None or len(stored) >= nbytes:
        return _Ready(raw, buffer, start, nbytes, RAW, digest(raw))
    seen = decode(codec, stored, nbytes) if codec.is_lossy else raw
    return _Ready(np.frombuffer(stored, np.uint8), buffer, start, nbytes, codec, digest(seen))
