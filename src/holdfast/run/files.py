"""Writing one writer's data files: what is unchanged is referred to, the rest goes into images, in file order.

What is coded goes into files of its own, so that raw entries stay aligned, and are written as if there were no codecs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..format import datafile
from ..format.codec import RAW, Codec
from ..format.digest import DIGEST_BYTES, hex_digest
from ..format.dtypes import dtype
from ..format.index import Chunks, FileRow
from ..format.records import FileRef
from ..plan.image import chunk_grid, file_order
from ..store.base import Store, Writer
from .base import Base, probe
from .coded import CodedChunk, CodedImage
from .coder import Coder, Work
from .contents import TensorItem
from .image import Image

Ints = npt.NDArray[np.int64]
ItemKey = tuple[str, tuple[int, ...]]
Note = Callable[[bytes, int], None]
"""Takes a file's header, and its length in bytes."""


@dataclass(slots=True)
class Placement:
    """Where the chunks of one item lie."""

    file: Ints
    """Rows of `Placed.files`."""
    offset: Ints
    raw_start: Ints
    raw_bytes: Ints
    stored_bytes: Ints
    digest: npt.NDArray[np.uint8]
    """(n, 16)."""
    codec: Ints
    """Rows of `Placed.codecs`."""


@dataclass
class Placed:
    """What writing the data files of one writer gave."""

    files: list[FileRow] = field(default_factory=list)
    """Our own and those referred to."""
    owned: list[FileRef] = field(default_factory=list)
    places: dict[ItemKey, Placement] = field(default_factory=dict)
    """By `TensorItem.key`; what has no source has none."""
    probes: dict[ItemKey, bytes] = field(default_factory=dict)
    """By `TensorItem.key`; see `base.probe`."""
    codecs: list[Codec] = field(default_factory=lambda: [RAW])

    def codec_row(self, codec: Codec) -> int:
        """The row of a codec, which is added if it is new."""
        if codec not in self.codecs:
            self.codecs.append(codec)
        return self.codecs.index(codec)


Members = list[tuple[TensorItem, Placement]]


class FilesWriter:
    """Writes data files `n0000-00.safetensors`, ... of one step.

    Args:
        folder: the step's directory. writer: `n0000`.
        base: what may be referred to, or None to write everything.
        coder: what chooses codecs, or None to write everything raw. roles: role to kind, which it asks for.
        is_for_ever: whether the step will be kept for ever.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        writer: str,
        step: int,
        attempt: int,
        base: Base | None,
        recycle: bool,
        metadata: dict[str, str],
        coder: Coder | None = None,
        roles: Mapping[str, str] | None = None,
        is_for_ever: bool = False,
    ) -> None:
        self._store, self._folder, self._writer = store, folder, writer
        self._step, self._attempt = step, attempt
        self._base, self._recycle, self._metadata = base, recycle, metadata
        self._coder, self._roles, self._is_for_ever = coder, roles or {}, is_for_ever
        self._placed = Placed()
        self._base_rows: dict[int, int] = {}

    def write(self, items: list[TensorItem]) -> Placed:
        """All items, durably except for the files' names. On any error the files of this call are gone again."""
        try:
            held = [item for item in items if item.source is not None]
            order = file_order([dtype(item.dtype).itemsize for item in held])
            held = [held[i] for i in order]
            codecs = self._codecs(held)
            for is_coded in (False, True):
                chosen = {item.key: codec for item, codec in zip(held, codecs, strict=True) if (codec != RAW) == is_coded}
                fixed = self._write_files([item for item in held if item.key in chosen], chosen, is_first=True)
                self._write_files(fixed, chosen, is_first=False)
            if self._coder is not None:
                self._coder.look(held)
        except BaseException:
            for file in self._placed.owned:
                with contextlib.suppress(Exception):
                    self._store.delete(file.path)
            raise
        return self._placed

    def _codecs(self, items: list[TensorItem]) -> list[Codec]:
        if self._coder is None:
            return [RAW] * len(items)
        chosen = self._coder.choose(items, self._roles, self._is_for_ever)
        return [codec if item.source and item.source.nbytes else RAW for item, codec in zip(items, chosen, strict=True)]

    def _write_files(self, items: list[TensorItem], codecs: Mapping[ItemKey, Codec], is_first: bool) -> list[TensorItem]:
        """Write what changed; returns what did not but lies in a file that is mostly dead."""
        deferred: list[TensorItem] = []
        for group, reserved in _groups(items, self._metadata):
            file: _RawFile | _CodedFile | None = None
            start = 0.0
            try:
                for item in group:
                    chunks = self._base.unchanged(item) if self._base and is_first else None
                    if chunks is None:
                        if file is None:
                            start = time.perf_counter()
                            file = self._open(group, reserved, is_coded=codecs[item.key] != RAW)
                        if item.source is not None:
                            self._placed.probes[item.key] = probe(item.source)
                        file.add(item, codecs[item.key])
                    elif self._base is not None and self._base.may_refer(chunks):
                        self._refer_to(item, chunks)
                    else:
                        deferred.append(item)
                if file is not None:
                    work = self._close(file, start)
                    if self._coder is not None:
                        self._coder.learn(work)
            except BaseException:
                if file is not None:
                    file.abort()
                raise
        return deferred

    def _refer_to(self, item: TensorItem, chunks: Chunks) -> None:
        """Leave an item where it lies."""
        assert self._base is not None
        files = np.array([self._refer(f) for f in chunks.file.tolist()], np.int64)
        known = self._base.index.codecs
        codec = np.array([self._placed.codec_row(known[c]) for c in chunks.codec.tolist()], np.int64)
        self._placed.places[item.key] = Placement(
            files, chunks.offset, chunks.raw_start, chunks.raw_bytes, chunks.stored_bytes, chunks.digest, codec
        )

    def _refer(self, base_file: int) -> int:
        assert self._base is not None
        if base_file not in self._base_rows:
            self._base_rows[base_file] = len(self._placed.files)
            self._placed.files.append(self._base.index.file(base_file))
        return self._base_rows[base_file]

    def _open(self, group: list[TensorItem], reserved: int, is_coded: bool) -> _RawFile | _CodedFile:
        bound = reserved + sum(item.source.nbytes for item in group if item.source) + datafile.BLOCK
        path = f"{self._folder}/{self._writer}-{len(self._placed.owned):02d}.safetensors"
        writer = self._store.write(path, bound, self._recycle)
        opened = _CodedFile if is_coded else _RawFile
        return opened(path, reserved, writer, self._metadata)

    def _close(self, file: _RawFile | _CodedFile, start: float) -> Work:
        """Finish a file that was begun at `start`, and note where everything lies in it."""
        row = len(self._placed.files)

        def note(header: bytes, nbytes: int) -> None:
            digest = hex_digest(header)
            self._placed.owned.append(FileRef(path=file.path, bytes=nbytes, header_bytes=len(header), digest=digest))
            self._placed.files.append(
                FileRow(file.path, self._step, self._attempt, nbytes, "", len(header), bytes.fromhex(digest))
            )

        members = file.finish(row, note, self._placed)
        stored = sum(int(placement.stored_bytes.sum()) for _, placement in members)
        raw = sum(int(placement.raw_bytes.sum()) for _, placement in members)
        self._placed.places |= {item.key: placement for item, placement in members}
        is_coded = isinstance(file, _CodedFile)
        return Work(raw, stored, time.perf_counter() - start, file.writing_seconds, file.coding_seconds, is_coded)


class _RawFile:
    """A file of raw entries. Offsets are known at once, so that the header is built while the last blocks are written."""

    def __init__(self, path: str, reserved: int, writer: Writer, metadata: dict[str, str]) -> None:
        self.path = path
        self._image = Image(writer, reserved)
        self._header = _Header(reserved, metadata)
        self._members: list[tuple[TensorItem, int, int, int]] = []
        """(item, offset in the file, first chunk slot, chunks)."""
        self.coding_seconds = 0.0

    @property
    def writing_seconds(self) -> float:
        return self._image.writing.seconds

    def add(self, item: TensorItem, codec: Codec) -> None:
        assert item.source is not None
        first = self._image.chunk_count
        offset = self._image.add(item.source)
        self._header.add(item, *_stored_as(item), offset, item.source.nbytes)
        self._members.append((item, offset, first, self._image.chunk_count - first))

    def finish(self, row: int, note: Note, placed: Placed) -> Members:
        def describe() -> bytes:
            header = self._header.build()
            note(header, self._image.nbytes)
            return header

        digests = self._image.finish(describe)
        table = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
        return [(item, self._placement(item, row, offset, table[first : first + count]))
                for item, offset, first, count in self._members]  # fmt: skip

    def _placement(self, item: TensorItem, row: int, offset: int, digests: npt.NDArray[np.uint8]) -> Placement:
        grid = np.array(chunk_grid(item.source.nbytes if item.source else 0), np.int64).reshape(-1, 2)
        start, nbytes = grid[:, 0], grid[:, 1]
        return Placement(np.full(len(grid), row), offset + start, start, nbytes, nbytes, digests, np.zeros(len(grid), np.int64))

    def abort(self) -> None:
        self._image.abort()


class _CodedFile:
    """A file of coded entries. Offsets are known when all is coded."""

    def __init__(self, path: str, reserved: int, writer: Writer, metadata: dict[str, str]) -> None:
        self.path = path
        self._image = CodedImage(writer, reserved)
        self._header = _Header(reserved, metadata)
        self._members: list[tuple[TensorItem, int]] = []
        """(item, chunks)."""

    @property
    def writing_seconds(self) -> float:
        return self._image.writing.seconds

    @property
    def coding_seconds(self) -> float:
        return self._image.coding.seconds

    def add(self, item: TensorItem, codec: Codec) -> None:
        assert item.source is not None
        self._members.append((item, self._image.add(item.source, codec)))

    def finish(self, row: int, note: Note, placed: Placed) -> Members:
        self._image.settle()
        members, first = [], 0
        for item, count in self._members:
            chunks = self._image.chunks[first : first + count]
            first += count
            members.append((item, _placement_of(chunks, row, placed)))
            stored = sum(chunk.stored_bytes for chunk in chunks)
            self._header.add(item, "U8", (stored,), chunks[0].offset, stored)
        header = self._header.build()
        note(header, self._image.nbytes)
        self._image.finish(header)
        return members

    def abort(self) -> None:
        self._image.abort()


def _placement_of(chunks: Sequence[CodedChunk], row: int, placed: Placed) -> Placement:
    def column(name: str) -> Ints:
        return np.array([getattr(chunk, name) for chunk in chunks], np.int64)

    digests = np.frombuffer(b"".join(chunk.digest for chunk in chunks), np.uint8).reshape(-1, DIGEST_BYTES)
    codec = np.array([placed.codec_row(chunk.codec) for chunk in chunks], np.int64)
    return Placement(
        np.full(len(chunks), row),
        column("offset"),
        column("raw_start"),
        column("raw_bytes"),
        column("stored_bytes"),
        digests,
        codec,
    )


class _Header:
    """The header of a file whose entries become known one after the other."""

    def __init__(self, reserved: int, metadata: dict[str, str]) -> None:
        self._reserved, self._metadata = reserved, metadata
        self._entries: list[datafile.Entry] = []

    def add(self, item: TensorItem, tag: str, shape: tuple[int, ...], offset: int, nbytes: int) -> None:
        start = offset - self._reserved
        self._entries.append(datafile.Entry(_key(item), tag, shape, start, start + nbytes))

    def build(self) -> bytes:
        return datafile.build_header(self._entries, self._metadata, self._reserved)


def _key(item: TensorItem) -> str:
    offset, shape = item.box or ((0,) * len(item.shape), item.shape)
    return datafile.entry_key(item.name, offset, shape, item.shape)


def _stored_as(item: TensorItem) -> tuple[str, tuple[int, ...]]:
    kind = dtype(item.dtype)
    if kind.tag is not None:
        return kind.tag, item.box_shape
    return "U8", (item.source.nbytes if item.source else 0,)


def _header_bound(items: Iterable[TensorItem], metadata: dict[str, str]) -> int:
    items = list(items)
    return datafile.header_bound([_key(i) for i in items], [max(1, len(i.shape)) for i in items], metadata)


def _groups(items: list[TensorItem], metadata: dict[str, str]) -> Iterator[tuple[list[TensorItem], int]]:
    """Items as they go into files, each with the bytes to reserve for its header: at most 65,536 entries and 16 MiB of header."""
    low = 0
    while low < len(items):
        high = min(len(items), low + datafile.MAX_ENTRIES)
        while (reserved := _header_bound(items[low:high], metadata)) > datafile.MAX_HEADER_BYTES and high - low > 1:
            high = low + (high - low) // 2
        yield items[low:high], reserved
        low = high
