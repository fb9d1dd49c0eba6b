"""The proof, before a commit, that every element of every tensor is held exactly once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import Corrupt, Refused
from ..format.columns import Array
from ..format.index import Index
from ..layout.boxes import Box, covers_once
from ..layout.cover import Cuts, ranges, run_blocks, uncovered


def prove_cover(index: Index, who: Callable[[int], str] | None = None) -> None:
    """Every element of every tensor lies in exactly one entry, and every byte of an entry in exactly one chunk.

    Args:
        who: says of a row of the entry table whose it is (`rank 3`), for the message.
    Raises:
        Refused: the writers' boxes do not cover a tensor exactly once.  Corrupt: chunks do not make up an entry.
    """
    columns = index.columns
    index.all_chunks()
    owned = np.diff(columns["tensor.entries"])
    alias = index.column("tensor.alias", 0, len(index)) >= 0
    if (owned[alias] > 0).any():
        raise Corrupt(f"{index.names[int(np.flatnonzero(alias & (owned > 0))[0])]} is an alias and has bytes of its own")
    cuts = Cuts(
        columns["tensor.shape.offsets"], columns["tensor.shape"], columns["tensor.entries"],
        columns["entry.box.offsets"], columns["entry.box"], ~alias,
    )  # fmt: skip
    bad = uncovered(cuts)
    if len(bad):
        more = f" (and {len(bad) - 1} other tensor{'s' * (len(bad) > 2)})" if len(bad) > 1 else ""
        raise Refused(_explain(index, int(bad[0]), who) + more)
    _prove_chunks(index, np.repeat(np.arange(len(index), dtype=np.int32), owned))


def _explain(index: Index, row: int, who: Callable[[int], str] | None) -> str:
    tensor = index.tensor(row)
    entries = index.entries(tensor)
    boxes = [index.box(tensor, entry) for entry in entries]
    text = f"the parts of {tensor.name}, shape {list(tensor.shape)}, do not cover it exactly once: "
    fault = covers_once(tensor.shape, boxes)
    assert fault is not None
    named = [_box(boxes[number]) + (f" of {who(entries[number])}" if who else "") for number in fault.boxes]
    if not named:
        return f"{text}{fault.missing} of {tensor.nbytes // tensor.dtype.itemsize} elements are missing"
    if len(named) == 1:
        return f"{text}the box {named[0]} leaves the tensor"
    text += f"the boxes {named[0]} and {named[1]} overlap"
    if who is None:
        return text
    return f"{text}. If these are different tensors, give them different names, or wrap what differs by rank in holdfast.PerRank"


def _box(box: Box) -> str:
    return f"{list(box[0])}+{list(box[1])}"


def _prove_chunks(index: Index, tensor_of_entry: Array) -> None:
    columns = index.columns
    wanted = _raw_bytes(index, tensor_of_entry)
    total = np.zeros(index.chunk_count + 1, np.int64)
    np.cumsum(columns["chunk.raw_bytes"], out=total[1:])
    bounds = columns["entry.chunks"]
    bad = total[bounds[1:]] - total[bounds[:-1]] != wanted
    low = 0
    for block in index.all_chunks().blocks():
        misplaced = total[low : low + len(block)] - total[bounds[block.entry]] != block.raw_start
        bad[block.entry[misplaced]] = True
        low += len(block)
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        name = index.names[int(tensor_of_entry[first])]
        raise Corrupt(f"the chunks of {name} do not make up its {int(wanted[first])} bytes in {index.path}", file=index.path)


def _raw_bytes(index: Index, tensor_of_entry: Array) -> Array:
    """How many bytes the elements of each entry are."""
    columns = index.columns
    nbytes = np.array([d.itemsize for d in index.dtypes], np.int64)[columns["tensor.dtype"][tensor_of_entry]]
    offsets, boxes = columns["entry.box.offsets"], columns["entry.box"]
    for first, last in run_blocks(offsets):
        start, ndim = offsets[first:last], np.diff(offsets[first : last + 1])
        extents = boxes[ranges(2 * start + ndim, ndim)]
        np.multiply.at(nbytes[first:last], np.repeat(np.arange(last - first), ndim), extents)
    return nbytes
