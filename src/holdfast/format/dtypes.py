"""Dtypes by name: item size, the safetensors tag, and the numpy dtype that carries their bits.

The logical name is torch's without its prefix (`bfloat16`, `float8_e4m3fn`). A dtype without a safetensors tag is stored as
U8 entries; its logical name is in the index.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import Unsupported


@dataclass(frozen=True, slots=True)
class Dtype:
    name: str
    itemsize: int
    """Bytes for each element."""
    tag: str | None
    """safetensors' name, or None where it has none."""
    carrier: str
    """The numpy dtype, little endian, whose elements have the same bits."""
    is_numpy: bool
    """Whether the carrier also means the same numbers."""


_TABLE = [
    Dtype("float64", 8, "F64", "<f8", True),
    Dtype("float32", 4, "F32", "<f4", True),
    Dtype("float16", 2, "F16", "<f2", True),
    Dtype("bfloat16", 2, "BF16", "<u2", False),
    Dtype("float8_e4m3fn", 1, "F8_E4M3", "|u1", False),
    Dtype("float8_e5m2", 1, "F8_E5M2", "|u1", False),
    Dtype("float8_e4m3fnuz", 1, None, "|u1", False),
    Dtype("float8_e5m2fnuz", 1, None, "|u1", False),
    Dtype("float8_e8m0fnu", 1, "F8_E8M0", "|u1", False),
    Dtype("complex128", 16, None, "<c16", True),
    Dtype("complex64", 8, "C64", "<c8", True),
    Dtype("int64", 8, "I64", "<i8", True),
    Dtype("int32", 4, "I32", "<i4", True),
    Dtype("int16", 2, "I16", "<i2", True),
    Dtype("int8", 1, "I8", "|i1", True),
    Dtype("uint64", 8, "U64", "<u8", True),
    Dtype("uint32", 4, "U32", "<u4", True),
    Dtype("uint16", 2, "U16", "<u2", True),
    Dtype("uint8", 1, "U8", "|u1", True),
    Dtype("bool", 1, "BOOL", "|b1", True),
]
BY_NAME = {d.name: d for d in _TABLE}
BY_TAG = {d.tag: d for d in _TABLE if d.tag is not None}


def dtype(name: str) -> Dtype:
    """The dtype called `name`.

    Raises:
        Unsupported: holdfast has no stored form for it.
    """
    try:
        return BY_NAME[name]
    except KeyError:
        raise Unsupported(f"dtype {name} has no stored form; convert the tensor to one of {', '.join(BY_NAME)}") from None
