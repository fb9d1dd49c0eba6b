"""Proof that what several ranks hold under one name, undeclared, is the same: from the digests that came with the captures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..run.proof import differing, digest_by_holders, explain

Proofs = Mapping[str, tuple[tuple[int, ...], str]]


def check_replicas(ranks: Sequence[int], proofs: Sequence[Proofs]) -> None:
    """Args:
        proofs: by rank: holders and digest of each name.
    Raises:
        Refused: naming the tensors, the ranks, and `PerRank`.
    """
    asked = differing(ranks, [digest_by_holders(one) for one in proofs])
    if asked:
        names = [
            {name: digest for name, (_, digest) in one.items()} if rank in asked else {}
            for rank, one in zip(ranks, proofs, strict=True)
        ]
        raise explain(ranks, names)
