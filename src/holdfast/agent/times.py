"""What the time of one save went into, on the ranks and at the writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Times:
    """Of one version.

    Attributes:
        began: unix seconds at which the first rank's `step` was called.
        by_rank: what each rank has told of its capture: [name, start, seconds, bytes, lane] each.
    """

    began: float = 0.0
    by_rank: dict[int, list[Any]] = field(default_factory=dict)

    def captured(self, rank: int, phases: list[Any]) -> None:
        self.by_rank[rank] = phases

    def pruned(self, why: str) -> None:
        pass
