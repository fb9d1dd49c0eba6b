"""Data files: the header of a valid safetensors file, built and taken apart.

Layout of a file: 8 bytes little-endian header length, the JSON header padded with spaces so that both together are a multiple
of 4096 bytes, then the entries without holes, in descending item size. See docs/format.md, section "Data file".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Corrupt

BLOCK = 4096
MAX_ENTRIES = 65_536
MAX_HEADER_BYTES = 16 << 20
_READ_LIMIT = 100_000_000
_PREFIX = 8
_SLOT = 96
"""An upper bound, in bytes, of what an entry's JSON takes besides its key and the digits of its shape."""

_TAG_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One box in one data file."""

    key: str
    tag: str
    """safetensors' dtype; U8 for coded entries and dtypes that safetensors lacks."""
    shape: tuple[int, ...]
    start: int
    """Bytes from the end of the header."""
    stop: int


def entry_key(name: str, offset: Sequence[int], shape: Sequence[int], global_shape: Sequence[int]) -> str:
    """The key of a box of the tensor `name`: the name alone where the box is the whole tensor, else `name@0,4+2,4`."""
    if tuple(shape) == tuple(global_shape):
        return name
    return f"{name}@{','.join(map(str, offset))}+{','.join(map(str, shape))}"


def header_bound(keys: Sequence[str], ndims: Sequence[int], metadata: dict[str, str]) -> int:
    """Bytes to reserve for prefix and header of entries with these keys: enough for any offsets; a multiple of 4096."""
    text = sum(len(json.dumps(key)) for key in keys) + 21 * sum(ndims) + _SLOT * len(keys)
    return _round_up(_PREFIX + text + len(json.dumps(metadata)) + 32, BLOCK)


def build_header(entries: Sequence[Entry], metadata: dict[str, str], reserved: int) -> bytes:
    """Prefix and header, exactly `reserved` bytes long. The entries must lie side by side from 0."""
    table: dict[str, Any] = {"__metadata__": metadata}
    for entry in entries:
        table[entry.key] = {"dtype": entry.tag, "shape": list(entry.shape), "data_offsets": [entry.start, entry.stop]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    room = reserved - _PREFIX
    if len(text) > room:
        raise ValueError(f"header of {len(text)} bytes in a reserve of {room}")
    return struct.pack("<Q", room) + text.ljust(room)


def header_length(prefix: bytes, file_bytes: int, path: str) -> int:
    """Bytes of prefix and header, from the first 8 bytes of a file of `file_bytes`.

    Raises:
        Corrupt: the file is shorter than it claims, or the claim is beyond what safetensors allows.
    """
    if len(prefix) < _PREFIX:
        raise Corrupt(f"{path} has {file_bytes} bytes; a safetensors file has at least 8: it was truncated", file=path, offset=0)
    length = int(struct.unpack("<Q", prefix[:_PREFIX])[0])
    if length > _READ_LIMIT or _PREFIX + length > file_bytes:
        raise Corrupt(f"{path} claims a header of {length} bytes in a file of {file_bytes}", file=path, offset=0)
    return _PREFIX + length


def parse_header(head: bytes, file_bytes: int, path: str) -> tuple[list[Entry], dict[str, str]]:
    """Entries in file order, and the metadata, with every rule of safetensors checked.

    Args:
        head: prefix and header, of the length that `header_length` gives.
    Raises:
        Corrupt: not JSON, a name twice, a size that contradicts dtype and shape, holes, overlap, or bytes left over.
    """

    def refuse(why: str) -> Corrupt:
        return Corrupt(f"the header of {path} is not valid safetensors: {why}", file=path, offset=0)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise refuse("a name stands in it twice")
        return found

    try:
        table = json.loads(head[_PREFIX:].decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise refuse(str(error)) from error
    if not isinstance(table, dict):
        raise refuse("it is not an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise refuse("__metadata__ is not an object of strings")
    entries = []
    for key, slot in table.items():
        try:
            tag, shape, (start, stop) = slot["dtype"], tuple(slot["shape"]), slot["data_offsets"]
            count = 1
            for dim in shape:
                if type(dim) is not int or dim < 0:
                    raise refuse(f"{key} has shape {shape}")
                count = min(count * dim, _READ_LIMIT**3)  # beyond any file; kept small, since headers may lie
            if type(start) is not int or type(stop) is not int or not 0 <= start <= stop:
                raise refuse(f"{key} has offsets {start}, {stop}")
            if count * _TAG_BITS[tag] != (stop - start) * 8:
                raise refuse(f"{key} has {stop - start} bytes for {tag} {list(shape)}")
        except (KeyError, TypeError, ValueError) as error:
            raise refuse(f"entry {key}: {error!r}") from error
        entries.append(Entry(key, tag, shape, start, stop))
    entries.sort(key=lambda e: (e.start, e.stop))
    at = 0
    for entry in entries:
        if entry.start != at:
            raise refuse(f"{entry.key} begins at {entry.start} where {at} was expected: entries overlap or leave a hole")
        at = entry.stop
    if len(head) + at != file_bytes:
        raise refuse(f"it describes {len(head) + at} bytes, the file has {file_bytes}")
    return entries, metadata


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
