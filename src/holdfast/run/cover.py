"""The proof, before a commit, that every element of every tensor is held exactly once."""

from __future__ import annotations

import numpy as np

from ..errors import Corrupt, Refused
from ..format.columns import Array
from ..format.index import Index
from ..layout.boxes import covers_once


def prove_cover(index: Index) -> None:
    """Every element of every tensor lies in exactly one entry, and every byte of an entry in exactly one chunk.

    Raises:
        Refused: the writers' boxes do not cover a tensor exactly once.  Corrupt: chunks do not make up an entry.
    """
    columns = index.columns
    index.all_chunks()
    owned = np.diff(columns["tensor.entries"])
    alias = index.column("tensor.alias", 0, len(index)) >= 0
    if (owned[alias] > 0).any():
        raise Corrupt(f"{index.names[int(np.flatnonzero(alias & (owned > 0))[0])]} is an alias and has bytes of its own")
    tensor_of_entry = np.repeat(np.arange(len(index)), owned)
    is_whole = _whole_boxes(index, tensor_of_entry)
    for row in np.flatnonzero(~alias & (owned != 1)).tolist() + tensor_of_entry[~is_whole].tolist():
        tensor = index.tensor(row)
        if why := covers_once(tensor.shape, [index.box(tensor, entry) for entry in index.entries(tensor)]):
            raise Refused(f"the parts of {tensor.name}, shape {list(tensor.shape)}, do not cover it exactly once: {why}")
    _prove_chunks(index, tensor_of_entry)


def _whole_boxes(index: Index, tensor_of_entry: Array) -> Array:
    """For each entry, whether its box is its whole tensor."""
    columns = index.columns
    starts, ndim = columns["entry.box.offsets"][:-1], np.diff(columns["entry.box.offsets"])
    shapes, dims = columns["tensor.shape.offsets"][:-1], np.diff(columns["tensor.shape.offsets"])
    is_whole: Array = ndim == dims[tensor_of_entry]
    entry = np.repeat(np.arange(len(ndim)), np.where(is_whole, ndim, 0))
    at = np.arange(len(entry)) - np.repeat(
        np.cumsum(np.where(is_whole, ndim, 0)) - np.where(is_whole, ndim, 0), np.where(is_whole, ndim, 0)
    )
    offset = columns["entry.box"][2 * starts[entry] + at]
    extent = columns["entry.box"][2 * starts[entry] + ndim[entry] + at]
    wanted = columns["tensor.shape"][shapes[tensor_of_entry[entry]] + at]
    is_whole[entry[(offset != 0) | (extent != wanted)]] = False
    return is_whole


def _prove_chunks(index: Index, tensor_of_entry: Array) -> None:
    columns = index.columns
    starts, ndim = columns["entry.box.offsets"][:-1], np.diff(columns["entry.box.offsets"])
    entry = np.repeat(np.arange(len(ndim)), ndim)
    at = np.arange(len(entry)) - np.repeat(np.cumsum(ndim) - ndim, ndim)
    wanted = np.array([d.itemsize for d in index.dtypes], np.int64)[columns["tensor.dtype"][tensor_of_entry]]
    np.multiply.at(wanted, entry, columns["entry.box"][2 * starts[entry] + ndim[entry] + at])
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
