"""All that a report tells of a run: its saves summed up, what stands out, sizes, troubles, the forecast. Reads records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import HoldfastError
from ..run.history import Snapshot
from ..run.timings import times_of
from .findings import Finding
from .forecast import Forecast, forecast
from .ls import leftovers
from .place import Place
from .remarks import remarks
from .saves import Save, Summary, saves_of, summarise
from .slowness import Change, Heat, Slowest, change, column_name, heat, slowest


@dataclass(frozen=True)
class Size:
    """Of one committed save."""

    step: int
    attempt: int
    at: float
    raw_bytes: int
    new_bytes: int
    stored_ratio: float | None
    """Of the chunks that were written, after coding by before; None where no record tells."""


@dataclass(frozen=True)
class Overview:
    """Of a run, or of one attempt of it."""

    run: str
    id: str | None
    attempt: int | None
    """The one it is confined to; None: all."""
    made: float
    """Seconds since 1970."""
    saves: tuple[Save, ...]
    """In the order in which they began."""
    summary: Summary
    heat: Heat
    slowest: Slowest | None
    change: Change | None
    sizes: tuple[Size, ...]
    leftovers: tuple[dict[str, str], ...]
    """As `holdfast ls` has them."""
    forecast: Forecast
    remarks: tuple[Finding, ...]
    """What stands out, in words."""

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "run": self.run,
            "id": self.id,
            "attempt": self.attempt,
            "made": self.made,
            "remarks": [asdict(remark) for remark in self.remarks],
            "summary": asdict(self.summary),
            "slowest": _slowest_dict(self.slowest),
            "change": asdict(self.change) if self.change else None,
            "heat": [
                {
                    "rank": row.rank,
                    "node": row.node,
                    "busy_seconds": row.busy_seconds,
                    "slowest_in": row.slowest_in,
                    "median_seconds": {column_name(column): seconds for column, seconds in row.medians.items()},
                }
                for row in self.heat.rows
            ],
            "saves": [save_dict(save) for save in self.saves],
            "sizes": [asdict(size) for size in self.sizes],
            "leftovers": list(self.leftovers),
            "forecast": asdict(self.forecast),
        }


def save_dict(save: Save) -> dict[str, Any]:
    """A save as JSON has it; without its ranks, which a trace shows."""
    record = save.record
    return {
        "step": record.step,
        "attempt": record.attempt,
        "outcome": record.outcome,
        "reason": record.reason,
        "began": record.began,
        "seconds": save.seconds,
        "blocked_seconds": save.blocked_seconds,
        "phase_seconds": save.own_seconds,
        "raw_bytes": record.raw_bytes,
        "new_bytes": record.new_bytes,
        "stored_ratio": record.stored_ratio,
    }


def _slowest_dict(found: Slowest | None) -> dict[str, Any] | None:
    if found is None:
        return None
    row = found.row
    ratios = {"ratio": found.ratio, "phase": column_name(found.phase), "phase_ratio": found.phase_ratio}
    return {"rank": row.rank, "node": row.node, "seconds": row.busy_seconds, "slowest_in": row.slowest_in, **ratios}


def overview(place: Place, attempt: int | None, now: float) -> Overview:
    """Gather what the records of a run tell.

    Args:
        attempt: only its saves and sizes; what could be resumed is of the run. now: seconds since 1970.
    """
    saves = saves_of(times_of(place.store, attempt))
    snapshot, run_id = _history(place)
    summary, found = summarise(saves), heat(saves)
    straggler, turn = slowest(found), change(saves)
    ahead = forecast(place, snapshot.lineage if snapshot else [], saves, summary, now)
    return Overview(
        run=place.store.url,
        id=run_id,
        attempt=attempt,
        made=now,
        saves=tuple(saves),
        summary=summary,
        heat=found,
        slowest=straggler,
        change=turn,
        sizes=_sizes(saves, snapshot, attempt),
        leftovers=tuple(leftovers(place.store, snapshot)) if snapshot else (),
        forecast=ahead,
        remarks=tuple(remarks(saves, summary, straggler, turn, ahead)),
    )


def _history(place: Place) -> tuple[Snapshot | None, str | None]:
    """What the run's records say, if they can be read at all; what ails them the forecast says."""
    try:
        record = place.history.run_record()
        return place.history.look(), record.run if record else None
    except HoldfastError:
        return None, None


def _sizes(saves: Sequence[Save], snapshot: Snapshot | None, attempt: int | None) -> tuple[Size, ...]:
    """Of steps that are there, by their commits, and of those that were pruned, by the records of their saves."""
    known: dict[tuple[int, int], Size] = {}
    for step in snapshot.steps if snapshot else ():
        if attempt in (None, step.attempt):
            size = Size(step.step, step.attempt, step.created, step.nbytes, step.commit.new_bytes, None)
            known[step.attempt, step.step] = size
    for save in saves:
        if save.is_committed:
            r = save.record
            known[r.attempt, r.step] = Size(r.step, r.attempt, r.began, r.raw_bytes, r.new_bytes, r.stored_ratio)
    return tuple(sorted(known.values(), key=lambda size: (size.at, size.step)))
