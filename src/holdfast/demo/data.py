"""Real text that every machine with Python has: the sources of its standard library, as bytes, shuffled, resumable.

The order of the samples is a function of the seed and the epoch alone, so the position is one number: samples consumed.
Restoring that number restores the data exactly; nothing has to be skipped or read again.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIMIT_BYTES = 4 << 20
"""How much of the standard library is read: enough for several minutes, little enough to read at once."""


def standard_library(limit_bytes: int = LIMIT_BYTES) -> bytes:
    """The top-level modules of this Python's standard library, in order of name, cut at `limit_bytes`."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return bytes(text[:limit_bytes])


class Text:
    """Windows of `context + 1` bytes, in an order shuffled anew for each epoch.

    `batch()` consumes samples; `state_dict()` is the position after them.
    """

    def __init__(self, text: bytes, *, context: int, batch_size: int, seed: int) -> None:
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, context)
        self.batch_size = batch_size
        self.seed = seed
        self.consumed = 0
        """Samples handed out since the first epoch began."""
        self._digest = hashlib.sha256(text).hexdigest()
        self._orders: dict[int, Tensor] = {}

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self.windows)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The next inputs and targets, int64 of shape (batch_size, context); a batch may span two epochs."""
        places = torch.stack([self._place(self.consumed + i) for i in range(self.batch_size)])
        self.consumed += self.batch_size
        tokens = self.windows[places].long()
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "consumed": self.consumed, "text": self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the stored position.

        Raises:
            ValueError: the position was taken in another text, where it would mean other samples.
        """
        if state["text"] != self._digest:
            raise ValueError("the stored position belongs to another text: was Python updated between the two starts?")
        self.seed, self.consumed = state["seed"], state["consumed"]
        self._orders.clear()

    def _place(self, sample: int) -> Tensor:
        epoch, index = divmod(sample, len(self))
        return self._permutation(epoch)[index]

    def _permutation(self, epoch: int) -> Tensor:
        """The order of one epoch. It has a generator of its own, so that it costs the model's generator no draw."""
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._orders = {epoch: torch.randperm(len(self), generator=generator)}
        return self._orders[epoch]
