"""Saves as a trace that chrome://tracing and Perfetto open: a process for each node, a thread for each rank and lane.

Times are microseconds since the first save began; `otherData` says when that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..run.timings import AGENT, Phase
from .saves import Save

PRODUCER = "holdfast report"
"""By this a trace is known as one that may be written over."""
_SAVES = "saves"
_MICRO = 1e6


def trace(saves: Sequence[Save], run: str) -> dict[str, Any]:
    """The trace, as JSON has it."""
    began = min((start for save in saves for start in (save.began, *(p.start for p in _phases(save)))), default=0.0)
    tracks = _Tracks()
    events = []
    for save in saves:
        record = save.record
        facts = {"step": save.step, "attempt": save.attempt, "outcome": record.outcome, "reason": record.reason}
        sizes = {"raw_bytes": record.raw_bytes, "new_bytes": record.new_bytes, "stored_ratio": record.stored_ratio}
        whole = Phase(f"step {save.step}", save.began, save.seconds)
        events.append(_event(whole, tracks.place(_SAVES, (-1, _SAVES), whole), began, facts | sizes, record.outcome))
        for rank in record.ranks:
            for phase in sorted(rank.phases, key=lambda p: p.start):
                name = "agent" if rank.rank == AGENT else f"rank {rank.rank}"
                order = (2**31 if rank.rank == AGENT else rank.rank, f"{name} {phase.lane}".strip())
                where = tracks.place(f"node {rank.node}" if rank.node else "node", order, phase)
                facts = {"step": save.step, "attempt": save.attempt, "bytes": phase.nbytes}
                events.append(_event(phase, where, began, facts, phase.lane or "save"))
    return {
        "otherData": {"producer": PRODUCER, "run": run, "began": began},
        "displayTimeUnit": "ms",
        "traceEvents": [*tracks.names(), *events],
    }


def _phases(save: Save) -> list[Phase]:
    return [phase for rank in save.record.ranks for phase in rank.phases]


def _event(phase: Phase, where: tuple[int, int], began: float, facts: dict[str, Any], category: str) -> dict[str, Any]:
    return {
        "name": phase.name,
        "cat": category,
        "ph": "X",
        "ts": (phase.start - began) * _MICRO,
        "dur": phase.seconds * _MICRO,
        "pid": where[0],
        "tid": where[1],
        "args": facts,
    }


class _Tracks:
    """Processes and threads of the trace. What overlaps gets a thread of its own, since a viewer nests or drops it else."""

    def __init__(self) -> None:
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[int, int, str], list[tuple[int, float]]] = {}
        """By process, order and name: number of each thread so far, and when its last event ends."""
        self._count = 0

    def place(self, process: str, order: tuple[int, str], phase: Phase) -> tuple[int, int]:
        """The process and thread for an event that begins no earlier than those before it of the same order."""
        pid = self._processes.setdefault(process, len(self._processes) + 1)
        threads = self._threads.setdefault((pid, *order), [])
        end = phase.start + phase.seconds
        for at, (tid, free) in enumerate(threads):
            if phase.start >= free:
                threads[at] = (tid, end)
                return pid, tid
        self._count += 1
        threads.append((self._count, end))
        return pid, self._count

    def names(self) -> list[dict[str, Any]]:
        """The events that give processes and threads their names and order."""
        found = [_meta("process_name", pid, 0, {"name": name}) for name, pid in self._processes.items()]
        for number, key in enumerate(sorted(self._threads)):
            pid, _, name = key
            for extra, (tid, _) in enumerate(self._threads[key]):
                label = f"{name} +{extra}" if extra else name
                found.append(_meta("thread_name", pid, tid, {"name": label}))
                found.append(_meta("thread_sort_index", pid, tid, {"sort_index": number}))
        return found


def _meta(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
