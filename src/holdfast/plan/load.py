"""Who reads what: from the boxes that a rank wants and those that are stored to the chunks to read, in file order.

Columns throughout: no Python object for a chunk. A join is one wanted box that meets one stored entry; each chunk lists
its joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..format.columns import Array
from ..format.index import Index, TensorRow
from ..layout.boxes import Box, intersect


@dataclass(frozen=True, slots=True)
class Wanted:
    """One box of a stored tensor that is wanted."""

    tensor: TensorRow
    """The one that holds the bytes, not an alias."""
    box: Box


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to read. Chunk i of it is row `chunks[i]` of the index; its joins are `joins[first[i]:first[i + 1]]`."""

    chunks: Array
    """Rows of the chunk table, each once, by file and offset."""
    first: Array
    joins: Array
    wanted: Array
    """Of each join, the number of the wanted box."""
    entry: Array
    """Of each join, the row of the entry."""


def plan_load(index: Index, wanted: Sequence[Wanted]) -> LoadPlan:
    """The chunks that hold the wanted boxes.

    Of an entry, only chunks with wanted elements are read, as far as the two innermost cut dimensions tell.
    """
    owners: list[int] = []
    entries: list[int] = []
    spans: list[tuple[int, int]] = []
    sparse: list[tuple[int, Array]] = []
    for number, want in enumerate(wanted):
        for entry, stored in _meeting(index, want):
            low, high = index.chunk_range(entry)
            span, rows = _chunks_of(index, want.tensor, entry, stored, want.box, low, high)
            if rows is not None:
                sparse.append((len(owners), rows))
            owners.append(number)
            entries.append(entry)
            spans.append(span if rows is None else (0, 0))
    bounds = np.array(spans, np.int64).reshape(-1, 2)
    counts = bounds[:, 1] - bounds[:, 0]
    join = np.repeat(np.arange(len(counts)), counts)
    chunk = np.repeat(bounds[:, 0], counts) + np.arange(len(join)) - np.repeat(np.cumsum(counts) - counts, counts)
    if sparse:
        join = np.concatenate([join, *(np.full(len(rows), number) for number, rows in sparse)])
        chunk = np.concatenate([chunk, *(rows for _, rows in sparse)])
    return _ordered(index, chunk, join, np.array(owners, np.int64), np.array(entries, np.int64))


def _ordered(index: Index, chunk: Array, join: Array, owners: Array, entries: Array) -> LoadPlan:
    columns = index.columns
    order = np.lexsort((columns["chunk.offset"][chunk], columns["chunk.file"][chunk]))
    chunk, join = chunk[order], join[order]
    is_new = np.ones(len(chunk), bool)
    is_new[1:] = chunk[1:] != chunk[:-1]
    return LoadPlan(chunk[is_new], np.append(np.flatnonzero(is_new), len(chunk)), join, owners, entries)


def _meeting(index: Index, want: Wanted) -> list[tuple[int, Box]]:
    """The entries of a tensor that share an element with the wanted box, and their boxes."""
    entries = index.entries(want.tensor)
    if len(entries) == 1:
        stored = index.box(want.tensor, entries[0])
        return [(entries[0], stored)] if intersect(stored, want.box) is not None else []
    ndim = len(want.tensor.shape)
    start = int(index.columns["entry.box.offsets"][entries.start])
    boxes = index.columns["entry.box"][2 * start : 2 * (start + ndim * len(entries))].reshape(len(entries), 2, ndim)
    offset, extent = np.array(want.box[0], np.int64), np.array(want.box[1], np.int64)
    low, high = np.maximum(boxes[:, 0], offset), np.minimum(boxes[:, 0] + boxes[:, 1], offset + extent)
    return [(entries.start + i, _box(boxes[i])) for i in np.flatnonzero((low < high).all(axis=1)).tolist()]


def _box(columns: Array) -> Box:
    return tuple(columns[0].tolist()), tuple(columns[1].tolist())


def _chunks_of(
    index: Index, tensor: TensorRow, entry: int, stored: Box, wanted: Box, low: int, high: int
) -> tuple[tuple[int, int], Array | None]:
    """The chunks of an entry that hold wanted elements: rows `low` to `high`, half-open, or a list of rows."""
    if high - low <= 1 or stored == wanted:
        return (low, high), None
    runs = runs_of(stored, wanted)
    size = tensor.dtype.itemsize
    starts = index.columns["chunk.raw_start"][low:high] // size
    stops = np.append(starts[1:], runs.total)
    first = low + int(np.searchsorted(stops, runs.first, "right"))
    last = low + int(np.searchsorted(starts, runs.last, "left"))
    if runs.period == runs.length:
        return (first, last), None
    after, before = stops[first - low : last - low] - 1 - runs.first, starts[first - low : last - low] - runs.first - runs.length
    is_met = after // runs.period > before // runs.period
    return (first, last), None if is_met.all() else first + np.flatnonzero(is_met)


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the elements of one box lie in the row-major elements of another: `length` of them in every `period`."""

    first: int
    last: int
    """Half-open."""
    length: int
    period: int
    """Equal to `length` where they lie side by side from `first` to `last`."""
    total: int
    """Elements of the other box."""


def runs_of(stored: Box, wanted: Box) -> Runs:
    """Where the wanted part lies in a stored box that it meets."""
    part = intersect(stored, wanted)
    assert part is not None
    offset = [p - s for p, s in zip(part[0], stored[0], strict=True)]
    strides, total = [], 1
    for n in reversed(stored[1]):
        strides.append(total)
        total *= n
    strides.reverse()
    first = sum(o * s for o, s in zip(offset, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(offset, part[1], strides, strict=True)) + 1
    cut = [d for d, (n, m) in enumerate(zip(part[1], stored[1], strict=True)) if n != m]
    inner = cut[-1] if cut else 0
    if not cut or all(n == 1 for n in part[1][:inner]):
        return Runs(first, last, last - first, last - first, total)
    return Runs(first, last, part[1][inner] * strides[inner], stored[1][inner] * strides[inner], total)
