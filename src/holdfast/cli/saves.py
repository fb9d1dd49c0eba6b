"""The saves of a run, from the records of their times: one `Save` for each, whoever wrote records of it.

Seconds are of two kinds. A save's *own* seconds add up to its wall time: an instant in which several phases were under way, on
whatever ranks, is divided among them. A rank's seconds are what it spent, whatever the others did meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median

from ..run.timings import COMMITTED, FAILED, SKIPPED, TRAINER, Phase, RankPhases, SaveTimes

PHASES = ("capture", "barrier", "wait", "code", "write", "fsync", "commit", "prune")
"""In the order in which they are shown; others come after them."""
UNACCOUNTED = "unaccounted"
"""In place of a phase: time of a save in which none was under way."""
_ROUNDING = 1e-5
"""Seconds that get lost between times since 1970, which are known to a quarter of a microsecond."""
WAITING = "wait"
"""A rank in this phase waits for others: it is held up, and holds nobody up."""


@dataclass(frozen=True)
class Save:
    """One save, with the ranks of all of its records."""

    record: SaveTimes

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def attempt(self) -> int:
        return self.record.attempt

    @property
    def began(self) -> float:
        return self.record.began

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.record.seconds

    @property
    def is_committed(self) -> bool:
        return self.record.outcome == COMMITTED

    @property
    def is_failed(self) -> bool:
        """Neither committed nor left out on purpose."""
        return self.record.outcome not in (COMMITTED, SKIPPED)

    @cached_property
    def own_seconds(self) -> dict[str, float]:
        """Wall time by phase, with what is unaccounted; in the order in which phases are shown."""
        return _divide(self.record)

    @property
    def unaccounted(self) -> float:
        """Share of the wall time, 0 to 1, without any phase."""
        return self.own_seconds.get(UNACCOUNTED, 0.0) / self.seconds if self.seconds else 0.0

    @cached_property
    def blocked_seconds(self) -> float:
        """For how long it held up training: as long as the rank that it held up most, for which the others wait."""
        return max((sum(p.seconds for p in rank.phases if p.lane == TRAINER) for rank in self.record.ranks), default=0.0)


def saves_of(records: Iterable[SaveTimes]) -> list[Save]:
    """The saves that records tell of, in the order in which they began. Records of one step that overlap are of one save."""
    groups: list[list[SaveTimes]] = []
    for record in sorted(records, key=lambda r: (r.attempt, r.step, r.began)):
        last = groups[-1] if groups else []
        is_same = bool(last) and (last[0].attempt, last[0].step) == (record.attempt, record.step)
        if is_same and record.began <= max(other.ended for other in last):
            last.append(record)
        else:
            groups.append([record])
    return sorted((Save(_united(group)) for group in groups), key=lambda save: (save.began, save.step))


def _united(records: Sequence[SaveTimes]) -> SaveTimes:
    """One record for those that several nodes keep of one save."""
    if len(records) == 1:
        return records[0]
    new_bytes = sum(r.new_bytes for r in records)
    worst = min(records, key=lambda r: {FAILED: 0, SKIPPED: 1}.get(r.outcome, 2))
    return SaveTimes(
        step=worst.step,
        attempt=worst.attempt,
        outcome=worst.outcome,
        reason=worst.reason,
        began=min(r.began for r in records),
        ended=max(r.ended for r in records),
        raw_bytes=max(r.raw_bytes for r in records),
        new_bytes=new_bytes,
        stored_ratio=sum(r.stored_ratio * r.new_bytes for r in records) / new_bytes if new_bytes else worst.stored_ratio,
        ranks=tuple(rank for r in records for rank in r.ranks),
    )


def _divide(record: SaveTimes) -> dict[str, float]:
    """The record's wall time, divided among the phases under way at each instant."""
    edges: list[tuple[float, int, str]] = []
    for phase in _in_a_row(record.ranks):
        begin, end = max(phase.start, record.began), min(phase.start + phase.seconds, record.ended)
        if begin < end:
            edges += [(begin, 1, phase.name), (end, -1, phase.name)]
    shares: dict[str, float] = {}
    active: Counter[str] = Counter()
    for (at, change, name), (until, _, _) in pairwise([*sorted(edges), (record.ended, 0, "")]):
        active[name] += change
        under_way = sum(active.values())
        for other, count in active.items() if until > at and under_way else ():
            shares[other] = shares.get(other, 0.0) + (until - at) * count / under_way
    rest = record.seconds - sum(shares.values())
    if rest > _ROUNDING:
        shares[UNACCOUNTED] = shares.get(UNACCOUNTED, 0.0) + rest  # nobody keeps a phase from being called so
    return {name: shares[name] for name in in_order(shares) if shares[name] > 0}


def _in_a_row(ranks: Iterable[RankPhases]) -> Iterable[Phase]:
    return (phase for rank in ranks for phase in rank.phases if not phase.lane)


def in_order(names: Iterable[str]) -> list[str]:
    """Names of phases as they are shown: the known ones in the order of a save, others after them, what is unaccounted last."""
    known = {name: place for place, name in enumerate(PHASES)} | {UNACCOUNTED: len(PHASES) + 1}
    return sorted(set(names), key=lambda name: (known.get(name, len(PHASES)), name))


@dataclass(frozen=True)
class Summary:
    """Of many saves. What there are no saves for is None."""

    committed: int
    skipped: int
    failed: int
    first: float | None
    """When the first began, in seconds since 1970; so `last`, of the last."""
    last: float | None
    median_seconds: float | None
    """Wall time of those that are committed; so are all below but `blocked_seconds`."""
    worst_seconds: float | None
    worst_step: int | None
    blocked_seconds: float
    """For how long all saves together held up training."""
    worst_blocked_seconds: float
    new_bytes: int
    raw_bytes: int
    bytes_per_second: float | None
    """Written, by wall time of the saves."""
    interval_seconds: float | None
    """Median, from the begin of one save to that of the next of the same attempt; `worst_interval_seconds`: the longest."""
    worst_interval_seconds: float | None
    unaccounted: float
    """Share of the wall time, 0 to 1, without any phase."""


def summarise(saves: Sequence[Save]) -> Summary:
    """Sum up saves that are in the order in which they began."""
    done = [save for save in saves if save.is_committed]
    walls = [save.seconds for save in done]
    intervals = [b.began - a.began for a, b in pairwise(done) if a.attempt == b.attempt]
    worst = max(done, key=lambda save: save.seconds, default=None)
    new_bytes = sum(save.record.new_bytes for save in done)
    wall = sum(walls)
    return Summary(
        committed=len(done),
        skipped=sum(save.record.outcome == SKIPPED for save in saves),
        failed=sum(save.is_failed for save in saves),
        first=saves[0].began if saves else None,
        last=saves[-1].began if saves else None,
        median_seconds=median(walls) if walls else None,
        worst_seconds=worst.seconds if worst else None,
        worst_step=worst.step if worst else None,
        blocked_seconds=sum(save.blocked_seconds for save in saves),
        worst_blocked_seconds=max((save.blocked_seconds for save in saves), default=0.0),
        new_bytes=new_bytes,
        raw_bytes=sum(save.record.raw_bytes for save in done),
        bytes_per_second=new_bytes / wall if wall and new_bytes else None,
        interval_seconds=median(intervals) if intervals else None,
        worst_interval_seconds=max(intervals, default=None),
        unaccounted=sum(save.own_seconds.get(UNACCOUNTED, 0.0) for save in done) / wall if wall else 0.0,
    )
