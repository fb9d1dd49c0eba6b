"""One capture: some rows at once, the others in the background until an optimizer asks for them.

A tensor is copied in the background only after it was seen to hold still: its first copy is made at the call, and compared with
the live tensor when its optimizer is about to step. A copy that is then found to be of changed bytes (`evidence.py`) ends the
capture, which is never committed, and the tensor is copied at the call from then on.

Of what lies on a device, a thread only enqueues the copies (`flight.py`): an optimizer waits until they are enqueued, and its
device until they are done.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..agent.arena import Bytes
from ..errors import HoldfastError, Torn
from ..format.digest import digest
from ..run.proof import source_digest
from .evidence import Evidence
from .flight import Flight
from .rows import JOB_BYTES, Job, Replica, Row, Rows, Trust

_TOLD_BYTES = 64 << 20
_ASIDE_BYTES = 256 << 20
"""How much device memory a capture may take for what changes outside of optimizers; more of it is copied at the call."""
_SLIGHT_BYTES = 1 << 20
SET_ASIDE, AT_ONCE, UNOWNED = -2, -1, 0
"""Owners of what nobody changes, of what nobody may wait for, and of what any optimizer waits for; others are their `id`s."""


class Shot:
    """Args:
    rows: what to copy. fresh: positions of what must be copied at once, as only this look knows it. slot: where the bytes go.
    turn: rotates the sample.
    told: called, in whatever thread, with the number of rows that are complete, from the first on without a gap.
    """

    def __init__(self, rows: Rows, fresh: Sequence[int], slot: Bytes, turn: int, told: Callable[[int], None]) -> None:
        self.nbytes = rows.nbytes
        self._rows, self._slot, self._told = rows.rows, slot, told
        self._changed = threading.Condition()
        self._jobs: dict[int, deque[Job]] = {}
        """By owner: what is to be done before it steps."""
        self._left: dict[int, int] = {}
        """By owner: how much of it is not done yet, what is under way included."""
        self._missing: dict[int, int] = {}
        """Bytes of a row, by its number, that are not copied yet."""
        self._untold = 0
        """Bytes of rows that were completed since it was told."""
        self._audit: list[Row] = []
        self._replicas: list[Replica] = []
        self.proofs: dict[str, tuple[tuple[int, ...], str]] = {}
        """Holders and digest of each replica."""
        self.error: HoldfastError | None = None
        self._held_seconds = self._holding_since = 0.0
        self._was_held = False
        self.call_seconds = 0.0
        """Of the call of `step`, when it has returned."""
        self._flights: dict[torch.device, Flight] = {}
        self._is_flying = False
        """Whether a device may still be copying."""
        self._flying: list[Row] = []
        """Live tensors that a device copies and no optimizer may have changed yet."""
        self._begin(rows, set(fresh), turn)

    def _begin(self, rows: Rows, fresh: set[int], turn: int) -> None:
        at_once: list[Row] = []
        lazy: list[Row] = []
        volatile: list[Row] = []
        for row in rows.rows:
            is_fresh = row.position in fresh
            if row.is_instant:
                row.source.copy_into(0, self._slot[row.at : row.at + row.nbytes])
            elif row.is_small:
                continue
            elif row.trust is Trust.PROVEN and not is_fresh:
                lazy.append(row)
            elif row.apart is not None and (is_fresh or row.flat is None or row.trust is Trust.BROKEN or _is_slight(row)):
                volatile.append(row)
            else:
                at_once.append(row)
                if not is_fresh and row.trust is Trust.UNPROVEN:
                    self._audit.append(row)
        volatile, others = _within(_ASIDE_BYTES, volatile)
        at_once += others
        self._evidence = Evidence(lazy, turn)
        for device in rows.devices:
            every, aside, live = ([row for row in some if row.device == device] for some in (rows.rows, volatile, lazy))
            small = [row for row in every if row.is_small and not row.is_instant]
            flight = self._flights[device] = Flight(device, small, aside, live, self._slot, turn)
            at_once += flight.refused
            volatile = [row for row in volatile if row not in flight.refused]
            self._flying += live
        self._is_flying = bool(self._flights)
        self._missing = dict(rows.later)
        self._share_out(rows, at_once, volatile)
        for replica in rows.replicas:
            is_lazy = replica.row.trust is Trust.PROVEN and replica.row.position not in fresh
            self._add(replica.row.owner if is_lazy else AT_ONCE, [Job(replica.row, 0, 0, replica)])
            if replica.row.trust is Trust.UNPROVEN and replica.row.position not in fresh:
                self._replicas.append(replica)

    def _share_out(self, rows: Rows, at_once: Sequence[Row], volatile: Sequence[Row]) -> None:
        """What is to be done for whom."""
        whose = {row.ready: AT_ONCE for row in at_once} | {row.ready: SET_ASIDE for row in volatile}
        for owner, jobs in rows.jobs.items():
            self._add(owner, [job for job in jobs if job.row.ready not in whose] if whose else jobs)
        for owner in (AT_ONCE, SET_ASIDE) if whose else ():
            self._add(owner, [job for jobs in rows.jobs.values() for job in jobs if whose.get(job.row.ready) == owner])

    def _add(self, owner: int, jobs: Sequence[Job]) -> None:
        if jobs:
            self._jobs.setdefault(owner, deque()).extend(jobs)
            self._left[owner] = self._left.get(owner, 0) + len(jobs)

    def finish_at_once(self) -> None:
        """Copy what must have been copied when the call returns; `work` in another thread helps."""
        self._drain([AT_ONCE])
        self._wait_for_devices([AT_ONCE])

    def work(self) -> None:
        """Copy what is left, and return when it is copied; called in a thread of its own."""
        try:
            for flight in self._flights.values():
                flight.start()
            self._drain([AT_ONCE, *self._jobs])
            for flight in self._flights.values():
                flight.land(self._landed)
        except BaseException as error:
            self.give_up(HoldfastError(f"a device did not copy the state: {error}"))
        with self._changed:  # an optimizer may step only before or after this
            moved = [row for row in self._flying if self._evidence.has_moved(row)]
            self._flying, self._is_flying = [], False
        for row in moved:
            self._broken(row)

    def hold(self, optimizer: int | None) -> None:
        """Return when an optimizer (its `id`; None: anybody) may change its tensors. This thread copies meanwhile, too."""
        is_first, self._was_held = not self._was_held, True
        is_over = not self._left and not self._audit and not self._replicas and not self._is_flying
        if is_over and not (is_first and isinstance(self.error, Torn)):
            return
        start = time.perf_counter()
        self._holding_since = self._holding_since or start
        self._drain(list(self._jobs) if optimizer is None else [optimizer, UNOWNED, AT_ONCE])
        self._prove(optimizer)
        self._hold_up_devices(optimizer)
        if is_first and isinstance(self.error, Torn):
            self._distrust()
        self._held_seconds += time.perf_counter() - start
        self._holding_since = 0.0

    def finish(self) -> None:
        """Return when no device is copying any more; says nothing about what may be changed."""
        if self._flights:
            self._drain(list(self._jobs))
            self._wait_for_devices(None)

    @property
    def held_seconds(self) -> float:
        """How long optimizers have waited for it so far."""
        since = self._holding_since
        return self._held_seconds + (time.perf_counter() - since if since else 0.0)

    def release(self) -> None:
        """Prove nothing more, and let go of the slot, which is about to be filled again. All must be copied."""
        self._audit, self._replicas = [], []
        self._slot = np.empty(0, np.uint8)

    def give_up(self, error: HoldfastError) -> None:
        """Copy no more, and have nobody wait."""
        with self._changed:
            self.error = self.error or error
            for owner, jobs in self._jobs.items():
                if jobs:
                    self._count(owner, len(jobs))
                    jobs.clear()

    def check(self) -> None:
        """Whether the copy is of the state at the call; once all is copied.

        Raises:
            Torn: a tensor has changed meanwhile.  What else the capture has failed with.
        """
        if self.error is None:
            for row in (*self._evidence.differing(self._slot), *(r for f in self._flights.values() for r in f.differing())):
                self._broken(row)
        if self.error is not None:
            raise self.error

    def _drain(self, owners: Sequence[int]) -> None:
        """Do what these owners need, and wait for what other threads are doing of it."""
        while (found := self._next(owners)) is not None:
            self._run(*found)
        if any(owner in self._left for owner in owners):
            with self._changed:
                self._changed.wait_for(lambda: not any(owner in self._left for owner in owners))

    def _next(self, owners: Sequence[int]) -> tuple[int, Job] | None:
        with self._changed:
            for owner in owners:
                if jobs := self._jobs.get(owner):
                    return owner, jobs.popleft()
        return None

    def _run(self, owner: int, job: Job) -> None:
        told = 0
        try:
            row = job.row
            if job.replica is not None:
                self._digest(job.replica)
            elif row.device is not None:
                self._flights[row.device].enqueue(owner, job)
                if self._evidence.has_moved(row):
                    self._broken(row)
            else:
                at = row.at + job.start
                row.source.copy_into(job.start, self._slot[at : at + job.nbytes])
                told = self._copied(job)
        except BaseException as error:
            self.give_up(error if isinstance(error, HoldfastError) else HoldfastError(f"{job.row.name} was not copied: {error}"))
        finally:
            with self._changed:
                self._count(owner, 1)
        if told:
            self._told(told)

    def _count(self, owner: int, done: int) -> None:
        self._left[owner] -= done
        if not self._left[owner]:
            del self._left[owner]
            self._changed.notify_all()

    def _digest(self, replica: Replica) -> None:
        def work() -> None:
            self.proofs[replica.name] = (replica.holders, source_digest(replica.row.source))

        device = replica.row.device
        work() if device is None else self._flights[device].read(work)

    def _landed(self, job: Job) -> None:
        if told := self._copied(job):
            self._told(told)

    def _copied(self, job: Job) -> int:
        """Note what was copied; returns how many rows are complete, if it is time to say so."""
        row = job.row
        with self._changed:
            self._missing[row.ready] -= job.nbytes
            if self._missing[row.ready]:
                return 0
            del self._missing[row.ready]
            is_moved = row.device is None and self._evidence.has_moved(row)  # for devices that was asked when it was enqueued
            self._untold += row.nbytes
            complete = 0
            if self._missing and self._untold >= _TOLD_BYTES and not is_moved:  # the end is told otherwise
                complete, self._untold = min(self._missing) - 1, 0
        if is_moved:
            self._broken(row)
        return complete

    def _prove(self, optimizer: int | None) -> None:
        """Compare what was copied at the call with what an optimizer is about to change: from now on it may be copied later."""
        with self._changed:  # several threads may run optimizers
            audit, self._audit = self._audit, []
            mine = [row for row in audit if optimizer is None or row.owner in (optimizer, UNOWNED)]
            known = {row.ready for row in mine}
            self._audit = [row for row in audit if row.ready not in known]
            replicas, self._replicas = self._replicas, []
        if self.error is not None:  # what was not copied says nothing about what holds still
            return
        self._prove_on_devices([row for row in mine if row.device is not None])
        for row in mine:
            if row.device is None:
                row.trust = Trust.PROVEN if self._is_still(row) else Trust.BROKEN
        for replica in replicas:
            is_still = self.proofs.get(replica.name, ((), ""))[1] == source_digest(replica.row.source)
            replica.row.trust = Trust.PROVEN if is_still else Trust.BROKEN

    def _prove_on_devices(self, rows: Sequence[Row]) -> None:
        for device in {row.device for row in rows if row.device is not None}:
            here = [row for row in rows if row.device == device]
            compared = [row for row in here if row.flat is not None and self.error is None]
            pairs = [(row, self._slot[row.at : row.at + row.nbytes]) for row in compared]
            try:
                differ = self._flights[device].differ(pairs) if pairs else []
            except torch.OutOfMemoryError:  # at the next capture, then
                continue
            still = {row.ready for row, is_other in zip(compared, differ, strict=True) if not is_other}
            for row in here:
                row.trust = Trust.PROVEN if row.ready in still else Trust.BROKEN

    def _hold_up_devices(self, optimizer: int | None) -> None:
        """Have devices, and for `None` this thread, wait for the copies of what is about to be changed."""
        with self._changed:
            if not self._is_flying:
                return
            mine = [row for row in self._flying if optimizer is None or row.owner in (optimizer, UNOWNED)]
            moved = [row for row in mine if self._evidence.has_moved(row)]
            known = {row.ready for row in mine}
            self._flying = [row for row in self._flying if row.ready not in known]
        for row in moved:
            self._broken(row)
        if optimizer is None:
            self._wait_for_devices(None)
        else:
            for flight in self._flights.values():
                flight.hold_up((optimizer, UNOWNED, AT_ONCE))

    def _wait_for_devices(self, owners: Sequence[int] | None) -> None:
        for flight in self._flights.values():
            flight.wait(owners)

    def _is_still(self, row: Row) -> bool:
        if row.bytes is None:
            return False
        for start in range(0, row.nbytes, JOB_BYTES):
            copied = self._slot[row.at + start : row.at + min(row.nbytes, start + JOB_BYTES)]
            if digest(copied) != digest(row.bytes[start : start + len(copied)]):
                return False
        return True

    def _distrust(self) -> None:
        """What else has moved as well: else each of many buffers would cost a capture. Before any optimizer steps only."""
        for row in self._evidence.moved():
            row.trust = Trust.BROKEN

    def _broken(self, row: Row) -> None:
        row.trust = Trust.BROKEN
        self.give_up(
            Torn(
                f"{row.name} was changed while it was being captured, and not by the step of an optimizer that is known to wait: "
                "this capture is not used, and the tensor is copied at the call from now on. Wrap such code in ckpt.mutating()"
            )
        )


def _is_slight(row: Row) -> bool:
    """Whether it is not worth finding out if a tensor holds still: none of an optimizer, and small."""
    return row.owner == UNOWNED and row.trust is Trust.UNPROVEN and row.nbytes <= _SLIGHT_BYTES


def _within(nbytes: int, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows of so many bytes together, and the others."""
    first: list[Row] = []
    others: list[Row] = []
    for row in rows:
        nbytes -= row.nbytes
        (first if nbytes >= 0 else others).append(row)
    return first, others
