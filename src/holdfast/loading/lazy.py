"""A tensor of an open checkpoint that is read when it is sliced."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..format.index import TensorRow

if TYPE_CHECKING:
    import torch

    from .checkpoint import Checkpoint


class LazyTensor:
    """A stored tensor, unread. Slicing reads; a slice of the first dimension reads only the chunks that hold it.

    Attributes:
        name; shape: global; dtype: its name, as in torch without the prefix; nbytes: raw bytes; role; owner: row or -1.
    """

    def __init__(self, checkpoint: Checkpoint, row: TensorRow) -> None:
        self._checkpoint, self._row = checkpoint, row
        self.name, self.shape, self.dtype, self.nbytes = row.name, row.shape, row.dtype.name, row.nbytes
        self.role = row.role

    def __repr__(self) -> str:
        return f"LazyTensor({self.name}, {self.dtype}, {list(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def alias_of(self) -> str | None:
        """The tensor whose memory it shares, or None."""
        canonical = self._checkpoint.index.canonical(self._row)
        return None if canonical.row == self._row.row else canonical.name

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Read and index as a torch tensor would, on the CPU.

        Raises:
            Corrupt: the bytes are not what was captured. IndexError: as torch.
        """
        from ..tensors import from_bytes, torch_dtype

        low, high, rest = self._rows(key)
        raw = self._read(low, high)
        shape = (high - low, *self.shape[1:]) if self.shape else ()
        tensor = from_bytes(raw, torch_dtype(self.dtype)).reshape(shape)
        return tensor[rest]

    def carrier(self, low: int = 0, high: int | None = None) -> np.ndarray:
        """Rows `low` to `high` as a numpy array of the dtype's carrier: the same bits, without torch."""
        high = (self.shape[0] if self.shape else 1) if high is None else high
        shape = (high - low, *self.shape[1:]) if self.shape else ()
        return self._read(low, high).view(self._row.dtype.carrier).reshape(shape)

    def _read(self, low: int, high: int) -> np.ndarray:
        row_bytes = math.prod(self.shape[1:]) * self._row.dtype.itemsize
        return self._checkpoint.read_bytes(self._row, low * row_bytes, high * row_bytes)

    def _rows(self, key: Any) -> tuple[int, int, Any]:
        """First and last row that `key` needs, and the key for those rows alone."""
        keys = key if isinstance(key, tuple) else (key,)
        if not self.shape:
            return 0, 1, key
        first, count = keys[0] if keys else Ellipsis, self.shape[0]
        if type(first) is int and -count <= first < count:
            return first % count, first % count + 1, (0, *keys[1:])
        if isinstance(first, slice) and first.step in (None, 1):
            low, high, _ = first.indices(count)
            return low, max(low, high), (slice(None), *keys[1:])
        return 0, count, key
