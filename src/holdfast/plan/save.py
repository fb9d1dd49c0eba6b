"""Who writes what: each rank computes its own share, alone, and all shares together are every byte once.

Boxes that exactly the same ranks hold make a bucket. Every one of those ranks knows the whole bucket, so that each cuts it into
equal runs of bytes in the same way and takes its own run. Large boxes are cut at a row; small ones are written whole by one.
Balanced by bytes within each bucket, and so over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..format.digest import digest
from ..layout.boxes import Box
from .image import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Holding:
    """One box that this rank holds of a tensor."""

    key: int
    """The caller's number for it."""
    name: str
    """Of the logical tensor."""
    box: Box
    itemsize: int
    holders: tuple[int, ...]
    """The ranks that hold this very box, ascending; this one among them."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.box[1]) * self.itemsize


@dataclass(frozen=True, slots=True)
class Share:
    """A box that this rank writes: a holding, or some rows of one."""

    key: int
    box: Box


def shares(holdings: Sequence[Holding], rank: int) -> list[Share]:
    """What `rank` writes of what it holds, in the order of the holdings. Deterministic: names and boxes decide, not order."""
    buckets: dict[tuple[int, ...], list[int]] = {}
    for number, holding in enumerate(holdings):
        buckets.setdefault(holding.holders, []).append(number)
    found: dict[int, Share] = {}
    for holders, members in buckets.items():
        if len(holders) == 1:
            found |= {i: Share(holdings[i].key, holdings[i].box) for i in members}
        else:
            members.sort(key=lambda i: (holdings[i].name, holdings[i].box))
            found |= dict(_cut([holdings[i] for i in members], members, holders.index(rank), len(holders)))
    return [found[i] for i in sorted(found)]


def _cut(bucket: list[Holding], numbers: list[int], position: int, ranks: int) -> list[tuple[int, Share]]:
    """The shares of one of the ranks that hold a bucket: (number of the holding, share) pairs."""
    sizes = np.array([h.nbytes for h in bucket], np.int64)
    stops = np.cumsum(sizes)
    total = int(stops[-1])
    turn = int.from_bytes(digest(bucket[0].name.encode())[:4], "big")  # else small buckets would all fall to the same rank
    slot = (position + turn) % ranks
    low, high = total * slot // ranks, total * (slot + 1) // ranks
    found = []
    first = int(np.searchsorted(stops, low, "right"))
    while first < len(bucket) and int(stops[first]) - int(sizes[first]) < high:
        holding, start = bucket[first], int(stops[first]) - int(sizes[first])
        if holding.nbytes and (box := _part(holding, low - start, high - start)):
            found.append((numbers[first], Share(holding.key, box)))
        first += 1
    if slot == 0:
        found += [(n, Share(h.key, h.box)) for n, h in zip(numbers, bucket, strict=True) if not h.nbytes]
    return found


def _part(holding: Holding, low: int, high: int) -> Box | None:
    """What of a box belongs to the run of bytes from `low` to `high` of it."""
    if holding.nbytes < 2 * CHUNK_BYTES:
        return holding.box if low <= holding.nbytes // 2 < high else None
    offset, extent = holding.box
    dim = next(d for d, n in enumerate(extent) if n > 1)
    row = holding.nbytes // extent[dim]
    first, last = (min(max(0, -(-at // row)), extent[dim]) for at in (low, high))
    if first >= last:
        return None
    cut = (*offset[:dim], offset[dim] + first, *offset[dim + 1 :])
    return cut, (*extent[:dim], last - first, *extent[dim + 1 :])
