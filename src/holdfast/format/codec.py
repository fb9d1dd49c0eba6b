"""Codecs: how a chunk's raw bytes are coded in a data file. Lossless; decoding gives the raw bytes or an error.

A codec is written in the index as (name, version, parameters). Readers refuse names and versions they do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import Corrupt, Unsupported


@dataclass(frozen=True, slots=True)
class Codec:
    """One row of the index's codec table."""

    name: str = "raw"
    version: int = 1
    parameters: str = ""
    """JSON, or empty."""


RAW = Codec()
ZSTD = Codec("zstd")


def encode(codec: Codec, raw: Any) -> Any:
    """The stored bytes of `raw` (bytes-like)."""
    return _pair(codec)[0](raw)


def decode(codec: Codec, stored: Any, raw_bytes: int) -> Any:
    """The raw bytes of which `stored` is the coded form: bytes-like, exactly `raw_bytes` long.

    Raises:
        Unsupported: unknown codec.  Corrupt: the stored bytes do not decode to that many bytes.
    """
    raw = _pair(codec)[1](stored, raw_bytes)
    if len(raw) != raw_bytes:
        raise Corrupt(f"{codec.name} decoded to {len(raw)} bytes where the index says {raw_bytes}")
    return raw


def _encode_zstd(raw: Any) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress(raw)


def _decode_zstd(stored: Any, raw_bytes: int) -> bytes:
    import zstandard

    try:
        promised = zstandard.frame_content_size(stored)
        if promised not in (raw_bytes, -1):
            raise Corrupt(f"a zstd frame of {promised} bytes where the index says {raw_bytes}")
        with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
            return reader.read(raw_bytes + 1)
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd: {error}") from error


_CODECS: dict[tuple[str, int], tuple[Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    ("raw", 1): (lambda raw: raw, lambda stored, raw_bytes: stored),
    ("zstd", 1): (_encode_zstd, _decode_zstd),
}


def known(codec: Codec) -> None:
    """Raises:
    Unsupported: this version cannot decode it.
    """
    _pair(codec)
    if codec.parameters:
        raise Unsupported(
            f"codec {codec.name} with parameters {codec.parameters!r} is not known here; upgrade holdfast to read it"
        )


def _pair(codec: Codec) -> tuple[Callable[[Any], Any], Callable[[Any, int], Any]]:
    try:
        return _CODECS[codec.name, codec.version]
    except KeyError:
        raise Unsupported(f"codec {codec.name} version {codec.version} is not known here; upgrade holdfast to read it") from None
