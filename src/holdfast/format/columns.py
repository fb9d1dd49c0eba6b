"""Columns: named one-dimensional arrays in one safetensors file, written as a stream and read in place.

The index is such a file. Opening one parses the header and makes views; nothing is copied, nothing is an object for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt
from . import datafile

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_TAGS = {"|u1": "U8", "<u2": "U16", "<u4": "U32", "<i4": "I32", "<i8": "I64", "<i2": "I16"}
_DTYPES = {tag: np.dtype(kind) for kind, tag in _TAGS.items()}


def pack(columns: Columns, metadata: dict[str, str]) -> Iterator[memoryview]:
    """The bytes of a columns file, piece by piece: the header, then each array as it lies in memory."""
    order = sorted(columns, key=lambda name: (-columns[name].dtype.itemsize, name))
    entries, at = [], 0
    for name in order:
        array = columns[name]
        entries.append(datafile.Entry(name, _TAGS[array.dtype.str], array.shape, at, at + array.nbytes))
        at += array.nbytes
    bound = datafile.header_bound(order, [columns[n].ndim for n in order], metadata)
    yield memoryview(datafile.build_header(entries, metadata, bound))
    for name in order:
        yield np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8).data


def unpack(buffer: Any, path: str) -> tuple[Columns, dict[str, str]]:
    """The columns in `buffer` (bytes or a mapped file) as read-only views.

    Raises:
        Corrupt: not a valid safetensors file, or with a dtype that columns do not have.
    """
    view = memoryview(buffer)
    length = datafile.header_length(bytes(view[:8]), len(view), path)
    entries, metadata = datafile.parse_header(bytes(view[:length]), len(view), path)
    columns = {}
    for entry in entries:
        if entry.tag not in _DTYPES:
            raise Corrupt(f"column {entry.key} of {path} has dtype {entry.tag}", file=path, offset=0)
        if len(entry.shape) not in (1, 2):
            raise Corrupt(f"column {entry.key} of {path} has {len(entry.shape)} dimensions", file=path, offset=0)
        raw = np.frombuffer(view[length + entry.start : length + entry.stop], _DTYPES[entry.tag])
        try:
            columns[entry.key] = raw.reshape(entry.shape)
        except ValueError as error:
            raise Corrupt(f"column {entry.key} of {path}: {error}", file=path, offset=0) from error
    return columns, metadata


class Strings(Sequence[str]):
    """A table of strings in two columns: n+1 offsets, and the UTF-8 bytes one after the other."""

    def __init__(self, offsets: Array, data: Array) -> None:
        if offsets.shape[1:] or data.shape[1:] or not offsets.ndim or not data.ndim or not len(offsets) or data.itemsize != 1:
            raise Corrupt("a string table is not made of offsets and bytes")
        self.offsets = offsets
        self.data = data

    @classmethod
    def of(cls, texts: Sequence[str]) -> Strings:
        coded = [t.encode() for t in texts]
        offsets = np.zeros(len(coded) + 1, np.int64)
        np.cumsum([len(c) for c in coded], out=offsets[1:])
        return cls(offsets, np.frombuffer(b"".join(coded), np.uint8))

    @classmethod
    def read(cls, columns: Columns, name: str) -> Strings:
        return cls(columns[f"{name}.offsets"], columns[f"{name}.bytes"])

    def write(self, columns: Columns, name: str) -> None:
        columns[f"{name}.offsets"], columns[f"{name}.bytes"] = self.offsets, self.data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def raw(self, row: int) -> bytes:
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        if not 0 <= start <= stop <= len(self.data):
            raise Corrupt(f"row {row} of a string table leaves its bytes")
        return self.data[start:stop].tobytes()

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        try:
            return self.raw(row).decode()
        except UnicodeDecodeError as error:
            raise Corrupt(f"row {row} of a string table is not UTF-8") from error

    def all(self) -> list[str]:
        """Every row, decoded at once."""
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        if any(a > b for a, b in pairwise(offsets)) or (offsets and (offsets[0] < 0 or offsets[-1] > len(data))):
            raise Corrupt("a string table's offsets are out of order")
        try:
            return [data[a:b].decode() for a, b in pairwise(offsets)]
        except UnicodeDecodeError as error:
            raise Corrupt("a string table is not UTF-8") from error

    def find(self, text: str) -> int:
        """The row that holds `text` in a table sorted by bytes, or -1. Touches log2(n) rows."""
        wanted, low, high = text.encode(), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.raw(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.raw(low) == wanted else -1
