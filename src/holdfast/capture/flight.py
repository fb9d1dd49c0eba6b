"""What one capture copies out of one device.

The order on the device: what changes outside of optimizers is set aside in device memory, in the stream that computes; a mark;
behind the mark, in a stream beside it, everything is copied into the slot. An optimizer that is about to change what is not
copied yet has the device wait, and the host goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from ..agent.arena import Bytes
from .device import Mark, streams_of
from .rows import PROBE_BYTES, Glance, Job, Row, sample

_MARK_BYTES = 64 << 20


class Flight:
    """Args:
    small, volatile: rows that are set aside now, and copied from there. lazy: those copied from the live tensors, which nothing
        but their optimizers may change.
    turn: rotates the sample.
    """

    def __init__(
        self, device: torch.device, small: Sequence[Row], volatile: Sequence[Row], lazy: Sequence[Row], slot: Bytes, turn: int
    ) -> None:
        self._streams, self._slot, self._small = streams_of(device), slot, small
        self._glances = [Glance(row, 0, row.nbytes) for row in small] + _glances(lazy, turn)
        self._seen = self._streams.room(sum(glance.nbytes for glance in self._glances))
        self.refused: list[Row] = []
        """Of the volatile rows, those for which the device has no memory."""
        self._aside: dict[int, torch.Tensor] = {}
        """By row: what is copied in place of the live bytes."""
        self._lock = threading.Lock()
        self._open: list[tuple[int, Job]] = []
        """Enqueued since the last mark, and for whom."""
        self._open_bytes = 0
        self._behind: dict[int, Mark] = {}
        """By owner: the last mark behind copies for it."""
        self._marked: deque[tuple[Mark, list[Job]]] = deque()
        pieces = [_apart(row) for row in small]
        pieces += [_flat(row)[start : start + nbytes] for row, start, nbytes in self._glances[len(small) :]]
        self._glanced = self._streams.aside(pieces) if pieces else None
        self._set_aside(volatile)
        self._start = self._streams.now()
        self._has_started = False

    def _set_aside(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        try:
            whole = self._streams.aside([_apart(row) for row in rows])
        except torch.OutOfMemoryError:  # training goes on without it
            self.refused = list(rows)
            return
        at = 0
        for row in rows:
            self._aside[row.ready] = whole[at : at + row.nbytes]
            at += row.nbytes

    def start(self) -> None:
        """Enqueue the copy of what was seen; called before anything else is enqueued, by each thread that is about to."""
        with self._lock:
            if self._has_started:
                return
            self._streams.start_behind(self._start)
            if self._glanced is not None:
                self._streams.copy(self._glanced, self._seen)
                self._marked.append((self._streams.copied(), []))
            self._has_started = True

    def enqueue(self, owner: int, job: Job) -> None:
        """Have the device copy some bytes of a row, for whom `owner` says; `land` tells when they are there."""
        self.start()
        row, source = job.row, self._aside.get(job.row.ready, job.row.flat)
        out = self._slot[row.at + job.start : row.at + job.start + job.nbytes]
        if source is None:
            self._streams.read(lambda: row.source.copy_into(job.start, out))
        else:
            self._streams.copy(source[job.start : job.start + job.nbytes], out)
        with self._lock:
            self._open.append((owner, job))
            self._open_bytes += job.nbytes
            if self._open_bytes >= _MARK_BYTES:
                self._mark()

    def read(self, work: Callable[[], None]) -> None:
        """Do what reads tensors as they were at the call, if nothing has changed them since."""
        self.start()
        self._streams.read(work)

    def hold_up(self, owners: Sequence[int]) -> None:
        """Have the device compute no further until it has copied what was enqueued for these."""
        for mark in self._marks_behind(owners):
            self._streams.hold_up(mark)

    def wait(self, owners: Sequence[int] | None) -> None:
        """Return when what was enqueued for these, or all, is copied."""
        for mark in self._marks_behind(owners):
            mark.synchronize()

    def _marks_behind(self, owners: Sequence[int] | None) -> list[Mark]:
        with self._lock:
            if any(owners is None or owner in owners for owner, _ in self._open):
                self._mark()
            found = {id(mark): mark for owner, mark in self._behind.items() if owners is None or owner in owners}
        return list(found.values())

    def land(self, landed: Callable[[Job], None]) -> None:
        """Wait for what was enqueued, which is all, and tell of each job when its bytes are there, in order."""
        self.start()
        with self._lock:
            self._mark()
        while self._marked:
            mark, jobs = self._marked.popleft()
            mark.synchronize()
            if self._glanced is not None:
                self._glanced = None
                self._scatter()
                jobs = [Job(row, 0, row.nbytes) for row in self._small] + jobs
            for job in jobs:
                landed(job)
        self._aside.clear()

    def differ(self, pairs: Sequence[tuple[Row, Bytes]]) -> list[bool]:
        """Whether the live bytes of rows are not what was copied of them."""
        return self._streams.differ([(_flat(row), copied) for row, copied in pairs])

    def differing(self) -> list[Row]:
        """Rows whose copy is not what was seen of them at the call; once all have landed."""
        found: list[Row] = []
        for (row, start, nbytes), seen in self._seen_pieces():
            if row not in found and not np.array_equal(self._slot[row.at + start : row.at + start + nbytes], seen):
                found.append(row)
        return found

    def _mark(self) -> None:
        if self._open:
            mark = self._streams.copied()
            self._marked.append((mark, [job for _, job in self._open]))
            self._behind.update({owner: mark for owner, _ in self._open})
            self._open, self._open_bytes = [], 0

    def _scatter(self) -> None:
        for (row, _, nbytes), seen in self._seen_pieces():
            if not row.is_small:
                break
            self._slot[row.at : row.at + nbytes] = seen

    def _seen_pieces(self) -> Iterable[tuple[Glance, Bytes]]:
        at = 0
        for glance in self._glances:
            yield glance, self._seen[at : at + glance.nbytes]
            at += glance.nbytes


def _flat(row: Row) -> torch.Tensor:
    assert row.flat is not None
    return row.flat


def _apart(row: Row) -> torch.Tensor:
    assert row.apart is not None
    return row.apart


def _glances(rows: Sequence[Row], turn: int) -> list[Glance]:
    """Of each row the last bytes, which are copied last, and the sample."""
    ends = [Glance(row, max(0, row.nbytes - PROBE_BYTES), min(PROBE_BYTES, row.nbytes)) for row in rows]
    return ends + sample(rows, turn)
