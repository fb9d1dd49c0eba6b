"""How many versions of the state memory is to hold."""

from __future__ import annotations

import re

MOST_VERSIONS = 3
"""Two that are complete, and the one that is being filled."""
_SHARE = 0.5
"""Of the memory that is free, by default."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*\Z", re.IGNORECASE)


def bytes_of(amount: int | str, what: str) -> int:
    """Bytes of a number or of "16GiB".

    Raises:
        ValueError: it is neither.
    """
    if isinstance(amount, int) and not isinstance(amount, bool) and amount >= 0:
        return amount
    match = _AMOUNT.match(amount) if isinstance(amount, str) else None
    if match is None:
        raise ValueError(f'{what}={amount!r}: bytes, or such as "16GiB"')
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def versions(version_bytes: int, ranks: int, memory: int | str, free_bytes: int) -> int:
    """How many versions fit: 0 to MOST_VERSIONS, of the part of the state of each of `ranks` ranks of this node.

    Args:
        version_bytes: of this rank's part. memory: "auto", or bytes for all ranks of the node. free_bytes: of the node.
    """
    budget = int(free_bytes * _SHARE) if memory == "auto" else bytes_of(memory, "memory")
    return min(MOST_VERSIONS, budget // max(1, ranks) // max(1, version_bytes))
