"""A stored checkpoint as the contents of a new step: what copying and ageing write from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..format.index import TensorRow
from ..run.contents import Contents, TensorItem
from .checkpoint import Checkpoint
from .reading import Bytes


class StoredSource:
    """The bytes of a stored tensor, read when asked for and checked."""

    def __init__(self, checkpoint: Checkpoint, tensor: TensorRow) -> None:
        self._checkpoint, self._tensor = checkpoint, tensor
        self._whole: Bytes | None = None
        self._is_cut = len(checkpoint.index.entries(tensor)) > 1
        self.nbytes = tensor.nbytes

    def copy_into(self, start: int, out: Bytes) -> None:
        if self._is_cut and self._whole is None:
            self._whole = self._checkpoint.read_bytes(self._tensor)
        if self._whole is not None:
            np.copyto(out, self._whole[start : start + len(out)])
            if start + len(out) == self.nbytes:
                self._whole = None
        else:
            np.copyto(out, self._checkpoint.read_bytes(self._tensor, start, start + len(out)))


def contents_of_stored(checkpoint: Checkpoint, wants: Callable[[str], bool] = lambda role: True) -> Contents:
    """The contents of a stored checkpoint, or of those roles of it that are wanted."""
    index = checkpoint.index
    rows = [t for t in index.tensors() if wants(t.role)]
    canonical: dict[int, str] = {}
    items = []
    order = index.column("tensor.order", 0, len(index))
    for tensor in sorted(rows, key=lambda t: int(order[t.row])):
        holder = index.canonical(tensor)
        first = canonical.setdefault(holder.row, tensor.name)
        items.append(
            TensorItem(
                tensor.name, tensor.path, tensor.dtype.name, tensor.shape, tensor.role,
                None if first != tensor.name else StoredSource(checkpoint, holder),
                str(index.names[tensor.owner]) if tensor.owner >= 0 else None,
                None if first == tensor.name else first,
            )
        )  # fmt: skip
    commit = checkpoint.commit
    values = [pair for pair in commit.values if wants(pair[0][0])]
    by_rank = {rank: [pair for pair in pairs if wants(pair[0][0])] for rank, pairs in commit.rank_values.items()}
    return Contents(items, values, by_rank, {role: kind for role, kind in commit.roles.items() if wants(role)})
