"""The step before, as what a new step may refer to instead of writing the same bytes again."""

from __future__ import annotations

import numpy as np

from ..format.digest import digest
from ..format.index import XXH3_128, Chunks, Index
from .contents import TensorItem
from .image import Source

_MIN_LIVE_SHARE = 0.5
_PROBE_BYTES = 4096


class Base:
    """An earlier committed step of the same run.

    Args:
        probes: of its entries by `TensorItem.key`, if this process wrote it. A tensor whose probe differs is not read further.

    A file of which the earlier step uses less than half is mostly dead: what is unchanged in it is written anew, into a file
    of its own, so that the old one can be pruned.
    """

    def __init__(self, index: Index, probes: dict[tuple[str, tuple[int, ...]], bytes] | None = None) -> None:
        self.index = index
        self._probes = probes or {}
        self._files = index.files()
        live = np.zeros(len(self._files) + 1, np.int64)
        chunks = index.all_chunks()
        np.add.at(live, chunks.file.astype(np.int64), chunks.stored_bytes.astype(np.int64))
        self._is_alive = [live[i] >= _MIN_LIVE_SHARE * (f.nbytes - f.header_bytes) for i, f in enumerate(self._files)]

    def unchanged(self, item: TensorItem) -> Chunks | None:
        """The chunks of this very tensor in the earlier step, if every byte is equal; read until the first difference."""
        if item.source is None:
            return None
        known = self._probes.get(item.key)
        if known is not None and known != probe(item.source):
            return None
        row = self.index.find(item.name)
        if row < 0:
            return None
        tensor = self.index.tensor(row)
        entries = self.index.entries(tensor)
        box = item.box or ((0,) * len(item.shape), item.shape)
        if tensor.dtype.name != item.dtype or tensor.shape != item.shape or tensor.alias >= 0:
            return None
        entry = next((e for e in entries if self.index.box(tensor, e) == box), None)
        if entry is None:
            return None
        chunks = self.index.chunks(entry, row)
        if (chunks.algorithm != XXH3_128).any() or any(self._files[f].is_foreign for f in chunks.file.tolist()):
            return None
        rows = zip(chunks.raw_start.tolist(), chunks.raw_bytes.tolist(), chunks.digest, strict=True)
        if all(_digest_of(item.source, start, nbytes) == wanted.tobytes() for start, nbytes, wanted in rows):
            return chunks
        return None

    def may_refer(self, chunks: Chunks) -> bool:
        """Whether all the files that hold these chunks are worth keeping."""
        return all(self._is_alive[f] for f in chunks.file.tolist())


def probe(source: Source) -> bytes:
    """A digest of the first bytes of a tensor: different ones prove a change, equal ones prove nothing."""
    return _digest_of(source, 0, min(source.nbytes, _PROBE_BYTES))


def _digest_of(source: Source, start: int, nbytes: int) -> bytes:
    view = getattr(source, "view", lambda start, nbytes: None)(start, nbytes)
    if view is None:
        view = np.empty(nbytes, np.uint8)
        source.copy_into(start, view)
    return digest(view)
