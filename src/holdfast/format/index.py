"""The index: which tensors a checkpoint holds, and where each chunk of them lies. Columns only; see docs/format.md.

Four tables (tensor, entry, chunk, file) and three small ones (dtype, role, codec). Tensors are sorted by name; a tensor's
entries, and an entry's chunks, lie side by side. A column that is missing has its default for every row.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import Corrupt, Unsupported
from . import codec as codecs
from .columns import Array, Columns, Strings, unpack
from .digest import ALGORITHM, DIGEST_BYTES, Running
from .dtypes import Dtype, dtype
from .names import dotted, path_of, safe_path
from .records import FEATURES, FORMAT

MAX_CHUNK_BYTES = 64 << 20
MAX_NDIM = 64
_MAX_BYTES = 1 << 62
_BLOCK_ROWS = 1 << 20
NO_DIGEST, XXH3_128 = 0, 1
FRESH = ("chunk.digest", "chunk.algorithm", "file.")
"""Columns that every step writes anew; all others are layout, and may be those of an earlier step's index."""

_DEFAULTS: dict[str, tuple[str, int]] = {
    "tensor.owner": ("<i8", -1),
    "tensor.alias": ("<i8", -1),
    "tensor.replica": ("<i8", -1),
    "tensor.order": ("<i8", 0),
    "chunk.codec": ("<u2", 0),
    "chunk.base": ("<i8", -1),
    "chunk.algorithm": ("|u1", XXH3_128),
}


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One logical tensor."""

    row: int
    name: str
    path: tuple[Any, ...]
    """Where it stands in the tree of the state: role, then keys; see `names.path_of`."""
    dtype: Dtype
    shape: tuple[int, ...]
    role: str
    owner: int
    """Row of the parameter that this optimizer state belongs to, or -1."""
    alias: int
    """Row of the tensor whose memory it shares, or -1. An alias has no entries of its own."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file that chunks lie in."""

    path: str
    """From the run's root; for foreign files any path or URI."""
    step: int
    attempt: int
    """The step that owns the file; -1, -1 for foreign files."""
    nbytes: int
    stamp: str
    """etag or modification time of a foreign file, else empty."""
    header_bytes: int
    digest: bytes
    """xxh3-128 of the first `header_bytes`."""

    @property
    def is_foreign(self) -> bool:
        return self.attempt < 0


@dataclass(slots=True)
class Chunks:
    """Chunks as columns, all of the same length."""

    tensor: Array
    entry: Array
    raw_start: Array
    """Bytes from the start of the entry's raw row-major bytes."""
    raw_bytes: Array
    file: Array
    offset: Array
    """Bytes from the start of the file."""
    stored_bytes: Array
    codec: Array
    base: Array
    digest: Array
    """uint8 of shape (n, 16)."""
    algorithm: Array

    def __len__(self) -> int:
        return len(self.entry)

    def blocks(self, overlap: int = 0) -> Iterator[Chunks]:
        """Views of a million chunks at a time, each with the last `overlap` of the one before, so that temporaries stay small."""
        for low in range(0, len(self), _BLOCK_ROWS):
            yield self.take(slice(max(0, low - overlap), low + _BLOCK_ROWS))

    def take(self, rows: Any) -> Chunks:
        return Chunks(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass
class Index:
    """An index in memory or mapped. `columns` as in docs/format.md."""

    columns: Columns
    path: str = "index"
    names: Strings = field(init=False)
    _tensors: list[TensorRow] | None = field(init=False, default=None)
    _chunks: Chunks | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        try:
            self.names = Strings.read(self.columns, "tensor.name")
            self._paths = Strings.read(self.columns, "tensor.path")
            self.dtypes = [dtype(n) for n in Strings.read(self.columns, "dtype.name")]
            self._roles = list(Strings.read(self.columns, "role.name"))
            self._files = Strings.read(self.columns, "file.path")
            self._stamps = Strings.read(self.columns, "file.stamp")
            self.codecs = [_codec(text) for text in Strings.read(self.columns, "codec.json")]
            for name, rows in (("tensor.dtype", len(self.names)), ("tensor.role", len(self.names)),
                               ("tensor.shape.offsets", len(self.names) + 1), ("tensor.entries", len(self.names) + 1),
                               ("entry.chunks", self.entry_count + 1), ("chunk.digest", self.chunk_count)):  # fmt: skip
                if len(self.columns[name]) != rows:
                    raise Corrupt(f"column {name} of {self.path} has {len(self.columns[name])} rows where {rows} belong")
            if self.columns["chunk.digest"].shape[1:] != (DIGEST_BYTES,):
                raise Corrupt(f"column chunk.digest of {self.path} is not {DIGEST_BYTES} bytes wide")
        except KeyError as error:
            raise Corrupt(f"{self.path} lacks the column {error}", file=self.path) from None
        except (ValueError, TypeError, IndexError) as error:
            raise Corrupt(f"{self.path} is not an index: {error}", file=self.path) from error

    def __len__(self) -> int:
        return len(self.names)

    @property
    def entry_count(self) -> int:
        return len(self.columns["entry.chunks"]) - 1

    @property
    def chunk_count(self) -> int:
        return len(self.columns["chunk.raw_bytes"])

    @property
    def file_count(self) -> int:
        return len(self._files)

    def column(self, name: str, start: int, stop: int) -> Array:
        """Rows `start` to `stop` of a column, or its default where it is absent."""
        found = self.columns.get(name)
        if found is None:
            kind, value = _DEFAULTS[name]
            return np.broadcast_to(np.array(value, kind), (stop - start,))
        return found[start:stop]

    def find(self, name: str) -> int:
        """The row of the tensor `name`, or -1."""
        return self.names.find(name)

    def tensor(self, row: int) -> TensorRow:
        """The tensor in a row; reads no other rows."""
        if self._tensors is not None:
            return self._tensors[row]
        try:
            start, stop = self._range("tensor.shape.offsets", row, len(self.columns["tensor.shape"]))
            path = path_of(json.loads(self._paths[row]))
            tensor = TensorRow(
                row,
                self.names[row],
                path,
                self.dtypes[int(self.columns["tensor.dtype"][row])],
                tuple(int(d) for d in self.columns["tensor.shape"][start:stop]),
                self._roles[int(self.columns["tensor.role"][row])],
                int(self.column("tensor.owner", row, row + 1)[0]),
                int(self.column("tensor.alias", row, row + 1)[0]),
            )
            self._check_tensor(tensor)
            return tensor
        except (IndexError, ValueError, TypeError, RecursionError) as error:
            raise Corrupt(f"row {row} of the tensor table of {self.path} is damaged: {error}", file=self.path) from error

    def tensors(self) -> list[TensorRow]:
        """Every tensor, in order of their names; made once and kept."""
        if self._tensors is None:
            rows = len(self)
            for name in ("tensor.shape.offsets", "tensor.entries"):
                self.check_offsets(name, len(self.columns["tensor.shape"]) if "shape" in name else self.entry_count)
            try:
                bounds, dims = self.columns["tensor.shape.offsets"].tolist(), self.columns["tensor.shape"].tolist()
                dtypes = [self.dtypes[d] for d in self.columns["tensor.dtype"].tolist()]
                roles = [self._roles[r] for r in self.columns["tensor.role"].tolist()]
                paths = [path_of(json.loads(p)) for p in self._paths.all()]
                owner, alias = (
                    self.column("tensor.owner", 0, rows).tolist(),
                    self.column("tensor.alias", 0, rows).tolist(),
                )
                self._tensors = [
                    TensorRow(i, name, path, kind, tuple(dims[a:b]), role, own, tied)
                    for i, (name, path, kind, a, b, role, own, tied) in enumerate(
                        zip(self.names.all(), paths, dtypes, bounds[:-1], bounds[1:], roles, owner, alias, strict=True)
                    )
                ]
            except (IndexError, ValueError, TypeError, RecursionError) as error:
                raise Corrupt(f"the tensor table of {self.path} is damaged: {error}", file=self.path) from error
            names = [tensor.name.encode() for tensor in self._tensors]
            if any(a >= b for a, b in pairwise(names)):
                raise Corrupt(f"names of tensors in {self.path} are not sorted, or stand twice", file=self.path)
            for tensor in self._tensors:
                self._check_tensor(tensor)
        return self._tensors

    def _check_tensor(self, tensor: TensorRow) -> None:
        """Refuse a tensor that cannot be: checked when it is asked for, so that opening a large index stays cheap."""
        is_possible = min(tensor.shape, default=0) >= 0 and len(tensor.shape) <= MAX_NDIM
        is_possible &= -1 <= tensor.alias < len(self) and -1 <= tensor.owner < len(self)
        if not is_possible or math.prod(max(d, 1) for d in tensor.shape) * tensor.dtype.itemsize > _MAX_BYTES:
            raise Corrupt(
                f"{tensor.name} has an impossible shape, alias or owner in {self.path}", file=self.path, tensor=tensor.name
            )
        is_plain = all(type(part) is str for part in tensor.path) and ".".join(tensor.path) == tensor.name
        if not tensor.path or tensor.path[0] != tensor.role or not (is_plain or dotted(tensor.path) == tensor.name):
            raise Corrupt(f"{tensor.name} does not lie where its path says in {self.path}", file=self.path, tensor=tensor.name)
        if tensor.alias >= 0 and tensor.alias != tensor.row:
            other, entries = (
                self.tensor(tensor.alias) if self._tensors is None else self._tensors[tensor.alias],
                self.entries(tensor),
            )
            if other.alias >= 0 or len(entries) or (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
                raise Corrupt(
                    f"{tensor.name} cannot share the memory of {other.name} in {self.path}", file=self.path, tensor=tensor.name
                )
        elif tensor.alias >= 0:
            raise Corrupt(f"{tensor.name} is an alias of itself in {self.path}", file=self.path, tensor=tensor.name)

    def check_offsets(self, name: str, total: int) -> None:
        """Offsets begin at 0, never fall, and end at `total`; compared, not subtracted, so that nothing can wrap around."""
        column = self.columns[name]
        is_sound = column.ndim == 1 and len(column) > 0 and column.dtype.kind in "iu"
        if not is_sound or column[0] != 0 or column[-1] != total or (column[1:] < column[:-1]).any():
            raise Corrupt(f"column {name} of {self.path} is out of order", file=self.path)

    def canonical(self, tensor: TensorRow) -> TensorRow:
        """The tensor that holds the bytes: itself, or what it is an alias of."""
        return tensor if tensor.alias < 0 else self.tensor(tensor.alias)

    def entries(self, tensor: TensorRow) -> range:
        return range(*self._range("tensor.entries", tensor.row, self.entry_count))

    def box(self, tensor: TensorRow, entry: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of an entry's box in its tensor."""
        start, stop = self._range("entry.box.offsets", entry, len(self.columns["entry.box"]) // 2)
        if stop - start != len(tensor.shape):
            raise Corrupt(f"entry {entry} of {tensor.name} in {self.path} has {stop - start} dimensions")
        flat = self.columns["entry.box"][2 * start : 2 * stop]
        offset, shape = flat[: stop - start], flat[stop - start :]
        return tuple(int(x) for x in offset), tuple(int(x) for x in shape)

    def strides(self, tensor: TensorRow, entry: int) -> tuple[int, ...] | None:
        """Strides in elements of a foreign entry's bytes, or None where they are row-major."""
        if "entry.strides" not in self.columns:
            return None
        start, stop = self._range("entry.box.offsets", entry, len(self.columns["entry.strides"]))
        return tuple(int(x) for x in self.columns["entry.strides"][start:stop])

    def chunks(self, entry: int, tensor: int = -1) -> Chunks:
        """The chunks of one entry, checked to be what the format says."""
        start, stop = self._range("entry.chunks", entry, self.chunk_count)
        return self._chunk_rows(start, stop, np.full(stop - start, tensor), np.full(stop - start, entry))

    def codecs_of(self, tensor: TensorRow) -> list[codecs.Codec]:
        """The codecs of a tensor's chunks, each once, in order of the codec table."""
        entries = self.entries(self.canonical(tensor))
        if not entries:
            return []
        start, stop = self.chunk_range(entries[0])[0], self.chunk_range(entries[-1])[1]
        try:
            return [self.codecs[row] for row in np.unique(self.column("chunk.codec", start, stop)).tolist()]
        except IndexError:
            raise Corrupt(f"{self.path} names a codec that it does not describe", file=self.path) from None

    def all_chunks(self) -> Chunks:
        """All chunks, checked, as columns; made once and kept."""
        if self._chunks is not None:
            return self._chunks
        self.check_offsets("tensor.entries", self.entry_count)
        self.check_offsets("entry.chunks", self.chunk_count)
        entries = np.diff(self.columns["tensor.entries"])
        counts = np.diff(self.columns["entry.chunks"])
        tensor_of_entry = np.repeat(np.arange(len(self), dtype=np.int32), entries)
        entry = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._chunks = self._chunk_rows(0, self.chunk_count, tensor_of_entry[entry], entry)
        return self._chunks

    def chunk_range(self, entry: int) -> tuple[int, int]:
        """First and last row, half-open, of an entry's chunks in `all_chunks`."""
        return self._range("entry.chunks", entry, self.chunk_count)

    def file(self, row: int) -> FileRow:
        try:
            attempt = int(self.columns["file.attempt"][row])
            path = self._files[row]
            return FileRow(
                path if attempt < 0 else safe_path(path, self.path),
                int(self.columns["file.step"][row]),
                attempt,
                int(self.columns["file.bytes"][row]),
                self._stamps[row],
                int(self.columns["file.header_bytes"][row]),
                self.columns["file.digest"][row].tobytes(),
            )
        except (IndexError, KeyError) as error:
            raise Corrupt(f"{self.path} has no file {row}: {error}", file=self.path) from error

    def files(self) -> list[FileRow]:
        return [self.file(row) for row in range(self.file_count)]

    def _range(self, name: str, row: int, limit: int) -> tuple[int, int]:
        column = self.columns.get(name)
        if column is None or not 0 <= row < len(column) - 1:
            raise Corrupt(f"{self.path} has no row {row} in {name}", file=self.path)
        start, stop = int(column[row]), int(column[row + 1])
        if not 0 <= start <= stop <= limit:
            raise Corrupt(f"row {row} of {name} in {self.path} leaves its table", file=self.path)
        return start, stop

    def _chunk_rows(self, start: int, stop: int, tensor: Array, entry: Array) -> Chunks:
        def part(name: str) -> Array:
            found = self.column(f"chunk.{name}", start, stop)
            if len(found) != stop - start:
                raise Corrupt(f"column chunk.{name} of {self.path} is short", file=self.path)
            return found

        try:
            chunks = Chunks(
                tensor, entry, part("raw_start"), part("raw_bytes"), part("file"), part("offset"), part("stored_bytes"),
                part("codec"), part("base"), part("digest"), part("algorithm"),
            )  # fmt: skip
        except KeyError as error:
            raise Corrupt(f"{self.path} lacks the column {error}", file=self.path) from None
        for block in chunks.blocks():
            self._check(block)
        return chunks

    def _check(self, chunks: Chunks) -> None:
        """Refuse chunks that leave their file, name no file, or are larger than the format allows."""
        if (chunks.algorithm > XXH3_128).any():
            raise Unsupported(f"{self.path} has digests of an algorithm that is not known here; upgrade holdfast to read it")
        if int(chunks.codec.max()) >= len(self.codecs):
            raise Corrupt(f"{self.path} names a codec that it does not describe", file=self.path)
        file = chunks.file.astype(np.int64)
        bad = (file < 0) | (file >= self.file_count)
        if not bad.any():
            room = self.columns["file.bytes"][file]
            stored = chunks.stored_bytes.astype(np.int64)
            bad = (chunks.offset < 0) | (stored > room) | (chunks.offset > room - stored) | (chunks.raw_bytes > MAX_CHUNK_BYTES)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise Corrupt(
                f"chunk {row} of entry {int(chunks.entry[row])} in {self.path} lies outside its file "
                f"(file {int(file[row])}, offset {int(chunks.offset[row])}, {int(chunks.stored_bytes[row])} bytes)",
                file=self.path,
                offset=int(chunks.offset[row]),
            )


def _codec(text: str) -> codecs.Codec:
    name, version, parameters = json.loads(text)
    if not isinstance(name, str) or not isinstance(version, int) or not isinstance(parameters, str):
        raise ValueError(f"{text} is no codec")
    return codecs.Codec(name, version, parameters)


def is_fresh(name: str) -> bool:
    return name.startswith(FRESH)


def layout_digest(columns: Columns) -> str:
    """The content address of the layout columns: 32 hex digits."""
    running = Running()
    for name in sorted(n for n in columns if not is_fresh(n)):
        running.update(f"{name}:{columns[name].dtype.str}:{columns[name].shape};".encode())
        running.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8))
    return running.hex()


def content_digest(columns: Columns, values: bytes) -> str:
    """The identity of a state: names, dtypes, shapes, aliases, boxes, raw digests, values. Not where the bytes lie.

    Args:
        columns: of a whole checkpoint. values: the JSON of values and values by rank, as in docs/format.md.
    """
    running = Running()
    dtypes = Strings.read(columns, "dtype.name")
    running.update("\n".join(dtypes).encode())
    for name in ("tensor.name.offsets", "tensor.name.bytes", "tensor.dtype", "tensor.shape.offsets", "tensor.shape",
                 "tensor.alias", "tensor.entries", "entry.box", "entry.chunks", "chunk.raw_bytes", "chunk.digest"):  # fmt: skip
        if name in columns:
            running.update(np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8))
    running.update(values)
    return running.hex()


def index_metadata(columns: Columns, layout_of: str = "") -> dict[str, str]:
    """The metadata of an index part. `layout_of`: the index file that holds the layout columns, if not this one."""
    metadata = {"holdfast": "index", "version": str(FORMAT), "digest": ALGORITHM, "layout": layout_digest(columns)}
    return metadata | ({"layout_of": layout_of} if layout_of else {})


def read_index(buffer: Any, path: str) -> tuple[Columns, dict[str, str]]:
    """Columns and metadata of an index part; the columns may lack the layout, which `metadata["layout_of"]` then names.

    Raises:
        Corrupt, Unsupported.
    """
    columns, metadata = unpack(buffer, path)
    if metadata.get("holdfast") != "index":
        raise Corrupt(f"{path} is not an index part", file=path)
    if metadata.get("version") != str(FORMAT):
        raise Unsupported(f"{path} is an index of version {metadata.get('version')}; this holdfast reads {FORMAT}: upgrade it")
    if unknown := sorted(set(filter(None, metadata.get("features", "").split(","))) - FEATURES):
        raise Unsupported(f"{path} needs {', '.join(unknown)}: upgrade holdfast to read it")
    return columns, metadata
