"""Records of the times of saves, as an agent would keep them, for the commands that show them."""

from __future__ import annotations

from typing import Any

from holdfast.run.timings import AGENT, TRAINER, Phase, RankPhases, SaveTimes

BEGAN = 1_700_000_000.0
INTERVAL = 60.0
GB = 10**9


def save_times(
    number: int, *, ranks: int = 4, slow_rank: int | None = 2, write: float = 1.0, node: str = "node-a", **fields: Any
) -> SaveTimes:
    """The record of save `number`, of step 100 x number: captures of 0.2 s (0.6 s on the slow rank), then the agent's work."""
    began = BEGAN + number * INTERVAL
    captures = [0.6 if rank == slow_rank else 0.2 for rank in range(ranks)]
    longest = max(captures, default=0.0)
    done = [
        RankPhases(
            rank,
            node,
            (
                Phase("capture", began, seconds, GB // ranks),
                Phase("barrier", began + 0.05, 0.01 * (rank + 1), lane=TRAINER),
                Phase("wait", began + seconds, longest - seconds),
            ),
        )
        for rank, seconds in enumerate(captures)
    ]
    at = began + longest
    work = (Phase("write", at, write, GB), Phase("fsync", at + write, 0.1), Phase("commit", at + write + 0.1, 0.05))
    kept = {
        "step": 100 * number,
        "attempt": 1,
        "began": began,
        "ended": at + write + 0.15,
        "ranks": (*done, RankPhases(AGENT, node, work)),
        "raw_bytes": 2 * GB,
        "new_bytes": GB,
        "stored_ratio": 0.5,
    }
    return SaveTimes(**(kept | fields))
