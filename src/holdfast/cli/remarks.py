"""What stands out in the saves of a run: what somebody who was called at night wants to know first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from .amounts import counted, duration, when
from .findings import FAILED, OK, WARNING, Finding
from .forecast import Forecast
from .saves import Save, Summary
from .slowness import Change, Slowest

_MUCH = 0.05
"""More of the wall time than this without a phase is worth a word: something takes time that nobody measures."""
_LATELY = 10
"""Saves; trouble among so many last ones has not passed."""


def remarks(
    saves: Sequence[Save], summary: Summary, slowest: Slowest | None, change: Change | None, forecast: Forecast
) -> list[Finding]:
    """Findings, the worst first."""
    found = [_trouble(saves), _pace(change), _straggler(slowest), _stall(summary), _gap(summary)]
    found += [finding for finding in forecast.findings if finding.status != OK]
    if not saves:
        found.append(Finding("times", OK, "no save has left a record of its times"))
    return sorted((f for f in found if f is not None), key=lambda finding: (FAILED, WARNING, OK).index(finding.status))


def _trouble(saves: Sequence[Save]) -> Finding | None:
    bad = [save for save in saves if not save.is_committed]
    if not bad:
        return None
    last = bad[-1]
    failures = sum(save.is_failed for save in bad)
    facts = {"failed": failures, "skipped": len(bad) - failures, "last_step": last.step}
    what = ", ".join(f"{counted(n, 'save')} {word}" for n, word in ((failures, "failed"), (len(bad) - failures, "skipped")) if n)
    why = f": {last.record.reason}" if last.record.reason else ""
    is_over = last not in saves[-_LATELY:]
    detail = f"{what} of {len(saves)}; the last one was step {last.step}, {when(last.began)}{why}"
    return Finding("outcomes", OK if is_over else FAILED if last.is_failed else WARNING, detail, facts)


def _pace(found: Change | None) -> Finding | None:
    if found is None:
        return None
    before, after = duration(found.before_seconds), duration(found.after_seconds)
    part = f"{found.phase} went from {duration(found.phase_before)} to {duration(found.phase_after)}"
    kind = "longer" if found.is_slower else "less long"
    detail = f"saves take {kind} since step {found.step}, {when(found.at)}: {after} instead of {before}; {part}"
    return Finding("pace", WARNING if found.is_slower else OK, detail, asdict(found))


def _straggler(found: Slowest | None) -> Finding | None:
    if found is None or not found.stands_out:
        return None
    facts = {"rank": found.row.rank, "node": found.row.node, "ratio": found.ratio}
    return Finding("slowest rank", WARNING, found.words(), facts)


def _stall(summary: Summary) -> Finding | None:
    if not summary.blocked_seconds:
        return None
    worst = duration(summary.worst_blocked_seconds)
    detail = f"saves held up training for {duration(summary.blocked_seconds)} in all, {worst} at most"
    return Finding("stall", OK, detail, {"seconds": summary.blocked_seconds, "worst_seconds": summary.worst_blocked_seconds})


def _gap(summary: Summary) -> Finding | None:
    if summary.unaccounted <= _MUCH:
        return None
    detail = f"{summary.unaccounted:.0%} of the wall time of saves is in no phase that was recorded"
    return Finding("unaccounted", WARNING, detail, {"share": summary.unaccounted})
