"""Reading chunks: ranges coalesced in file order, several in flight, straight into their targets, each digest checked.

A chunk whose digest differs is read once more before it counts as damaged: memory and buses fail, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt
from ..format.codec import Codec, decode
from ..format.digest import digest
from ..format.index import NO_DIGEST, Chunks, FileRow
from ..store.base import Reader, Store

Bytes = npt.NDArray[np.uint8]
THREADS = 6
GROUP_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk whose stored bytes are not what was captured."""

    file: str
    tensor: str
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    reason: str

    def __str__(self) -> str:
        where = f"bytes {self.offset} to {self.offset + self.nbytes} of {self.file}"
        return f"{self.tensor or 'header'}: {where} {self.reason}"


class OpenFiles:
    """The files of a checkpoint, opened once, under their locks."""

    def __init__(self, store: Store, files: Sequence[FileRow]) -> None:
        self.rows = list(files)
        self._store = store
        self._readers: dict[int, Reader] = {}
        self._lock = threading.Lock()

    def open_all(self) -> None:
        """Open every file now, so that pruning cannot take one away.

        Raises:
            FileNotFoundError: one is gone.
        """
        for row in range(len(self.rows)):
            self.reader(row)

    def reader(self, row: int) -> Reader:
        with self._lock:
            if row not in self._readers:
                self._readers[row] = self._store.open(self.rows[row].path)
            return self._readers[row]

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()


def no_room(i: int, nbytes: int) -> Bytes:
    """Memory for the stored bytes of chunk i, like any other."""
    return np.empty(nbytes, np.uint8)


def read_chunks(
    files: OpenFiles,
    chunks: Chunks,
    codecs: Sequence[Codec],
    target: Callable[[int], Bytes | None],
    deliver: Callable[[int, Bytes], None],
    name: Callable[[int], str],
    progress: Callable[[int], None] | None = None,
    room: Callable[[int, int], Bytes] = no_room,
) -> list[Damage]:
    """Read chunks, check them, and hand over their raw bytes; returns those that are damaged, in file order.

    Args:
        target: for chunk i, the memory its raw bytes belong into, or None.
        deliver: called with (i, raw bytes) for chunks without a target, from several threads. The array is only lent.
        name: for chunk i, its tensor. progress: called with stored bytes as they are done.
        room: for chunk i without a target and its stored bytes: memory to read them into.
    Raises:
        Corrupt: chunks overlap in a file.  Unavailable: the store failed.
    """
    order = np.lexsort((chunks.offset, chunks.file))
    groups = _groups(chunks, order, files.rows)
    damages: list[Damage] = []
    work = _Work(files, chunks, codecs, target, deliver, name, room)

    def run(group: npt.NDArray[np.int64]) -> list[Damage]:
        found = work.read(group)
        if progress is not None:
            progress(int(chunks.stored_bytes[group].sum()))
        return found

    if len(groups) == 1:
        return run(groups[0])
    with ThreadPoolExecutor(THREADS, "holdfast-read") as pool:
        for found in pool.map(run, groups):
            damages += found
    return damages


def _groups(chunks: Chunks, order: npt.NDArray[np.int64], rows: Sequence[FileRow]) -> list[npt.NDArray[np.int64]]:
    """Runs of chunks that lie side by side, of about GROUP_BYTES each."""
    if not len(order):
        return []
    file, offset = chunks.file[order].astype(np.int64), chunks.offset[order]
    stored = chunks.stored_bytes[order].astype(np.int64)
    same = file[1:] == file[:-1]
    gap = offset[1:] - (offset[:-1] + stored[:-1])
    is_again = same & (offset[1:] == offset[:-1]) & (stored[1:] == stored[:-1])  # one chunk for two memories
    if (bad := np.flatnonzero(same & (gap < 0) & ~is_again)).size:
        path, at = rows[int(file[bad[0]])].path, int(offset[bad[0] + 1])
        raise Corrupt(f"two chunks overlap at byte {at} of {path}", file=path, offset=at)
    running = np.cumsum(stored)
    is_cut = ~same | (gap != 0) | (running[1:] // GROUP_BYTES != running[:-1] // GROUP_BYTES)
    return np.split(order, np.flatnonzero(is_cut) + 1)


@dataclass(slots=True)
class _Work:
    files: OpenFiles
    chunks: Chunks
    codecs: Sequence[Codec]
    target: Callable[[int], Bytes | None]
    deliver: Callable[[int, Bytes], None]
    name: Callable[[int], str]
    room: Callable[[int, int], Bytes]

    def read(self, group: npt.NDArray[np.int64]) -> list[Damage]:
        chunks = self.chunks
        rows = group.tolist()
        stored = chunks.stored_bytes[group].tolist()
        raw = chunks.raw_bytes[group].tolist()
        codec = chunks.codec[group].tolist()
        wanted = chunks.digest[group]
        has_digest = (chunks.algorithm[group] != NO_DIGEST).tolist()
        first = rows[0]
        file, offset = int(chunks.file[first]), int(chunks.offset[first])
        reader = self.files.reader(file)
        room = reader.nbytes - offset
        if sum(stored) > room and any(size > reader.nbytes for size in stored):
            lost = f"are missing: the file has {reader.nbytes} bytes"
            return [
                Damage(self.files.rows[file].path, self.name(row), offset, size, lost)
                for row, size in zip(rows, stored, strict=True)
            ]
        is_raw = [self.codecs[c].name == "raw" for c in codec]
        targets = [self.target(row) if whole else None for row, whole in zip(rows, is_raw, strict=True)]
        rooms = [self.room if whole else no_room for whole in is_raw]
        buffers = [r(row, n) if t is None else t for row, r, t, n in zip(rows, rooms, targets, stored, strict=True)]
        got = reader.read_into(offset, [b.data for b in buffers])
        damages = []
        for i, row in enumerate(rows):
            reason = None
            if got < stored[i]:
                reason = f"are missing: the file has {reader.nbytes} bytes"
            else:
                plain, reason = self._check(buffers[i], codec[i], raw[i], wanted[i].tobytes() if has_digest[i] else None)
                if reason is not None:
                    reader.read_into(offset, [buffers[i].data])
                    plain, reason = self._check(buffers[i], codec[i], raw[i], wanted[i].tobytes())
                if reason is None and targets[i] is None:
                    self.deliver(row, plain)
            if reason is not None:
                damages.append(Damage(self.files.rows[file].path, self.name(row), offset, stored[i], reason))
            got -= stored[i]
            offset += stored[i]
        return damages

    def _check(self, stored: Bytes, codec: int, raw_bytes: int, wanted: bytes | None) -> tuple[Bytes, str | None]:
        plain = stored
        if self.codecs[codec].name != "raw":
            try:
                plain = np.frombuffer(decode(self.codecs[codec], stored, raw_bytes), np.uint8)
            except Corrupt as error:
                return stored, f"do not decode ({error})"
        if wanted is not None and digest(plain) != wanted:
            return plain, "differ from their digest"
        return plain, None


def first_damage(damages: Sequence[Damage], run: str, step: int) -> Corrupt:
    """The error for damaged chunks: the first of them, how many there are, and what to do."""
    one = damages[0]
    more = f" and {len(damages) - 1} more chunks" if len(damages) > 1 else ""
    return Corrupt(
        f"{one}{more}. Run `holdfast verify {run}@{step}` for all damage",
        file=one.file,
        tensor=one.tensor,
        offset=one.offset,
    )


def missing_file(path: str, run: str, step: int) -> Corrupt:
    return Corrupt(
        f"{path}, which step {step} of {run} refers to, is gone; other steps may be intact: `holdfast verify {run}`",
        file=path,
    )
