"""Reading a step from the memory of the agent that has saved it: a store that has the step's data files at hand.

What is read so is checked against the digests of the index like everything else, and what is not in memory is read from the
store. Nothing is written, and the memory is let go of at the end.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import HoldfastError
from ..format.codec import RAW
from ..format.index import Index
from ..format.records import StepRef
from ..run.history import History, Step
from ..run.parts import read_part
from ..store.base import Reader, Store
from ..store.wrap import Wrapped
from .arena import Arena, Bytes
from .links import ask_for
from .messages import Recall, Recalled
from .node import first_row, held_box

log = logging.getLogger("holdfast")
_ASK_SECONDS = 10.0
_Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass
class _File:
    """Where the bytes of a data file lie in memory."""

    starts: list[int] = field(default_factory=list)
    """Offsets in the file, ascending."""
    parts: list[Bytes] = field(default_factory=list)


class Remembering(Wrapped):
    """A store whose files are read from memory where they are there.

    Args:
        files: by path.
    """

    def __init__(self, inner: Store, files: dict[str, _File]) -> None:
        super().__init__(inner)
        self._files = files
        self.read_bytes = 0
        """That were read from memory."""

    def open(self, path: str) -> Reader:
        found = self._files.get(path)
        return super().open(path) if found is None else _Reader(self, found, super().open(path))

    def forget(self) -> None:
        """Let go of the memory, whoever still has a file open."""
        for file in self._files.values():
            file.starts.clear()
            file.parts.clear()


class _Reader:
    """A file in memory; what of it is not there, its header, comes from the store."""

    def __init__(self, store: Remembering, file: _File, inner: Reader) -> None:
        self._store, self._file, self._inner = store, file, inner
        self.nbytes = inner.nbytes
        self._given: set[tuple[int, int]] = set()
        """What was read from memory, (offset, bytes): who asks for it again has found it wrong."""

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        wanted = sum(len(target) for target in targets)
        pieces = list(self._pieces(offset, wanted))
        if sum(map(len, pieces)) != wanted or self._was_given(offset, wanted):
            return self._inner.read_into(offset, targets)
        self._given.add((offset, wanted))
        number, at = 0, 0
        for target in targets:
            out, done = np.frombuffer(target, np.uint8), 0
            while done < len(out):
                size = min(len(out) - done, len(pieces[number]) - at)
                np.copyto(out[done : done + size], pieces[number][at : at + size])
                done, at = done + size, at + size
                if at == len(pieces[number]):
                    number, at = number + 1, 0
        self._store.read_bytes += wanted
        return wanted

    def close(self) -> None:
        self._inner.close()

    def _was_given(self, offset: int, wanted: int) -> bool:
        return any(start <= offset and offset + wanted <= start + nbytes for start, nbytes in self._given)

    def _pieces(self, offset: int, wanted: int) -> Iterator[Bytes]:
        """The bytes from `offset` on, as far as they lie in memory without a gap."""
        number = bisect_right(self._file.starts, offset) - 1
        while wanted and 0 <= number < len(self._file.starts):
            skip = offset - self._file.starts[number]
            part = self._file.parts[number][skip : skip + wanted]
            if skip < 0 or not len(part):
                return
            yield part
            offset, wanted, number = offset + len(part), wanted - len(part), number + 1


@contextlib.contextmanager
def remembering(store: Store, node: str) -> Iterator[Store]:
    """The store, with what the agent of this node still has in memory of the run's newest step."""
    arenas: list[Arena] = []
    try:
        found = _recalled(store, node, arenas)
    except (HoldfastError, OSError) as error:  # the store has it all
        log.info("nothing is read from the memory of an agent: %s", error)
        found = None
    try:
        yield store if found is None else found
    finally:
        if found is not None:
            if found.read_bytes:
                log.info("%.2f GB were read from the memory of the agent", found.read_bytes / 1e9)
            found.forget()
        for arena in arenas:
            arena.close()


def _recalled(store: Store, node: str, arenas: list[Arena]) -> Remembering | None:
    answer, fds = ask_for(store.url, node, Recall(), _ASK_SECONDS)
    if not isinstance(answer, Recalled) or answer.step < 0:
        return None
    arenas += [Arena(fd, slots, nbytes) for fd, (slots, nbytes) in zip(fds, answer.shapes, strict=True)]
    step = History(store).by_ref(StepRef(answer.step, answer.attempt))
    if step is None or len(step.commit.parts) != 1:
        return None
    rows: dict[tuple[str, _Box], list[tuple[tuple[int, ...], Bytes]]] = {}
    for table, number, arena in zip(answer.tables, answer.slots, arenas, strict=True):
        slot = arena.slot(number)
        for row in table.rows:
            if row.at >= 0:
                place = (first_row(row), slot[row.at : row.at + row.nbytes])
                rows.setdefault((row.name, held_box(row)), []).append(place)
    places: dict[str, dict[_Box, list[Bytes]]] = {}
    for (name, box), found in rows.items():
        places.setdefault(name, {})[box] = [part for _, part in sorted(found, key=lambda one: one[0])]
    return Remembering(store, _files_of(store, step, places))


def _parts_of(held: dict[_Box, list[Bytes]], box: _Box) -> list[Bytes]:
    """The bytes of a box, which may be some rows of one that is held; empty where none is."""
    if box in held:
        return held[box]
    for (offset, extent), parts in held.items():
        dim = next((d for d, n in enumerate(extent) if n > 1), None)
        if dim is None or any((box[0][d], box[1][d]) != (offset[d], extent[d]) for d in range(len(extent)) if d != dim):
            continue
        first = box[0][dim] - offset[dim]
        if first >= 0 and first + box[1][dim] <= extent[dim]:
            row = sum(map(len, parts)) // extent[dim]
            return _run_of(parts, first * row, box[1][dim] * row)
    return []


def _run_of(parts: Sequence[Bytes], start: int, nbytes: int) -> list[Bytes]:
    """So many bytes from `start` on, of those that follow one another in `parts`."""
    found = []
    for part in parts:
        piece = part[start : start + nbytes] if start < len(part) else part[:0]
        start = max(0, start - len(part))
        nbytes -= len(piece)
        if len(piece):
            found.append(piece)
    return found


def _files_of(store: Store, step: Step, places: dict[str, dict[_Box, list[Bytes]]]) -> dict[str, _File]:
    """Where the step's own files lie in memory, from its index."""
    part = step.commit.parts[0]
    index = Index(read_part(store, part.path, part.digest)[0], step.path)
    found: dict[str, list[tuple[int, Bytes]]] = {}
    for row in range(len(index)):
        tensor = index.tensor(row)
        for entry in index.entries(tensor):
            box = index.box(tensor, entry)
            parts = _parts_of(places.get(tensor.name, {}), (tuple(box[0]), tuple(box[1])))
            if not parts:
                continue
            chunks = index.chunks(entry, row)
            for i, codec in enumerate(chunks.codec.tolist()):
                if index.codecs[codec] == RAW:
                    at = int(chunks.offset[i])
                    pieces = found.setdefault(index.file(int(chunks.file[i])).path, [])
                    for piece in _run_of(parts, int(chunks.raw_start[i]), int(chunks.raw_bytes[i])):
                        pieces.append((at, piece))
                        at += len(piece)
    files = {}
    for path, pieces in found.items():
        pieces.sort(key=lambda one: one[0])
        files[path] = _File([offset for offset, _ in pieces], [data for _, data in pieces])
    return files
