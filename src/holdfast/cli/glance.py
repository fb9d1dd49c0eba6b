"""What `holdfast top` shows: a run at one moment, from its records and, where one answers, from its agent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ..errors import HoldfastError
from ..run.history import Step
from ..run.status import RankStatus, SaveStatus, Status
from ..run.timings import times_of
from .amounts import counted, duration, one_line, size, when
from .findings import Finding
from .overview import save_dict
from .place import Place
from .recovery import writer
from .saves import Save, saves_of

Ask = Callable[[str], Status | None]
"""Asks the agent of a run, by its URL; None where none answers."""
_SAVES = 12
"""Saves, and steps, to show."""
_RECORDS = 4 * _SAVES
"""Records to read: several nodes may each keep one of a save."""
_ERRORS = 3
_MOST_RANKS = 32


@dataclass(frozen=True)
class Glance:
    """One look."""

    run: str
    at: float
    """Seconds since 1970."""
    steps: tuple[Step, ...]
    """The last few of the lineage, oldest first."""
    writer: Finding | None
    """Who began the newest attempt."""
    status: Status | None
    silence: str
    """Why the agent does not say how it is; empty where there is none, or where it does."""
    saves: tuple[Save, ...]
    """The last few, oldest first."""

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "run": self.run,
            "at": self.at,
            "steps": [{"step": s.step, "attempt": s.attempt, "created": s.created, "bytes": s.nbytes} for s in self.steps],
            "writer": self.writer.facts if self.writer else None,
            "agent": msgspec.to_builtins(self.status) if self.status else None,
            "silence": self.silence,
            "saves": [save_dict(save) for save in self.saves],
        }


@dataclass(frozen=True)
class Table:
    """Rows below their titles."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[str] = ()


def glance(place: Place, ask: Ask, now: float) -> Glance:
    """Look at a run once.

    Raises:
        Corrupt, Unavailable.
    """
    snapshot = place.history.look()
    status, silence = None, ""
    try:
        status = ask(place.store.url)
    except HoldfastError as error:
        silence = str(error)
    return Glance(
        run=place.store.url,
        at=now,
        steps=tuple([step for step in snapshot.lineage if step.kind != "partial"][-_SAVES:]),
        writer=next(writer(snapshot), None),
        status=status,
        silence=silence,
        saves=tuple(saves_of(times_of(place.store, newest=_RECORDS))[-_SAVES:]),
    )


def blocks(seen: Glance) -> Iterator[str | Table]:
    """Lines and tables, from above."""
    steps = seen.steps
    latest = f"step {steps[-1].step} ({size(steps[-1].nbytes)}), saved {_ago(steps[-1].created, seen.at)}" if steps else ""
    yield f"{seen.run}: {latest or 'nothing is committed'}"
    if seen.writer is not None:
        yield f"writer: {seen.writer.detail}"
    if seen.status is not None:
        yield from _agent(seen.status, seen.at)
    else:
        yield f"agent: does not answer: {one_line(seen.silence)}" if seen.silence else "agent: none; this is from the records"
    if seen.saves:
        yield from ("", _saves(seen.saves, seen.at))
    elif steps:
        rows = [(str(s.step), _ago(s.created, seen.at), size(s.nbytes), size(s.commit.new_bytes)) for s in reversed(steps)]
        yield from ("", Table(("step", "saved", "size", "written"), rows, right=("step", "saved", "size", "written")))


def _ago(at: float, now: float) -> str:
    return f"{duration(max(now - at, 0))} ago"


def _agent(status: Status, now: float) -> Iterator[str | Table]:
    where = f" on {status.node}" if status.node else ""
    budget = f" of {size(status.memory_budget_bytes)}" if status.memory_budget_bytes else ""
    held = counted(status.versions_held, "version")
    memory = f"{size(status.resident_bytes)} and an arena of {size(status.arena_bytes)}{budget}, {held} held"
    yield f"agent: process {status.pid}{where}, up {duration(status.uptime_seconds)}; {memory}"
    done = f"{status.committed_saves} committed, {status.skipped_saves} skipped, {status.failed_saves} failed"
    yield f"since then: {done}; {size(status.written_bytes)} written"
    if status.phase_seconds:
        yield f"time: {_phases(status.phase_seconds)}"
    for error in status.errors[-_ERRORS:]:
        yield f"error, {when(error.at)}: {one_line(error.text)}"
    if status.saves:
        yield from ("", _under_way(status.saves, now))
    if status.ranks:
        yield from ("", _ranks(status.ranks[:_MOST_RANKS]))
        if len(status.ranks) > _MOST_RANKS:
            yield f"and {counted(len(status.ranks) - _MOST_RANKS, 'rank')} more"


def _under_way(saves: Sequence[SaveStatus], now: float) -> Table:
    rows = []
    for save in saves:
        share = f"{save.done_bytes / save.total_bytes:.0%}" if save.total_bytes else "-"
        since = duration(max(now - save.began, 0)) if save.began else "-"
        rows.append((str(save.step), save.level, share, size(save.total_bytes), since))
    return Table(("under way", "level", "done", "size", "for"), rows, right=("under way", "done", "size", "for"))


def _ranks(ranks: Sequence[RankStatus]) -> Table:
    rows = []
    for rank in ranks:
        last = "-" if rank.last_step is None else str(rank.last_step)
        connected = "yes" if rank.is_connected else "no"
        rows.append((str(rank.rank), str(rank.pid), connected, last, duration(rank.blocked_seconds)))
    titles = ("rank", "process", "connected", "last step", "held up")
    return Table(titles, rows, right=("rank", "process", "last step", "held up"))


def _saves(saves: Sequence[Save], now: float) -> Table:
    """The newest on top."""
    titles = ("step", "ended", "when", "took", "held up", "written", "speed", "why, or where the time went")
    rows = []
    for save in reversed(saves):
        record = save.record
        speed = f"{size(record.new_bytes / save.seconds)}/s" if save.seconds and record.new_bytes else "-"
        cells = (duration(save.seconds), duration(save.blocked_seconds), size(record.new_bytes), speed)
        why = one_line(record.reason) or _phases(save.own_seconds)
        rows.append((str(save.step), record.outcome, _ago(record.ended, now), *cells, why))
    return Table(titles, rows, right=("step", "when", "took", "held up", "written", "speed"))


def _phases(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
