"""Whether an index, whose bytes are those that were written, also makes sense: a reader believes no offset and no size.

Digests find accidents. These checks find an index that was written wrong, or by something else: each number is inside what it
counts in, each name is unique, each byte of each tensor is held exactly once, and nothing lies over anything else.
"""

from __future__ import annotations

import json

import numpy as np

from ..errors import Corrupt, HoldfastError, Refused, Unsupported
from ..format.codec import known
from ..format.columns import Array
from ..format.digest import DIGEST_BYTES
from ..format.index import NO_DIGEST, Chunks, Index
from ..format.names import owner_of
from ..format.records import StepRef
from .cover import prove_cover

_STRINGS = ("tensor.name", "tensor.path", "dtype.name", "role.name", "codec.json", "file.path", "file.stamp")
_ROWS = {
    "tensor": ("dtype", "role", "owner", "alias", "replica", "order"),
    "entry": (),
    "chunk": ("raw_start", "raw_bytes", "file", "offset", "stored_bytes", "codec", "base", "digest", "algorithm"),
    "file": ("step", "attempt", "bytes", "header_bytes", "digest"),
}
"""Columns with one row for each row of their table."""
_OTHERS = ("tensor.shape", "tensor.shape.offsets", "tensor.entries", "entry.box", "entry.box.offsets", "entry.chunks")
_ALL_TENSORS = 100_000
"""Up to so many tensors every one is checked when the index is opened; in larger ones those that are asked for."""
_DTYPES = {
    "tensor.dtype": "|u1", "tensor.role": "<u2", "chunk.raw_bytes": "<u4", "chunk.file": "<u4", "chunk.stored_bytes": "<u4",
    "chunk.codec": "<u2", "chunk.digest": "|u1", "chunk.algorithm": "|u1", "file.digest": "|u1",
}  # fmt: skip
"""Where they are not signed 64-bit integers."""
_BROKEN = (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, AttributeError)


def check_index(index: Index) -> None:
    """Raises:
    Corrupt: naming the index and what in it is wrong.  Unsupported: a codec or a feature that is not known here.
    """
    try:
        _check_forms(index)
        if len(index) <= _ALL_TENSORS:
            index.tensors()
        _check_files(index)
        _check_chunks(index)
        prove_cover(index)
    except Refused as error:
        raise Corrupt(f"{index.path}: {error}", file=index.path) from error
    except HoldfastError as error:
        raise located(error, index.path) from error
    except _BROKEN as error:
        raise Corrupt(f"{index.path} is not an index: {error}", file=index.path) from error


def located(error: HoldfastError, path: str) -> HoldfastError:
    """The error, with the file that it is about in its message."""
    if path in str(error):
        return error
    return Corrupt(f"{path}: {error}", file=path) if isinstance(error, Corrupt) else type(error)(f"{path}: {error}")


def _check_forms(index: Index) -> None:
    """Each column is integers of the right width, and as long as its table."""
    columns = index.columns
    if "entry.strides" in columns:
        raise Unsupported("strides of foreign bytes are not known here; upgrade holdfast to read them")
    counts = {"tensor": len(index), "entry": index.entry_count, "chunk": index.chunk_count, "file": index.file_count}
    rows = {f"{table}.{name}": count for table, count in counts.items() for name in _ROWS[table]}
    for name in (*rows, *_OTHERS, *(f"{text}.offsets" for text in _STRINGS)):
        column = columns.get(name)
        if column is None:
            continue  # it has a default, or its absence was noticed
        width = (DIGEST_BYTES,) if name.endswith(".digest") else ()
        if column.dtype.str != _DTYPES.get(name, "<i8") or column.shape[1:] != width:
            raise Corrupt(f"column {name} has dtype {column.dtype} and shape {column.shape}")
        if name in rows and len(column) != rows[name]:
            raise Corrupt(f"column {name} has {len(column)} rows where {rows[name]} belong")
    for name, total in (
        ("tensor.shape.offsets", len(columns["tensor.shape"])), ("entry.box.offsets", len(columns["entry.box"]) // 2),
        ("tensor.entries", index.entry_count), ("entry.chunks", index.chunk_count),
    ):  # fmt: skip
        index.check_offsets(name, total)
    if len(columns["tensor.shape.offsets"]) != len(index) + 1 or len(columns["entry.box.offsets"]) != index.entry_count + 1:
        raise Corrupt("the tables of shapes and boxes are not as long as those of tensors and entries")
    if len(columns["entry.box"]) != 2 * int(columns["entry.box.offsets"][-1]):
        raise Corrupt("the table of boxes holds half a box")
    for codec in index.codecs:
        known(codec)


def _check_files(index: Index) -> None:
    files = index.files()
    if len({f.path for f in set(files)}) != len(set(files)):  # equal rows are what several writers referred to
        raise Corrupt("a file stands in the table twice, with different sizes or owners")
    for file in files:
        if not 0 <= file.header_bytes <= file.nbytes:
            raise Corrupt(f"{file.path} has {file.nbytes} bytes and a header of {file.header_bytes}")
        if not file.is_foreign and owner_of(file.path) != StepRef(file.step, file.attempt):
            raise Corrupt(f"{file.path} is not a file of step {file.step}, attempt {file.attempt}")


def _check_chunks(index: Index) -> None:
    chunks = index.all_chunks()
    is_sorted = all(_in_file_order(block) for block in chunks.blocks(overlap=1))
    for block in chunks.blocks(overlap=1):
        _check_block(index, block, is_sorted)
    if not is_sorted:
        order = np.lexsort((chunks.offset, chunks.file))
        _refuse(index, chunks.take(order).tensor, _over_the_one_before(chunks.take(order)), "lies over another one")


def _check_block(index: Index, chunks: Chunks, is_sorted: bool) -> None:
    file = chunks.file.astype(np.int64)
    is_raw = np.array([c.name == "raw" for c in index.codecs])[chunks.codec.astype(np.int64)]
    sizes = np.array([d.itemsize for d in index.dtypes], np.int64)[index.columns["tensor.dtype"][chunks.tensor]]
    is_foreign = index.columns["file.attempt"][file] < 0
    for what, bad in (
        ("has other stored than raw bytes", is_raw & (chunks.stored_bytes != chunks.raw_bytes)),
        ("holds nothing", chunks.raw_bytes == 0),
        ("cuts an element", chunks.raw_bytes % sizes != 0),
        ("lies in its file's header", chunks.offset < index.columns["file.header_bytes"][file]),
        ("has no digest", (chunks.algorithm == NO_DIGEST) & ~is_foreign),
        ("has a base, which no codec here uses", chunks.base >= 0),
        ("lies over another one", _over_the_one_before(chunks) if is_sorted else np.zeros(0, bool)),
    ):
        _refuse(index, chunks.tensor, bad, what)


def _in_file_order(chunks: Chunks) -> bool:
    file, offset = chunks.file, chunks.offset
    return bool(((file[1:] > file[:-1]) | ((file[1:] == file[:-1]) & (offset[1:] >= offset[:-1]))).all())


def _over_the_one_before(chunks: Chunks) -> Array:
    """For chunks in file order, whether each begins before the one before it ends."""
    over = np.zeros(len(chunks), bool)
    over[1:] = (chunks.file[1:] == chunks.file[:-1]) & (chunks.offset[1:] < (chunks.offset + chunks.stored_bytes)[:-1])
    return over


def _refuse(index: Index, tensor_of: Array, bad: Array, what: str) -> None:
    if bad.any():
        name = index.names[int(tensor_of[int(np.flatnonzero(bad)[0])])]
        raise Corrupt(f"a chunk of {name} {what}", tensor=name)


def check_values(pairs: object, where: str) -> None:
    """Raises:
    Corrupt: not a list of [path, typed JSON] pairs.
    """
    if not isinstance(pairs, list):
        raise Corrupt(f"the values in {where} are no list", file=where)
    for pair in pairs:
        is_pair = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list)
        if not is_pair or not pair[0] or not isinstance(pair[0][0], str):
            raise Corrupt(f"{json.dumps(pair)[:100]} in {where} is no pair of a path and a value", file=where)
