"""Writing one writer's data files: what is unchanged is referred to, the rest goes into images, in file order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..format import datafile
from ..format.digest import DIGEST_BYTES, hex_digest
from ..format.dtypes import dtype
from ..format.index import FileRow
from ..format.records import FileRef
from ..plan.image import chunk_grid, file_order
from ..store.base import Store
from .base import Base, probe
from .contents import TensorItem
from .image import Image

Ints = npt.NDArray[np.int64]
ItemKey = tuple[str, tuple[int, ...]]


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


class FilesWriter:
    """Writes data files `n0000-00.safetensors`, ... of one step.

    Args:
        folder: the step's directory. writer: `n0000`.
        base: what may be referred to, or None to write everything.
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
    ) -> None:
        self._store, self._folder, self._writer = store, folder, writer
        self._step, self._attempt = step, attempt
        self._base, self._recycle, self._metadata = base, recycle, metadata
        self._placed = Placed()
        self._base_rows: dict[int, int] = {}

    def write(self, items: list[TensorItem]) -> Placed:
        """All items, durably except for the files' names. On any error the files of this call are gone again."""
        try:
            held = [item for item in items if item.source is not None]
            order = file_order([dtype(item.dtype).itemsize for item in held])
            fixed = self._write_files([held[i] for i in order], is_first=True)
            self._write_files(fixed, is_first=False)
        except BaseException:
            for file in self._placed.owned:
                with contextlib.suppress(Exception):
                    self._store.delete(file.path)
            raise
        return self._placed

    def _write_files(self, items: list[TensorItem], is_first: bool) -> list[TensorItem]:
        """Write what changed; returns what did not but lies in a file that is mostly dead."""
        deferred: list[TensorItem] = []
        for group, reserved in _groups(items, self._metadata):
            image: _OpenFile | None = None
            try:
                for item in group:
                    chunks = self._base.unchanged(item) if self._base and is_first else None
                    if chunks is None:
                        image = image or self._open(group, reserved)
                        if item.source is not None:
                            self._placed.probes[item.key] = probe(item.source)
                        image.add(item)
                    elif self._base is not None and self._base.may_refer(chunks):
                        files = np.array([self._refer(f) for f in chunks.file.tolist()], np.int64)
                        self._placed.places[item.key] = Placement(
                            files, chunks.offset, chunks.raw_start, chunks.raw_bytes, chunks.stored_bytes, chunks.digest
                        )
                    else:
                        deferred.append(item)
                if image is not None:
                    self._close(image)
            except BaseException:
                if image is not None:
                    image.image.abort()
                raise
        return deferred

    def _refer(self, base_file: int) -> int:
        assert self._base is not None
        if base_file not in self._base_rows:
            self._base_rows[base_file] = len(self._placed.files)
            self._placed.files.append(self._base.index.file(base_file))
        return self._base_rows[base_file]

    def _open(self, group: list[TensorItem], reserved: int) -> _OpenFile:
        bound = reserved + sum(item.source.nbytes for item in group if item.source) + datafile.BLOCK
        path = f"{self._folder}/{self._writer}-{len(self._placed.owned):02d}.safetensors"
        writer = self._store.write(path, bound, self._recycle)
        return _OpenFile(path, reserved, Image(writer, reserved), self._metadata)

    def _close(self, file: _OpenFile) -> None:
        table = np.empty((file.image.chunk_count, DIGEST_BYTES), np.uint8)

        def describe() -> bytes:
            header = file.header()
            self._place(file, header, table)
            return header

        digests = file.image.finish(describe)
        table[:] = np.frombuffer(b"".join(digests), np.uint8).reshape(table.shape)

    def _place(self, file: _OpenFile, header: bytes, table: npt.NDArray[np.uint8]) -> None:
        """Note where everything lies in a file; the digests of its chunks will stand in `table`."""
        row = len(self._placed.files)
        digest = hex_digest(header)
        self._placed.owned.append(FileRef(path=file.path, bytes=file.image.nbytes, header_bytes=len(header), digest=digest))
        self._placed.files.append(
            FileRow(file.path, self._step, self._attempt, file.image.nbytes, "", len(header), bytes.fromhex(digest))
        )
        for item, offset, first, count in file.members:
            grid = np.array(chunk_grid(item.source.nbytes if item.source else 0), np.int64).reshape(-1, 2)
            self._placed.places[item.key] = Placement(
                np.full(count, row),
                offset + grid[:, 0],
                grid[:, 0],
                grid[:, 1],
                grid[:, 1],
                table[first : first + count],
            )


@dataclass
class _OpenFile:
    path: str
    reserved: int
    image: Image
    metadata: dict[str, str]
    entries: list[datafile.Entry] = field(default_factory=list)
    members: list[tuple[TensorItem, int, int, int]] = field(default_factory=list)
    """(item, offset in the file, first chunk slot, chunks)."""

    def add(self, item: TensorItem) -> None:
        assert item.source is not None
        first = self.image.chunk_count
        offset = self.image.add(item.source)
        start = offset - self.reserved
        tag, shape = _stored_as(item)
        self.entries.append(datafile.Entry(_key(item), tag, shape, start, start + item.source.nbytes))
        self.members.append((item, offset, first, self.image.chunk_count - first))

    def header(self) -> bytes:
        return datafile.build_header(self.entries, self.metadata, self.reserved)


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
