"""What is slow: which phase on which rank, and since when. Computed from committed saves; says nothing where too few tell."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from ..run.timings import AGENT, RankPhases
from .amounts import counted, duration
from .saves import PHASES, UNACCOUNTED, WAITING, Save, in_order

_NOTICED = 1.3
"""A change or a rank that is slower by less than this is not worth a word."""
_SURE = 5.0
"""A change counts when it is so many times its standard error."""
_FEWEST = 3
"""Saves on either side of a change."""

Column = tuple[str, str]
"""A phase and its lane."""


@dataclass(frozen=True)
class Row:
    """A rank, or the agent of a node, over many saves."""

    rank: int
    node: str
    medians: dict[Column, float]
    """Seconds of each phase, in the median of the saves that it took part in."""
    busy_seconds: float
    """The same, of all phases but waiting for others."""
    slowest_in: int
    """In how many saves it was the rank that took longest."""

    @property
    def name(self) -> str:
        what = "agent" if self.rank == AGENT else f"rank {self.rank}"
        return f"{what} ({self.node})" if self.node else what


@dataclass(frozen=True)
class Heat:
    """Ranks by phases."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    """Ranks in order, then agents."""
    saves: int

    @property
    def ranks(self) -> list[Row]:
        return [row for row in self.rows if row.rank != AGENT]


@dataclass(frozen=True)
class Slowest:
    """The rank that takes longest."""

    row: Row
    ratio: float
    """Its seconds by those of the median rank."""
    phase: Column
    """What it is slow in, most of all."""
    phase_ratio: float
    saves: int
    """In how many saves there was a slowest rank."""

    @property
    def stands_out(self) -> bool:
        return self.ratio >= _NOTICED

    def words(self) -> str:
        """The same as half a sentence."""
        times = "" if math.isinf(self.ratio) else f", {self.ratio:.3g} times what the median rank takes"
        often = f"it was the slowest in {self.row.slowest_in} of {counted(self.saves, 'save')}"
        where = f"what it has most beyond the others is {column_name(self.phase)}"
        return f"{self.row.name} is the slowest: {duration(self.row.busy_seconds)}{times}; {where}; {often}"


@dataclass(frozen=True)
class Change:
    """From one save on, saves take longer or shorter than before."""

    step: int
    attempt: int
    at: float
    """Seconds since 1970 at which the first of the new kind began."""
    before_seconds: float
    """Median wall time of those before; `after_seconds`: of it and those after."""
    after_seconds: float
    phase: str
    """What changed most; its seconds before and after."""
    phase_before: float
    phase_after: float

    @property
    def is_slower(self) -> bool:
        return self.after_seconds > self.before_seconds


def column_name(column: Column) -> str:
    name, lane = column
    return f"{name}, {lane}" if lane else name


def heat(saves: Sequence[Save]) -> Heat:
    """Median seconds of each phase on each rank."""
    done = [save for save in saves if save.is_committed]
    spent: dict[tuple[int, str], list[dict[Column, float]]] = {}
    slowest: Counter[tuple[int, str]] = Counter()
    for save in done:
        of_this = _by_rank(save.record.ranks)
        for key, seconds in of_this.items():
            spent.setdefault(key, []).append(seconds)
        busy = {key: _busy(seconds) for key, seconds in of_this.items() if key[0] != AGENT}
        if len(busy) > 1 and max(busy.values()) > min(busy.values()):
            slowest[max(busy, key=lambda key: busy[key])] += 1
    rows = []
    for key in sorted(spent, key=lambda key: (key[0] == AGENT, key)):
        names = {column for seconds in spent[key] for column in seconds}
        medians = {column: median(seconds.get(column, 0.0) for seconds in spent[key]) for column in names}
        rows.append(Row(*key, medians, median(map(_busy, spent[key])), slowest[key]))
    return Heat(_in_order({column for row in rows for column in row.medians}), tuple(rows), len(done))


def _by_rank(ranks: Iterable[RankPhases]) -> dict[tuple[int, str], dict[Column, float]]:
    """Seconds by rank and node, then by phase. One that is there more than once has them all."""
    found: dict[tuple[int, str], dict[Column, float]] = {}
    for rank in ranks:
        total = found.setdefault((rank.rank, rank.node), {})
        for phase in rank.phases:
            column = (phase.name, phase.lane)
            total[column] = total.get(column, 0.0) + phase.seconds
    return found


def _busy(seconds: dict[Column, float]) -> float:
    return sum(value for (name, _), value in seconds.items() if name != WAITING)


def _in_order(columns: set[Column]) -> tuple[Column, ...]:
    places = {name: place for place, name in enumerate(PHASES)}
    return tuple(sorted(columns, key=lambda column: (places.get(column[0], len(PHASES)), column)))


def slowest(found: Heat) -> Slowest | None:
    """The rank with the most seconds, in the median of saves; None where fewer than two ranks tell, or all are equal."""
    ranks = found.ranks
    if len(ranks) < 2:
        return None
    first = max(ranks, key=lambda row: (row.busy_seconds, row.slowest_in))
    usual = median(row.busy_seconds for row in ranks)
    if first.busy_seconds <= min(row.busy_seconds for row in ranks):
        return None

    def excess(column: Column) -> float:
        return first.medians.get(column, 0.0) - _usual(ranks, column)

    phase = max((column for column in found.columns if column[0] != WAITING), key=excess)
    return Slowest(
        first,
        _ratio(first.busy_seconds, usual),
        phase,
        _ratio(first.medians.get(phase, 0.0), _usual(ranks, phase)),
        sum(row.slowest_in for row in ranks),
    )


def _usual(ranks: Sequence[Row], column: Column) -> float:
    return median(row.medians.get(column, 0.0) for row in ranks)


def _ratio(value: float, usual: float) -> float:
    return value / usual if usual > 0 else math.inf


def change(saves: Sequence[Save]) -> Change | None:
    """The save from which on the wall time differs most clearly from before; None where it is much the same all along.

    Of all cuts in two it takes the one with the smallest spread of log(seconds) on either side; the few shortest and longest
    saves count as the next ones, so that no single one makes a change or hides one.
    """
    done = [save for save in saves if save.is_committed and save.seconds > 0]
    if len(done) < 2 * _FEWEST:
        return None
    logs = _clipped([math.log(save.seconds) for save in done])
    sums, squares = [0.0, *accumulate(logs)], [0.0, *accumulate(x * x for x in logs)]
    count, best, at = len(done), 0.0, 0
    for cut in range(_FEWEST, count - _FEWEST + 1):
        gap = sums[cut] / cut - (sums[-1] - sums[cut]) / (count - cut)
        gain = gap * gap * cut * (count - cut) / count
        if gain > best:
            best, at = gain, cut
    spread = squares[-1] - sums[-1] ** 2 / count - best  # what the cut leaves unexplained
    if not at or best <= _SURE**2 * max(spread, 0.0) / (count - 2):
        return None
    before, after = done[:at], done[at:]
    old, new = median(s.seconds for s in before), median(s.seconds for s in after)
    if max(old, new) < _NOTICED * min(old, new):
        return None
    names = in_order({name for save in done for name in save.own_seconds})
    of_phase = {name: (_own(before, name), _own(after, name)) for name in names}
    phase = max(names, key=lambda name: (of_phase[name][1] - of_phase[name][0]) * (1 if new > old else -1), default=UNACCOUNTED)
    first = after[0]
    return Change(first.step, first.attempt, first.began, old, new, phase, *of_phase.get(phase, (0.0, 0.0)))


def _clipped(values: Sequence[float]) -> list[float]:
    """The values, where the outermost on either side, of many the outermost two, are moved in to the next."""
    ordered = sorted(values)
    out = 1 if len(values) < 4 * _FEWEST else _FEWEST - 1  # fewer than make a change
    return [min(max(value, ordered[out]), ordered[-1 - out]) for value in values]


def _own(saves: Sequence[Save], name: str) -> float:
    return median(save.own_seconds.get(name, 0.0) for save in saves)
