"""Codecs: how a chunk's raw bytes are coded in a data file. Decoding gives the raw bytes or an error.

A codec is written in the index as (name, version, parameters). Readers refuse what they do not know of these. All are lossless
but `int8`, whose raw bytes are, for whoever reads and checks them, those that decoding gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..errors import Corrupt, Unsupported


@dataclass(frozen=True, slots=True)
class Codec:
    """One row of the index's codec table."""

    name: str = "raw"
    version: int = 1
    parameters: str = ""
    """JSON, or empty. Of `planes`: the item size in bytes. Of `int8`: the dtype, in quotes."""
    level: int = field(default=1, compare=False)
    """How hard a writer of `zstd` searches. It is not in the index: frames of all levels are read alike."""

    @property
    def is_lossy(self) -> bool:
        return self.name == "int8"


RAW = Codec()
ZSTD = Codec("zstd")
_PLANES = {str(size): size for size in (2, 4, 8)}
_INT8 = {f'"{name}"': name for name in ("float32", "bfloat16", "float16")}
FOR_EVER = frozenset({"raw", "zstd"})
"""Names of the codecs that steps may have that are kept for ever."""


def zstd(level: int) -> Codec:
    """`zstd`, written at a level of the zstd library."""
    return Codec("zstd", level=level)


def planes(item_bytes: int) -> Codec:
    """`planes` for items of 2, 4 or 8 bytes."""
    return Codec("planes", 1, str(item_bytes))


def int8(dtype: str) -> Codec:
    """`int8` for float32, bfloat16 or float16."""
    return Codec("int8", 1, f'"{dtype}"')


def encode(codec: Codec, raw: Any, out: Any = None) -> Any:
    """The stored bytes of `raw` (bytes-like); None where the codec has no form for these.

    Args:
        out: a uint8 array, longer than `raw` by 1024 and aligned to 8 bytes, that the codec may use for what it returns.
    """
    known(codec)
    if codec.name == "planes":
        from .planes import encode as encode_planes

        return encode_planes(raw, _PLANES[codec.parameters], out)
    if codec.name == "int8":
        from .int8 import encode as encode_int8

        return encode_int8(raw, _INT8[codec.parameters])
    if codec.name == "zstd":
        from .frames import compress

        return compress(raw, codec.level)
    return raw


def decode(codec: Codec, stored: Any, raw_bytes: int) -> Any:
    """The raw bytes of which `stored` is the coded form: bytes-like, exactly `raw_bytes` long.

    Raises:
        Unsupported: unknown codec.  Corrupt: the stored bytes do not decode to that many bytes.
    """
    known(codec)
    if codec.name == "planes":
        from .planes import decode as decode_planes

        return decode_planes(stored, raw_bytes, _PLANES[codec.parameters])
    if codec.name == "int8":
        from .int8 import decode as decode_int8

        return decode_int8(stored, raw_bytes, _INT8[codec.parameters])
    if codec.name == "zstd":
        from .frames import decompress

        return decompress(stored, raw_bytes)
    if len(stored) != raw_bytes:
        raise Corrupt(f"raw bytes are {len(stored)} where the index says {raw_bytes}")
    return stored


def known(codec: Codec) -> None:
    """Raises:
    Unsupported: this version cannot decode it.
    """
    parameters = {"raw": {""}, "zstd": {""}, "planes": set(_PLANES), "int8": set(_INT8)}.get(codec.name)
    if parameters is None or codec.version != 1 or codec.parameters not in parameters:
        told = f" with parameters {codec.parameters!r}" if codec.parameters else ""
        raise Unsupported(f"codec {codec.name} version {codec.version}{told} is not known here; upgrade holdfast to read it")
