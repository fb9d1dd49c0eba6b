"""Proof that replicas are equal: digests of what several ranks hold under one name without having declared it.

A steady save compares one digest for each set of holders. Only when two differ are the digests of single tensors asked for, so
that the error can name the tensor and the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import Refused
from ..format.digest import Running, hex_digest
from .image import Source

_PIECE_BYTES = 4 << 20


def source_digest(source: Source) -> str:
    """xxh3-128 of all bytes of a source, 32 hex digits."""
    view = getattr(source, "view", lambda start, nbytes: None)(0, source.nbytes)
    if view is not None:
        return hex_digest(view)
    running = Running()
    buffer = np.empty(min(source.nbytes, _PIECE_BYTES), np.uint8)
    for start in range(0, source.nbytes, _PIECE_BYTES):
        part = buffer[: min(_PIECE_BYTES, source.nbytes - start)]
        source.copy_into(start, part)
        running.update(part)
    return running.hex()


def digest_by_holders(digests: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, str]:
    """One digest for each set of holders, from (holders, digest) by name."""
    found: dict[tuple[int, ...], Running] = {}
    for name in sorted(digests):
        holders, digest = digests[name]
        found.setdefault(holders, Running()).update(f"{name}={digest};".encode())
    return {hex_digest(repr(holders).encode()): running.hex() for holders, running in found.items()}


def differing(ranks: Sequence[int], said: Sequence[Mapping[str, str]]) -> set[int]:
    """The ranks of those sets of holders that do not all say the same; empty where all replicas are equal."""
    first: dict[str, tuple[int, str]] = {}
    found: set[int] = set()
    for rank, proofs in zip(ranks, said, strict=True):
        for holders, digest in proofs.items():
            other, known = first.setdefault(holders, (rank, digest))
            if known != digest:
                found |= {rank, other}
    return found


def explain(ranks: Sequence[int], said: Sequence[Mapping[str, str]]) -> Refused:
    """The error for replicas that differ, from the digests of single tensors by name.

    Args:
        said: by rank; empty for a rank that was not asked.
    """
    by_name: dict[str, dict[str, list[int]]] = {}
    for rank, digests in zip(ranks, said, strict=True):
        for name, digest in digests.items():
            by_name.setdefault(name, {}).setdefault(digest, []).append(rank)
    lines = []
    for name, versions in sorted(by_name.items()):
        if len(versions) > 1:
            lines.append(f"{name} (" + ", ".join(f"rank {_some(v)}" for v in versions.values()) + " each hold other bytes)")
    more = f" and {len(lines) - 8} more" if len(lines) > 8 else ""
    return Refused(
        f"plain tensors of one name differ between ranks, and nothing declares that they should: {'; '.join(lines[:8])}{more}. "
        "Give different tensors different names, make replicas equal, or wrap what belongs to each rank in holdfast.PerRank"
    )


def _some(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
