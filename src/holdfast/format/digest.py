"""Digests: xxh3-128 of bytes, the content digest of a state, and the logical digest of a tensor.

Digests are 16 bytes, big endian as xxh3's canonical form; in JSON they are 32 hex digits. They find accidents, not attackers.
"""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash

DIGEST_BYTES = 16
ALGORITHM = "xxh3-128"


def digest(data: Any) -> bytes:
    """xxh3-128 of a bytes-like object: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def hex_digest(data: Any) -> str:
    """xxh3-128 of a bytes-like object: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


class Running:
    """xxh3-128 of bytes that come in pieces."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        self._state.update(data)

    def hex(self) -> str:
        return self._state.hexdigest()


# Two odd 64-bit constants from splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class LogicalDigest:
    """The digest of a tensor that does not depend on how it is cut.

    For each element, splitmix64's finaliser mixes (seed, global index, bits); the mixes are summed modulo 2**64, in two lanes
    with different seeds. The seeds come from dtype and shape. Pieces may be added in any order and from any process; sums add.
    """

    def __init__(self, dtype_name: str, shape: tuple[int, ...]) -> None:
        seed = hashlib.sha256(f"{dtype_name}:{','.join(map(str, shape))}".encode()).digest()
        self._seeds = (int.from_bytes(seed[:8], "little"), int.from_bytes(seed[8:16], "little"))
        self._sums = [0, 0]

    def add(self, bits: Any, start: int) -> None:
        """Add the elements `start`, `start+1`, ... in row-major order.

        Args:
            bits: numpy array of the elements' raw bits, any unsigned dtype, one element for each; 16-byte elements are given
                as uint64 of shape (n, 2).
            start: row-major index of the first element in the whole tensor.
        """
        import numpy as np

        for low in range(0, len(bits), 1 << 18):
            part = bits[low : low + (1 << 18)]
            index = np.arange(start + low, start + low + len(part), dtype=np.uint64)
            words = part.astype(np.uint64, copy=False)
            if words.ndim == 2:
                words = words[:, 0] ^ _mix(words[:, 1] + np.uint64(_GOLDEN))
            for lane, seed in enumerate(self._seeds):
                mixed = _mix(_mix(index * np.uint64(_GOLDEN) + np.uint64(seed)) ^ (words * np.uint64(_MIX_B)))
                self._sums[lane] = (self._sums[lane] + int(mixed.sum(dtype=np.uint64))) & _MASK

    def hex(self) -> str:
        """32 hex digits."""
        return f"{self._sums[0]:016x}{self._sums[1]:016x}"


def element_bits(raw: Any, itemsize: int) -> Any:
    """Raw bytes (a uint8 array) as elements of unsigned integers, for `LogicalDigest.add`."""
    import numpy as np

    return raw.view(np.uint64).reshape(-1, 2) if itemsize == 16 else raw.view(f"<u{itemsize}")


def _mix(x: Any) -> Any:
    import numpy as np

    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_A)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_B)
    return x ^ (x >> np.uint64(31))
