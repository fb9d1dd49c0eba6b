"""The codec `int8`: a lossy one, for optimizer moments. A byte for each number, and one scale for each block of 256.

The error of a number is at most 1/254 of the largest magnitude in its block, besides the rounding to its dtype. Numbers of
which none is negative, as second moments are, are coded by the square of what the byte says: their roots, by which an optimizer
divides, keep the precision that first moments have, and none but 0 becomes 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import Corrupt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

BLOCK = 256
"""Items that share a scale."""
HEADER = 4
LINEAR, SQUARE = 0, 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ERROR = 1 / 254
"""Of the largest magnitude of the block."""

_LINEAR_VALUES = (np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) / np.float32(127)).astype(np.float32)
_SQUARE_VALUES = ((np.arange(256) / 255) ** 2).astype(np.float32)


def stored_bytes(raw_bytes: int, dtype: str) -> int:
    items = raw_bytes // ITEM_BYTES[dtype]
    return HEADER + 4 * -(-items // BLOCK) + items


def encode(raw: Any, dtype: str) -> Bytes | None:
    """The stored bytes of `raw` (bytes-like, whole items), or None where a number is not finite and has no such form."""
    numbers = _numbers(np.frombuffer(raw, np.uint8), dtype)
    if not np.isfinite(numbers).all():
        return None
    padded = np.zeros(-(-len(numbers) // BLOCK) * BLOCK, np.float32)
    padded[: len(numbers)] = numbers
    blocks = padded.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, initial=0)
    with np.errstate(under="ignore"):
        share = blocks / np.where(scale > 0, scale, 1)[:, None]
    law = SQUARE if not len(numbers) or numbers.min() >= 0 else LINEAR
    if law == SQUARE:
        codes = np.rint(np.sqrt(share) * 255).astype(np.uint8)
        np.maximum(codes, blocks > 0, out=codes)
    else:
        codes = np.rint(share * 127).astype(np.int8).view(np.uint8)
    head = np.array([law, 0, 0, 0], np.uint8)
    return np.concatenate([head, scale.astype("<f4").view(np.uint8), codes.reshape(-1)[: len(numbers)]])


def decode(stored: Any, raw_bytes: int, dtype: str) -> Bytes:
    """The raw bytes of the numbers that the codes stand for, in the dtype that they had.

    Raises:
        Corrupt: the stored bytes are not the coded form of so many bytes.
    """
    data = np.frombuffer(stored, np.uint8)
    items, rest = divmod(raw_bytes, ITEM_BYTES[dtype])
    if rest or len(data) != stored_bytes(raw_bytes, dtype):
        raise Corrupt(f"int8 of {len(data)} bytes where {raw_bytes} bytes of {dtype} have {stored_bytes(raw_bytes, dtype)}")
    if data[0] > SQUARE or data[1:HEADER].any():
        raise Corrupt(f"int8 with the unknown law {data[:HEADER].tobytes().hex()}")
    blocks = -(-items // BLOCK)
    scale = np.frombuffer(data[HEADER : HEADER + 4 * blocks].tobytes(), "<f4")
    if not np.isfinite(scale).all():
        raise Corrupt("int8 with a scale that is not finite")
    values = (_SQUARE_VALUES if data[0] == SQUARE else _LINEAR_VALUES)[data[HEADER + 4 * blocks :]]
    with np.errstate(under="ignore", over="ignore"):  # damaged scales may say anything
        return _raw(values * np.repeat(scale, BLOCK)[:items], dtype)


def _numbers(raw: Bytes, dtype: str) -> Floats:
    if dtype == "float32":
        return raw.view("<f4")
    if dtype == "float16":
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _raw(numbers: Floats, dtype: str) -> Bytes:
    if dtype == "float32":
        return numbers.astype("<f4", copy=False).view(np.uint8)
    if dtype == "float16":
        return numbers.astype("<f2").view(np.uint8)
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)  # to the nearest, ties to even
