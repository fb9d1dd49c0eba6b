"""What would happen if the job died now: the step it resumes from, the work that is lost, the time that reading takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ..run.history import Step
from .amounts import duration, size, when
from .findings import Finding
from .place import Place
from .recovery import outlook
from .saves import Save, Summary

_RECENT = 20
"""Saves by which speed is judged."""


@dataclass(frozen=True)
class Forecast:
    """Of a run, at one moment. What nothing tells is None."""

    step: int | None
    """The newest step that opens; none of its data was read."""
    attempt: int | None
    saved: float | None
    """When its state was taken, in seconds since 1970."""
    age_seconds: float | None
    """From then until now: the work that is lost if the job dies now."""
    nbytes: int | None
    read_seconds: float | None
    """To read it, at the speed at which the last saves were written."""
    bytes_per_second: float | None
    interval_seconds: float | None
    """From save to save, in the median."""
    usual_lost_seconds: float | None
    """Of work, on average over the moments of failure: half an interval, and a save that is not finished."""
    worst_lost_seconds: float | None
    writer: str
    """running, no longer running, or that nobody here knows; empty where nothing was ever written."""
    findings: tuple[Finding, ...]
    """As `holdfast doctor --quick` has them."""

    def words(self) -> list[str]:
        """The same as sentences."""
        if self.step is None or self.saved is None or self.age_seconds is None:
            return ["There is nothing to resume from."]
        said = [f"A job that starts now resumes from step {self.step} (attempt {self.attempt}), saved {when(self.saved)}."]
        if self.writer == "running":
            said.append(f"If the running one died now, {duration(self.age_seconds)} of work would be lost.")
        if self.usual_lost_seconds is not None and self.worst_lost_seconds is not None:
            usual, worst = duration(self.usual_lost_seconds), duration(self.worst_lost_seconds)
            said.append(f"A failure at any moment loses {usual} of work on average, and {worst} at worst.")
        if self.read_seconds is not None and self.bytes_per_second and self.nbytes is not None:
            speed = f"{size(self.bytes_per_second)}/s"
            said.append(f"Reading its {size(self.nbytes)} takes about {duration(self.read_seconds)} at {speed}, as saves write.")
        return said


def forecast(place: Place, steps: Sequence[Step], saves: Sequence[Save], summary: Summary, now: float) -> Forecast:
    """Look at what there is to resume from, and judge the rest by the saves so far.

    Args:
        steps: the lineage. now: seconds since 1970.
    """
    found = outlook(place, is_quick=True, advance=lambda what, done, total: None)
    step = next((s for s in reversed(steps) if s.step == found.newest_intact and s.kind != "partial"), None)
    interval, worst_interval = _intervals(steps, summary)
    speed = _speed(saves)
    nbytes = step.nbytes if step else None
    return Forecast(
        step=step.step if step else None,
        attempt=step.attempt if step else None,
        saved=step.created if step else None,
        age_seconds=max(now - step.created, 0.0) if step else None,
        nbytes=nbytes,
        read_seconds=nbytes / speed if nbytes is not None and speed else None,
        bytes_per_second=speed,
        interval_seconds=interval,
        usual_lost_seconds=None if interval is None else interval / 2 + (summary.median_seconds or 0.0),
        worst_lost_seconds=None if worst_interval is None else worst_interval + (summary.worst_seconds or 0.0),
        writer=next((str(f.facts["state"]) for f in found.findings if f.name == "writer"), ""),
        findings=found.findings,
    )


def _intervals(steps: Sequence[Step], summary: Summary) -> tuple[float | None, float | None]:
    """Median and longest seconds from save to save; from the newest commits where no record tells, as older ones get pruned."""
    if summary.interval_seconds is not None:
        return summary.interval_seconds, summary.worst_interval_seconds
    gaps = [max(b.created - a.created, 0.0) for a, b in pairwise(steps[-4:]) if a.attempt == b.attempt]
    return (median(gaps), max(gaps)) if gaps else (None, None)


def _speed(saves: Sequence[Save]) -> float | None:
    """Bytes per second at which the last saves wrote."""
    speeds = []
    for save in [save for save in saves if save.is_committed][-_RECENT:]:
        written = sum(p.nbytes for rank in save.record.ranks for p in rank.phases if p.name == "write" and not p.lane)
        if written and save.own_seconds.get("write"):
            speeds.append(written / save.own_seconds["write"])
    return median(speeds) if speeds else None
