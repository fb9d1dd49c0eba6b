"""What tells that a tensor has changed before it was copied: noted at the call, looked at afterwards.

Three things: torch's version counter, which in-place operations raise, though not all of them; bytes at three places of each
tensor, which whatever writes the whole tensor changes; and, of a megabyte that rotates from capture to capture, a digest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..agent.arena import Bytes
from ..format.digest import digest
from .rows import Row, probes_of, sample


class Evidence:
    """Args:
    rows: that will be copied in the background. turn: rotates the sample.
    """

    def __init__(self, rows: Sequence[Row], turn: int) -> None:
        self._lazy = rows
        self._versions = {row.ready: tensor._version for row in rows if (tensor := row.tensor) is not None}
        self._rows = [row for row in rows if row.bytes is not None]
        self._probes = _joined([probe for row in self._rows for probe in row.probes])
        self._sample = [
            (part, digest(part.row.bytes[part.start : part.start + part.nbytes])) for part in sample(self._rows, turn)
        ]

    def has_moved(self, row: Row) -> bool:
        """Whether torch says that a row's tensor was changed since the call; asked right after it was copied."""
        tensor = row.tensor
        return tensor is not None and tensor._version != self._versions.get(row.ready, tensor._version)

    def moved(self) -> list[Row]:
        """All rows of which torch says so."""
        return [row for row in self._lazy if self.has_moved(row)]

    def differing(self, slot: Bytes) -> list[Row]:
        """Rows whose copy is not what was noted at the call."""
        found = []
        copied = [probe for row in self._rows for probe in probes_of(slot[row.at : row.at + row.nbytes])]
        if not np.array_equal(self._probes, _joined(copied)):
            at = 0
            for row in self._rows:
                mine = _joined(list(probes_of(slot[row.at : row.at + row.nbytes])))
                if not np.array_equal(self._probes[at : at + len(mine)], mine):
                    found.append(row)
                at += len(mine)
        for (row, start, nbytes), known in self._sample:
            first = row.at + start
            if row not in found and digest(slot[first : first + nbytes]) != known:
                found.append(row)
        return found


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
