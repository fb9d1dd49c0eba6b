"""One index from the parts of several writers, and what building one part shares with that.

Parts come in thousands, with the same tensors and millions of entries between them. Tensor tables that are equal are taken in
once; entries and chunks are never objects, only columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import Corrupt, Refused, Unsupported
from ..format.codec import RAW
from ..format.columns import Array, Columns, Strings
from ..format.digest import DIGEST_BYTES, Running
from ..format.index import XXH3_128, FileRow, is_fresh
from ..layout.cover import ranges, run_blocks

_TABLE = (
    *(f"tensor.{name}" for name in ("dtype", "role", "shape.offsets", "shape", "owner", "alias", "order")),
    *(
        f"{name}.{column}"
        for name in ("tensor.name", "tensor.path", "dtype.name", "role.name")
        for column in ("offsets", "bytes")
    ),
)
"""What parts have in common whose tensor tables are equal."""
_RAW = json.dumps([RAW.name, RAW.version, RAW.parameters])
_CHUNK = {"raw_start": np.int64, "raw_bytes": np.uint32, "offset": np.int64, "stored_bytes": np.uint32, "algorithm": np.uint8}
_DEFAULTS = {"tensor.owner": -1, "tensor.alias": -1, "tensor.order": 0, "chunk.codec": 0, "chunk.algorithm": XXH3_128}


class Merged(NamedTuple):
    """The index of several parts."""

    columns: Columns
    part_of_entry: Array
    """For each row of the entry table, the number of the part that it came from."""


def join_layout(columns: Columns, layout: Columns) -> Columns:
    """`columns` with the layout columns of another part."""
    return {name: array for name, array in layout.items() if not is_fresh(name)} | columns


def merge_parts(parts: Sequence[Columns], where: str) -> Columns:
    """One index from the parts of several writers: tensors united by name, entries in order of their boxes.

    A tensor that is an alias in some parts, and has rows of its own in another, is no alias: two pipeline stages hold tied
    tensors apart. Of what else is said of a tensor, dtype and shape are the same in all parts, and the first part counts.

    Raises:
        Refused: two parts give one name another dtype, shape or alias.  Corrupt: a part is no index.
    """
    return merge(parts, where).columns


def merge(parts: Sequence[Columns], where: str) -> Merged:
    """As `merge_parts`, with the part that each entry came from."""
    if len(parts) == 1:
        return Merged(parts[0], np.zeros(len(parts[0]["entry.chunks"]) - 1, np.int32))
    if any("entry.strides" in part for part in parts):
        raise Unsupported(f"strides of foreign bytes in {where} are not known here; upgrade holdfast to read them")
    try:
        return _merge(parts, where)
    except Corrupt as error:
        raise error if error.file else Corrupt(f"a part of {where}: {error}", file=where) from error
    except KeyError as error:
        raise Corrupt(f"a part of {where} lacks the column {error}", file=where) from None
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise Corrupt(f"a part of {where} is not an index: {error}", file=where) from error


def offsets_of(counts: Sequence[int] | Sequence[bool] | Array) -> Array:
    """Offsets of runs of these lengths: one more than there are runs, beginning at 0."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=offsets[1:])
    return offsets


def write_file_table(columns: Columns, files: Sequence[FileRow]) -> None:
    """The columns of the file table."""
    Strings.of([f.path for f in files]).write(columns, "file.path")
    Strings.of([f.stamp for f in files]).write(columns, "file.stamp")
    columns["file.step"] = np.array([f.step for f in files], np.int64)
    columns["file.attempt"] = np.array([f.attempt for f in files], np.int64)
    columns["file.bytes"] = np.array([f.nbytes for f in files], np.int64)
    columns["file.header_bytes"] = np.array([f.header_bytes for f in files], np.int64)
    columns["file.digest"] = np.frombuffer(b"".join(f.digest for f in files), np.uint8).reshape(-1, DIGEST_BYTES)


# --- columns of many parts --------------------------------------------------------------------------------------------


def _lengths(parts: Sequence[Columns], name: str) -> Array:
    return np.fromiter((len(part[name]) for part in parts), np.int64, len(parts))


def _joined(parts: Sequence[Columns], name: str, rows: Array) -> Array:
    """A column of all parts, one after the other; each has as many rows as `rows` says, or none where it has a default."""
    default = _DEFAULTS.get(name)
    if default is None:
        arrays = [part[name] for part in parts]
    else:
        arrays = [part[name] if name in part else np.full(n, default) for part, n in zip(parts, rows.tolist(), strict=True)]
    lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
    joined = np.concatenate(arrays)
    if (lengths != rows).any() or joined.dtype.kind not in "iu":
        part = int(np.flatnonzero(lengths != rows)[0]) if (lengths != rows).any() else 0
        raise ValueError(f"column {name} of part {part} has {lengths[part]} rows where {rows[part]} belong, or is no integers")
    return joined


def _counts(parts: Sequence[Columns], name: str, runs: Array, totals: Array) -> Array:
    """The lengths of runs, of all parts, from their offsets. In each part these begin at 0, never fall, and end at its total."""
    flat = _joined(parts, name, runs + 1)
    ends = np.cumsum(runs + 1)
    is_within = np.ones(len(flat) - 1, bool)
    is_within[ends[:-1] - 1] = False
    falls = (flat[1:] < flat[:-1]) & is_within  # compared, not subtracted: nothing can wrap around
    if flat.ndim != 1 or flat[ends - runs - 1].any() or (flat[ends - 1] != totals).any() or falls.any():
        raise ValueError(f"column {name} is out of order")
    return np.diff(flat)[is_within]


def _strings(parts: Sequence[Columns], name: str, rows: Array) -> Strings:
    """The string tables of all parts, one after the other."""
    lengths = _lengths(parts, f"{name}.bytes")
    counts = _counts(parts, f"{name}.offsets", rows, lengths)
    return Strings(offsets_of(counts), _joined(parts, f"{name}.bytes", lengths))


def _united(tables: Sequence[Columns], name: str) -> tuple[list[str], list[Array]]:
    """The strings of small tables, sorted by their bytes, none twice; and for each table the rows of its strings among them.
    The codec `raw` comes before all others."""
    texts = [Strings.read(table, name).all() for table in tables]
    union = sorted({text for of_table in texts for text in of_table}, key=lambda text: (text != _RAW, text.encode()))
    return union, [np.array([union.index(text) for text in of_table], np.int64) for of_table in texts]


def _shifted(rows: Array, lengths: Array, sizes: Array, what: str) -> Array:
    """Rows that the parts count from their own tables, `lengths` of them each, as rows of all tables one after the other."""
    if ((rows < 0) | (rows >= np.repeat(sizes, lengths))).any():
        raise ValueError(f"it names a {what} that it does not describe")
    shifted: Array = rows + np.repeat(np.cumsum(sizes) - sizes, lengths)
    return shifted


def _recoded(rows: Array, lengths: Array, codes: Sequence[Array], what: str) -> Array:
    """The same for small tables, as rows of their union; `codes`: for each table, what `_united` says."""
    sizes = np.fromiter(map(len, codes), np.int64, len(codes))
    recoded: Array = np.concatenate(codes)[_shifted(rows, lengths, sizes, what)]
    return recoded


def _take_runs(values: Array, starts: Array, counts: Array) -> Array:
    """Runs of values, one after the other."""
    offsets = offsets_of(counts)
    taken = np.empty(int(offsets[-1]), values.dtype)
    for first, last in run_blocks(offsets):
        taken[offsets[first] : offsets[last]] = values[ranges(starts[first:last], counts[first:last])]
    return taken


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tables:
    """The different tensor tables of the parts, one after the other. A row of them is a tensor as one or more parts say it."""

    tables: list[Columns]
    part: Array
    """For each table, the first part that has it."""
    of_part: Array
    """For each part, its table."""
    rows: Array
    """For each table, how many rows it has."""

    @classmethod
    def of(cls, parts: Sequence[Columns]) -> _Tables:
        known: dict[tuple[object, ...], int] = {}
        first: list[int] = []
        of_part: list[int] = []
        for number, part in enumerate(parts):
            running, forms = Running(), []
            for name in _TABLE:
                if (column := part.get(name)) is not None:
                    running.update(np.ascontiguousarray(column))
                    forms.append((name, column.dtype.str, column.shape))
            table = known.setdefault((running.hex(), *forms), len(known))
            if table == len(first):
                first.append(number)
            of_part.append(table)
        tables = [parts[number] for number in first]
        return cls(tables, np.array(first), np.array(of_part), _lengths(tables, "tensor.dtype"))

    def column(self, name: str) -> Array:
        return _joined(self.tables, name, self.rows)


class _Tensors:
    """The tensors of all parts, united by name."""

    def __init__(self, parts: Sequence[Columns], where: str) -> None:
        self._tables, self._where = _Tables.of(parts), where
        tables = self._tables.tables
        self._table = np.repeat(np.arange(len(tables)), self._tables.rows)
        """The table of each row."""
        self._row = self._rows_by_name()
        """The united tensor of each row."""
        self._first = np.unique(self._row, return_index=True)[1]
        """The first row of each united tensor."""
        self._dtypes, codes = _united(tables, "dtype.name")
        self._dtype = _recoded(self._tables.column("tensor.dtype"), self._tables.rows, codes, "dtype")
        totals = _lengths(tables, "tensor.shape")
        self._ndim = _counts(tables, "tensor.shape.offsets", self._tables.rows, totals)
        self._shape, self._shape_at = _joined(tables, "tensor.shape", totals), offsets_of(self._ndim)[:-1]
        self._alias = self._related("tensor.alias")
        self._refuse_differences()
        self.ndim = self._ndim[self._first]

    def _rows_by_name(self) -> Array:
        seen: dict[bytes, int] = {}
        names = _strings(self._tables.tables, "tensor.name", self._tables.rows)
        data = names.data.tobytes()
        numbers = [seen.setdefault(data[a:b], len(seen)) for a, b in pairwise(names.offsets.tolist())]
        self._names = sorted(seen)
        rank = np.empty(len(seen), np.int64)
        rank[[seen[name] for name in self._names]] = np.arange(len(seen))
        return rank[np.array(numbers, np.int64)]

    def _related(self, name: str) -> Array:
        """For each row, the united tensor that a column of it names, or -1."""
        local = self._tables.column(name).astype(np.int64)
        if (local >= self._tables.rows[self._table]).any():
            raise ValueError(f"column {name} names a row that is not there")
        at = local + (np.cumsum(self._tables.rows) - self._tables.rows)[self._table]
        return np.where(local >= 0, self._row[np.where(local >= 0, at, 0)], -1) if len(local) else local

    def _refuse_differences(self) -> None:
        first = self._first[self._row]
        has_rows = np.bincount(self._row[self._alias < 0], minlength=len(self._names)) > 0
        self._is_alias = ~has_rows
        differs = (self._dtype != self._dtype[first]) | (self._ndim != self._ndim[first])
        differs |= (self._alias != self._alias[first]) & self._is_alias[self._row]
        ndim = np.where(differs, 0, self._ndim)
        other = self._shape[ranges(self._shape_at, ndim)] != self._shape[ranges(self._shape_at[first], ndim)]
        differs[np.repeat(np.arange(len(ndim)), ndim)[other]] = True
        if differs.any():
            row = int(np.flatnonzero(differs)[0])
            raise Refused(
                f"two writers give {self._name(int(self._row[row]))} different dtypes, shapes or aliases: "
                f"{self._said(int(first[row]))}, {self._said(row)}, in {self._where}"
            )

    def _name(self, tensor: int) -> str:
        return self._names[tensor].decode(errors="replace")

    def _said(self, row: int) -> str:
        """What a row says of its tensor, and who says so."""
        shape = self._shape[self._shape_at[row] : self._shape_at[row] + self._ndim[row]].tolist()
        alias = f", an alias of {self._name(int(self._alias[row]))}" if self._alias[row] >= 0 else ""
        return f"{self._dtypes[self._dtype[row]]} {shape}{alias} in part {self._tables.part[self._table[row]]}"

    def of_entries(self, parts: Sequence[Columns], entries: Array) -> Array:
        """For each entry of all parts, its united tensor; `entries`: how many each part has."""
        of_part = self._tables.of_part
        starts = np.cumsum(self._tables.rows) - self._tables.rows
        counts = _counts(parts, "tensor.entries", self._tables.rows[of_part], entries)
        rows = ranges(starts[of_part], self._tables.rows[of_part])
        if (owned := (self._alias[rows] >= 0) & (counts > 0)).any():
            raise self.damaged(int(self._row[rows[owned][0]]), "is an alias and has bytes of its own")
        return np.repeat(self._row[rows].astype(np.int32), counts)

    def damaged(self, tensor: int, why: str) -> Corrupt:
        name = self._name(tensor)
        return Corrupt(f"{name} {why} in {self._where}", file=self._where, tensor=name)

    def write(self, columns: Columns) -> None:
        """The columns of the tensor table, and of the tables of dtypes and roles."""
        tables, first = self._tables, self._first
        paths = _strings(tables.tables, "tensor.path", tables.rows)
        roles, codes = _united(tables.tables, "role.name")
        sizes = np.diff(paths.offsets)[first]
        lengths = [len(name) for name in self._names]
        Strings(offsets_of(lengths), np.frombuffer(b"".join(self._names), np.uint8)).write(columns, "tensor.name")
        Strings(offsets_of(sizes), _take_runs(paths.data, paths.offsets[first], sizes)).write(columns, "tensor.path")
        Strings.of(self._dtypes).write(columns, "dtype.name")
        Strings.of(roles).write(columns, "role.name")
        columns["tensor.dtype"] = self._dtype[first].astype(np.uint8)
        columns["tensor.role"] = _recoded(tables.column("tensor.role"), tables.rows, codes, "role")[first].astype(np.uint16)
        columns["tensor.shape.offsets"] = offsets_of(self.ndim)
        columns["tensor.shape"] = _take_runs(self._shape, self._shape_at[first], self.ndim).astype(np.int64)
        columns["tensor.owner"] = self._related("tensor.owner")[first]
        columns["tensor.alias"] = np.where(self._is_alias, self._alias[first], -1)
        order = np.empty(len(first), np.int64)
        order[np.lexsort((first, tables.column("tensor.order")[first], self._table[first]))] = np.arange(len(first))
        columns["tensor.order"] = order


# --- entries, chunks, files -------------------------------------------------------------------------------------------


def _merge(parts: Sequence[Columns], where: str) -> Merged:
    tensors = _Tensors(parts, where)
    columns: Columns = {}
    tensors.write(columns)
    entries = _lengths(parts, "entry.chunks") - 1
    tensor = tensors.of_entries(parts, entries)
    halves = _lengths(parts, "entry.box") // 2
    ndim, boxes = _counts(parts, "entry.box.offsets", entries, halves), _joined(parts, "entry.box", 2 * halves)
    start = 2 * offsets_of(ndim)[:-1]
    if (differs := ndim != tensors.ndim[tensor]).any():
        raise tensors.damaged(int(tensor[differs][0]), "has a box of another number of dimensions")
    columns["tensor.entries"] = offsets_of(np.bincount(tensor, minlength=len(tensors.ndim)))
    order = _in_order(tensor, columns["tensor.entries"], ndim, start, boxes)
    columns["entry.box.offsets"] = offsets_of(ndim[order])
    columns["entry.box"] = _take_runs(boxes, start[order], 2 * ndim[order]).astype(np.int64, copy=False)
    del boxes, start, ndim, tensor
    _write_chunks(columns, parts, entries, order)
    _write_files(columns, parts)
    return Merged(columns, np.repeat(np.arange(len(parts), dtype=np.int32), entries)[order])


def _in_order(tensor: Array, bounds: Array, ndim: Array, start: Array, boxes: Array) -> Array:
    """The entries of all parts in the order of their tensors, offsets and extents; equal ones in the order of the parts.

    Args:
        bounds: how many entries the tensors have, as offsets. start: where an entry's offset and extents are in `boxes`.
    """
    # numpy sorts integers of 16 bits in linear time
    order = np.argsort(tensor.astype(np.min_scalar_type(len(bounds))), kind="stable")
    for first, last in run_blocks(bounds):
        block = order[bounds[first] : bounds[last]]
        dims = ndim[block]
        for number in np.unique(dims).tolist():
            at = np.flatnonzero(dims == number)
            some = block[at]
            keys = _packed([tensor[some].astype(np.int64), *(boxes[start[some] + i] for i in range(2 * number))])
            if keys:
                block[at] = some[np.lexsort(keys[::-1])]
    return order


def _packed(keys: Sequence[Array]) -> list[Array]:
    """Fewer keys that sort in the same order, the first of which counts most: those that 63 bits can hold become one."""
    packed: list[Array] = []
    width = 0
    for key in keys:
        low = int(key.min())
        size = int(key.max()) - low + 1
        if size > 1 and packed and width * size < 1 << 63:
            packed[-1] = packed[-1] * size + (key - low)
            width *= size
        elif size > 1:
            packed.append(key - low if size < 1 << 63 else key)
            width = size
    return packed


def _write_chunks(columns: Columns, parts: Sequence[Columns], entries: Array, order: Array) -> None:
    chunks = _lengths(parts, "chunk.raw_bytes")
    counts = _counts(parts, "entry.chunks", entries, chunks)
    columns["entry.chunks"] = offsets_of(counts[order])
    rows = ranges(offsets_of(counts)[:-1][order], counts[order])
    for name, kind in _CHUNK.items():
        columns[f"chunk.{name}"] = _joined(parts, f"chunk.{name}", chunks)[rows].astype(kind, copy=False)
    codecs, codes = _united(parts, "codec.json")
    Strings.of(codecs).write(columns, "codec.json")
    codec = _recoded(_joined(parts, "chunk.codec", chunks), chunks, codes, "codec")
    columns["chunk.codec"] = codec[rows].astype(np.uint16)
    del codec
    files = _shifted(_joined(parts, "chunk.file", chunks), chunks, _lengths(parts, "file.step"), "file")
    columns["chunk.file"] = files[rows].astype(np.uint32)
    del files
    columns["chunk.digest"] = _joined(parts, "chunk.digest", chunks)[rows]


def _write_files(columns: Columns, parts: Sequence[Columns]) -> None:
    files = _lengths(parts, "file.step")
    for name in ("file.path", "file.stamp"):
        _strings(parts, name, files).write(columns, name)
    for name in ("step", "attempt", "bytes", "header_bytes", "digest"):
        columns[f"file.{name}"] = _joined(parts, f"file.{name}", files)
