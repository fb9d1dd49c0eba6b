"""Zstandard frames: compressors kept for each thread, and frames opened without believing what they say of their size."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import Corrupt

_kept = threading.local()


def compress(data: Any, level: int = 1) -> bytes:
    """One frame, for bytes of any kind."""
    return bytes(_compressor(level).compress(data))


def compress_symbols(data: Any) -> bytes:
    """One frame for bytes that are independent symbols, as exponents are: entropy coding, with hardly any search for matches.

    Against level 1 it is two to three times as fast on the exponents of trained weights and first moments, and as small.
    """
    return bytes(_compressor(None).compress(data))


def _compressor(level: int | None) -> Any:
    """This thread's compressor of a level, or of symbols: none is for two threads, and they cost more to make than to use."""
    import zstandard

    kept = _kept.__dict__.setdefault("compressors", {})
    if level not in kept:
        if level is not None:
            kept[level] = zstandard.ZstdCompressor(level=level)
        else:
            # a target length of 0 is what keeps literals entropy-coded with the fast strategy
            parameters = zstandard.ZstdCompressionParameters(
                strategy=zstandard.STRATEGY_FAST,
                window_log=17,
                hash_log=6,
                chain_log=6,
                search_log=1,
                min_match=7,
                target_length=0,
            )
            kept[level] = zstandard.ZstdCompressor(compression_params=parameters)
    return kept[level]


def decompress(frame: Any, nbytes: int) -> bytes:
    """The content of a frame, which must be `nbytes` long; no more memory than that is taken.

    Raises:
        Corrupt: it is no frame, or of another length.
    """
    import zstandard

    try:
        promised = zstandard.frame_content_size(frame)
        if promised == nbytes and nbytes:
            content = bytes(_decompressor().decompress(frame))
        elif promised in (nbytes, -1):
            with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
                content = bytes(reader.read(nbytes + 1))
        else:
            raise Corrupt(f"a zstd frame of {promised} bytes where the index says {nbytes}")
    except zstandard.ZstdError as error:
        raise Corrupt(f"zstd: {error}") from error
    if len(content) != nbytes:
        raise Corrupt(f"a zstd frame gave {len(content)} bytes where the index says {nbytes}")
    return content


def _decompressor() -> Any:
    import zstandard

    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    return _kept.decompressor
