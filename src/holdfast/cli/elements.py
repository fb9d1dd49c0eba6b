"""The elements of stored tensors as numbers, piece by piece, without torch: bfloat16 by shifting, 8-bit floats by a table."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..format.dtypes import Dtype
from ..format.index import MAX_CHUNK_BYTES, TensorRow
from ..loading.checkpoint import Checkpoint

Bits = npt.NDArray[Any]
"""Elements as unsigned integers; those of 16 bytes as pairs of uint64."""
Numbers = npt.NDArray[Any]
"""float64, int64, uint64 or complex128: exactly the values of the elements."""

_BLOCK_ELEMENTS = 1 << 18
_WIDEST = {"f": np.float64, "c": np.complex128, "u": np.uint64, "i": np.int64, "b": np.uint64}
_MINIFLOATS = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
}
"""Exponent bits, mantissa bits, bias. `fn`: no infinities, all ones is NaN; `fnuz`: no -0 either, its code is the NaN."""


def pieces(checkpoint: Checkpoint, tensor: TensorRow) -> Iterator[npt.NDArray[np.uint8]]:
    """The raw row-major bytes of a tensor, checked, whole chunks at a time; never more than 64 MiB unless it was cut.

    Raises:
        Corrupt: naming the place.
    """
    holder = checkpoint.index.canonical(tensor)
    if len(checkpoint.index.entries(holder)) > 1:  # put together from its boxes: the whole is read at once anyway
        yield checkpoint.read_bytes(holder)
        return
    for start in range(0, holder.nbytes, MAX_CHUNK_BYTES):
        yield checkpoint.read_bytes(holder, start, min(start + MAX_CHUNK_BYTES, holder.nbytes))


def blocks(raw: npt.NDArray[np.uint8], itemsize: int) -> Iterator[npt.NDArray[np.uint8]]:
    """`raw` in pieces of so many elements that numbers made of one stay in the cache."""
    for start in range(0, len(raw), _BLOCK_ELEMENTS * itemsize):
        yield raw[start : start + _BLOCK_ELEMENTS * itemsize]


def numbers(raw: npt.NDArray[np.uint8], dtype: Dtype) -> Numbers:
    """The values of the elements whose bytes are `raw`."""
    if dtype.name == "bfloat16":
        values: Numbers = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    elif not dtype.is_numpy:
        values = _table(dtype.name)[raw]
    else:
        stored = raw.view(dtype.carrier)
        values = stored.astype(_WIDEST[stored.dtype.kind])
    return values


@functools.cache
def _table(name: str) -> npt.NDArray[np.float64]:
    """The value of each of the 256 codes of an 8-bit float."""
    if name == "float8_e8m0fnu":
        return np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])
    exponent_bits, mantissa_bits, bias = _MINIFLOATS[name]
    return np.array([_minifloat(code, name, exponent_bits, mantissa_bits, bias) for code in range(256)])


def _minifloat(code: int, name: str, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    largest = (1 << exponent_bits) - 1
    exponent = code >> mantissa_bits & largest
    mantissa = code & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    if name.endswith("fnuz"):
        if code == 0x80:
            return float("nan")
    elif name.endswith("fn"):
        if code & 0x7F == 0x7F:
            return float("nan")
    elif exponent == largest:
        return float("nan") if mantissa else sign * float("inf")
    return float(sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction))
