"""The order of an epoch: a permutation of the sample numbers that depends on length, seed and epoch, and on nothing else.

It is computed where it is asked, a batch at a time, so an epoch of 10^12 samples costs no memory. It is our own (a Feistel
network with a walk along its cycles) because torch.randperm and numpy may change their streams with a version, and a resume
in the middle of an epoch would then lose and repeat samples. This algorithm never changes; another one gets another `KIND`.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import numpy.typing as npt

KIND = "feistel-1"
ROUNDS = 16
MAX_LENGTH = 1 << 60

_U64 = npt.NDArray[np.uint64]


class Order:
    """The order of one epoch.

    With length n, a = ceil(sqrt(n)) and b = ceil(n / a), a position x is the pair (x // b, x % b). Sixteen rounds add a keyed
    hash of one half to the other, modulo a and b in turn; what comes out at n or above goes through again. Fewer rounds are
    not uniform for a handful of samples. The keys are SHAKE-256 of the text below.
    """

    def __init__(self, length: int, seed: int, epoch: int, shuffle: bool) -> None:
        self._length = length
        self._shuffle = shuffle
        self._high = math.isqrt(length - 1) + 1
        self._low = -(-length // self._high)
        text = f"holdfast {KIND} seed {seed} epoch {epoch}"
        self._keys: _U64 = np.frombuffer(hashlib.shake_256(text.encode()).digest(8 * ROUNDS), "<u8").astype(np.uint64)

    def at(self, positions: npt.NDArray[np.int64]) -> list[int]:
        """The sample numbers at these positions of the epoch."""
        if not self._shuffle:
            return _as_list(positions)
        found = self._permuted(positions.astype(np.uint64))
        while (outside := found >= self._length).any():
            found[outside] = self._permuted(found[outside])
        return _as_list(found)

    def _permuted(self, x: _U64) -> _U64:
        """A permutation of the numbers below a * b."""
        high, low = x // np.uint64(self._low), x % np.uint64(self._low)
        for number, key in enumerate(self._keys):
            if number % 2 == 0:
                high = (high + _hashed(low, key) % np.uint64(self._high)) % np.uint64(self._high)
            else:
                low = (low + _hashed(high, key) % np.uint64(self._low)) % np.uint64(self._low)
        together: _U64 = high * np.uint64(self._low) + low
        return together


def _hashed(x: _U64, key: np.uint64) -> _U64:
    """The finaliser of splitmix64 over x ^ key; arrays of uint64 wrap silently."""
    x = x ^ key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: _U64 = x ^ (x >> np.uint64(31))
    return hashed


def _as_list(numbers: npt.NDArray[Any]) -> list[int]:
    return [int(n) for n in numbers.tolist()]
