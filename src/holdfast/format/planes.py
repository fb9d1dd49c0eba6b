"""The codec `planes`: the bytes of each item apart, so that exponents, which repeat, can be entropy-coded without the mantissas.

Stored bytes: for each plane its length as an unsigned 32-bit integer; the planes, from the least to the most significant; the
bytes after the last whole item. A plane is a run of the bytes of each item (see WIDTHS), one item after the other. One that is as
long as that is not coded; a shorter one is a zstd frame. See docs/format.md.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt
from .frames import compress, compress_symbols, decompress

Bytes = npt.NDArray[np.uint8]

WIDTHS = {2: (1, 1), 4: (2, 1, 1), 8: (4, 2, 1, 1)}
"""By item size: the widths of the planes in bytes. In little-endian floats the exponent ends in the last; the first is noise,
unless the numbers were widened from a smaller type."""

_WORTH = 0.98
"""A plane is coded if that makes it this much shorter."""
_SAMPLE_ITEMS = 4096
_SAMPLES = 4


def bound(raw_bytes: int, item_bytes: int) -> int:
    """The most that coded bytes can take."""
    return raw_bytes + 4 * len(WIDTHS[item_bytes])


def encode(raw: Any, item_bytes: int, out: Bytes | None = None) -> Bytes:
    """The stored bytes of `raw` (bytes-like), in `out` if that is given: at least `bound` long, aligned to 8 bytes."""
    data = np.frombuffer(raw, np.uint8)
    widths = WIDTHS[item_bytes]
    items = len(data) // item_bytes
    out = np.empty(bound(len(data), item_bytes), np.uint8) if out is None else out
    at, start, lengths = 4 * len(widths), 0, []
    for width in widths:
        plane = _plane(data, items, item_bytes, start, width)
        coded = _coded(plane, is_exponent=start + width == item_bytes)
        length = items * width if coded is None else len(coded)
        if coded is None:
            np.copyto(out[at : at + length].view(f"V{width}"), plane)
        else:
            out[at : at + length] = np.frombuffer(coded, np.uint8)
        lengths.append(length)
        at, start = at + length, start + width
    tail = data[items * item_bytes :]
    out[at : at + len(tail)] = tail
    out[: 4 * len(widths)] = np.frombuffer(struct.pack(f"<{len(widths)}I", *lengths), np.uint8)
    return out[: at + len(tail)]


def decode(stored: Any, raw_bytes: int, item_bytes: int) -> Bytes:
    """The raw bytes; takes twice the memory of the chunk at most.

    Raises:
        Corrupt: the stored bytes are not the coded form of so many bytes.
    """
    data = np.frombuffer(stored, np.uint8)
    widths = WIDTHS[item_bytes]
    items = raw_bytes // item_bytes
    at, start = 4 * len(widths), 0
    if len(data) < at:
        raise Corrupt(f"planes of {len(data)} bytes are cut off in their lengths")
    lengths = struct.unpack(f"<{len(widths)}I", data[:at].tobytes())
    tail = raw_bytes - items * item_bytes
    if at + sum(lengths) + tail != len(data):
        raise Corrupt(f"planes of {', '.join(map(str, lengths))} bytes do not fill {len(data)} stored bytes")
    raw = np.empty(raw_bytes, np.uint8)
    for width, length in zip(widths, lengths, strict=True):
        part = data[at : at + length]
        if length > items * width:
            raise Corrupt(f"a plane of {length} bytes where {items * width} are the most")
        content = part if length == items * width else np.frombuffer(decompress(part, items * width), np.uint8)
        np.copyto(_plane(raw, items, item_bytes, start, width), content.view(f"V{width}"))
        at, start = at + length, start + width
    raw[items * item_bytes :] = data[at:]
    return raw


def _plane(data: Bytes, items: int, item_bytes: int, start: int, width: int) -> npt.NDArray[Any]:
    """The bytes `start` to `start + width` of each item, as a strided view."""
    return np.ndarray((items,), f"V{width}", data.data, start, (item_bytes,)) if items else np.empty(0, f"V{width}")


def _coded(plane: npt.NDArray[Any], is_exponent: bool) -> bytes | None:
    """A frame of the plane, if that is worth it. What looks like noise is not tried: three quarters of a tensor are."""
    if not _looks_worth_it(plane):
        return None
    content = np.ascontiguousarray(plane).view(np.uint8)
    coded = compress_symbols(content) if is_exponent else compress(content)
    return coded if len(coded) < _WORTH * len(content) else None


def _looks_worth_it(plane: npt.NDArray[Any]) -> bool:
    if len(plane) <= 2 * _SAMPLES * _SAMPLE_ITEMS:
        return len(plane) > 0
    starts = np.linspace(0, len(plane) - _SAMPLE_ITEMS, _SAMPLES).astype(int).tolist()
    sample = np.concatenate([plane[start : start + _SAMPLE_ITEMS] for start in starts]).view(np.uint8)
    return len(compress(sample)) < _WORTH * len(sample)
