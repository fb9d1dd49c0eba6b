"""One rank's saving in the background: when its memory is ready, what is under way, and what has come of it.

The trainer's thread looks at the state, copies what cannot wait, and goes on. A thread copies the rest; the engine behind the
link writes. What goes wrong there is kept until the trainer's next call.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..agent.arena import Arena, Bytes
from ..agent.gate import said_of
from ..agent.host import free_bytes
from ..agent.links import Link
from ..agent.messages import (
    Begin,
    Captured,
    Common,
    Displace,
    Dropped,
    Free,
    Joined,
    Memory,
    Message,
    Outcome,
    Progress,
    Structured,
)  # fmt: skip
from ..errors import Deadline, HoldfastError, Refused, Superseded, Unavailable
from ..format.records import StepRef
from ..handle import CAPTURED, DURABLE, Handle
from ..policy.memory import versions
from ..run.census import Census, Structure
from ..run.census import Common as Shared
from ..run.contents import Contents
from ..run.shares import plan, share_of, structure_of
from ..run.team import error_of
from ..run.timings import TRAINER, Phase
from ..state import State
from . import barrier
from .device import Pins
from .rows import Rows, rows_of
from .shot import Shot
from .view import Look, View

log = logging.getLogger("holdfast")
_READY_SECONDS = 60.0
"""How long the first save, or the first one of another structure, waits for its memory."""
_DISPLACE_SECONDS = 0.1
"""How long a save waits for what it displaces; it takes a message and its answer."""
_LATE_SECONDS = 0.5
"""How long a rank waits for the word that a slot is free, which other ranks have heard already."""


@dataclass(frozen=True)
class Orders:
    """What the agent must know of a save besides the state."""

    step: int
    metrics: dict[str, Any]
    refer: bool
    pin: str = ""
    may_wait: bool = False
    """Until memory is free; else the save is left out then."""
    displaces: bool = False
    """What is not being written yet makes room for it."""


@dataclass(frozen=True)
class Place:
    """A slot that is to be filled, and what it was made for.

    Attributes:
        memory: of the slot. rows: that have their places in it. table: the number under which the engine knows them.
        census: digest of the one that the rows were computed from.
    """

    slot: int
    memory: Bytes
    rows: Rows
    table: int
    census: str


@dataclass(frozen=True)
class LeftOut:
    """No memory is free for a save. `by_all`: the ranks have agreed on that, and none of them begins it."""

    by_all: bool


class DoesNotFit(Refused):
    """Not even one version fits into the memory that is allowed; `nbytes`: of one, on this node."""

    def __init__(self, nbytes: int, memory: int | str) -> None:
        super().__init__(
            f"one version of the state takes {nbytes / 2**30:.2f} GiB of this node's memory: memory={memory!r} does not hold it"
        )
        self.nbytes = nbytes


class Saver:
    """Args:
    ranks: global ranks that save together, () for one process. here: those of them on this node. is_shared: the engine behind
        the link unites the ranks here, so that this one captures its share only; else it captures all that it holds.
    link: made with `hear` and `lost` of this object. committed: called, in a thread, with each step that was committed.
    agree: what all ranks do about a step, from what this one could: the first to ask decides.
    """

    def __init__(
        self,
        state: State,
        ranks: tuple[int, ...],
        rank: int,
        here: tuple[int, ...],
        is_shared: bool,
        memory: int | str,
        seconds: float,
        attempt: int,
        committed: Callable[[StepRef], None],
        agree: Callable[[int, bool], bool],
    ) -> None:
        self._view, self._rank, self._mates, self._is_shared = View(state, ranks), rank, here, is_shared
        self._here = len(here)
        self._state, self._memory, self._seconds, self._attempt = state, memory, seconds, attempt
        self._committed, self._agree = committed, agree
        self.link: Link
        self._lock = threading.Condition()
        self._rows: Rows | None = None
        self._contents: Contents | None = None
        self._structure: Structure | None = None
        self._census: Census | None = None
        self._arena: Arena | None = None
        self._pins = Pins()
        self._number = 0
        """Of the table that was sent last, 0 for none; its memory has come when `_ready` is the same."""
        self._tables = 0
        """How many there were; no two have one number, whichever agent they were sent to."""
        self._ready = 0
        self._has_saved = False
        """Of this structure: then a save that is due does not wait for an engine or for memory."""
        self._free: set[int] = set()
        self._shots: dict[int, Shot] = {}
        """By slot."""
        self._handles: dict[int, tuple[Handle, float, int]] = {}
        """By step: those that are under way, when they began, and how many bytes the state had then."""
        self._nbytes = 0
        """Of the state, since it has consisted of these tensors."""
        self._turns: dict[int, int] = {}
        """How many times a step was begun; the last one only."""
        self._problems: list[HoldfastError] = []
        """For the trainer's next call."""
        self._durations: list[tuple[float, int]] = []
        self._fatal: HoldfastError | None = None
        self._turn = 0
        self.last_durable: tuple[int, float] | None = None
        """(step, seconds on the monotonic clock at its call)."""
        self._work: queue.SimpleQueue[tuple[Shot, Handle, Begin] | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_all, name="holdfast-capture", daemon=True)
        self._copier.start()
        self._guard = barrier.Guard()
        barrier.install()

    @property
    def contents(self) -> Contents:
        """Of the last look."""
        assert self._contents is not None
        return self._contents

    def prepare(self) -> None:
        """Have memory made for what the state consists of, in the background. Does nothing where that was done.

        Raises:
            DoesNotFit: not one version fits.
        """
        if self._number == 0 and self.link.is_up.is_set():
            self._take(self._view.look())

    def check_memory(self) -> None:
        """Whether what the state consists of now would fit, as far as that is known: replicas may share the writing.

        Raises:
            DoesNotFit: not one version of it.
        """
        nbytes = self._view.look().contents.nbytes
        least = nbytes // self._here if self._is_shared else nbytes
        if not versions(least, self._here, self._memory, free_bytes()):
            raise DoesNotFit(least * self._here, self._memory)

    def begin(self, orders: Orders) -> Handle | None:
        """Capture the state now; the rest happens in the background.

        Returns None if it is left out because no memory is free.

        Raises:
            Unsupported: something has no stored form.  DoesNotFit.  Deadline: there was no memory in time.
        """
        start, wall = time.monotonic(), time.time()
        self._turns = {orders.step: self._turns.get(orders.step, 0) + 1}
        look = self._view.look()
        self._contents = look.contents
        turn = self._turns[orders.step]
        try:
            place = self._place(orders, look, start)
        except HoldfastError as error:  # other ranks may take part
            self.link.send(Dropped(orders.step, said_of(error), turn=turn))
            raise
        if isinstance(place, LeftOut):  # that it was left out is counted where all is counted
            why = ["Unavailable", f"rank {self._rank}: no memory was free"]
            self.link.send(Dropped(orders.step, why, True, turn, place.by_all))
            return None
        rows, slot = place.rows, place.slot
        at_once = self._renew(rows, look)
        if (old := self._shots.get(slot)) is not None:
            barrier.unwatch(old)
            old.release()
        handle = Handle(orders.step, self._attempt, "begun")
        self._handles[orders.step] = (handle, start, self._nbytes)
        step = orders.step
        shot = Shot(rows, at_once, place.memory, self._turn, lambda at: self.link.send(Progress(step, at)))
        self._turn += 1
        self._shots[slot] = shot
        barrier.watch(shot)
        values, roles = look.contents.values, look.contents.roles
        begin = Begin(step, slot, place.table, place.census, values, roles, orders.metrics, orders.refer, orders.pin, wall, turn)
        self._work.put((shot, handle, begin))  # last: a thread that wakes takes the interpreter's lock
        shot.finish_at_once()
        shot.call_seconds = time.monotonic() - start
        return handle

    def hold(self) -> None:
        """Return when the state may be changed by whoever calls: nothing is being copied any more."""
        for shot in list(self._shots.values()):
            shot.hold(None)

    def problems(self) -> list[HoldfastError]:
        """What has gone wrong since this was asked last.

        Raises:
            Superseded, Refused: training must not go on so.
        """
        now = time.monotonic()
        for step, (handle, began, _) in list(self._handles.items()):
            if now - began > self._seconds and not handle.is_over:
                self._fail(step, Deadline(f"step {step} is not durable after {now - began:.0f} s; the writer goes on trying"))
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            found, self._problems = self._problems, []
        return found

    def durations(self) -> list[tuple[float, int]]:
        """Seconds from the call to durable, and bytes of the state, of what has become so since this was asked last."""
        with self._lock:
            found, self._durations = self._durations, []
        return found

    def drain(self, seconds: float) -> None:
        """Wait until all that was begun is durable or has failed; what fails is among the problems.

        Raises:
            Deadline: not in time.
        """
        until = time.monotonic() + seconds
        for handle, _, _ in list(self._handles.values()):
            handle_left = max(0.0, until - time.monotonic())
            try:
                handle.wait(DURABLE, handle_left)
            except Deadline:
                raise
            except HoldfastError:
                continue

    def close(self, seconds: float) -> None:
        """Let go of everything. What is under way the agent goes on with."""
        self._guard.remove()
        self._work.put(None)
        self._copier.join(seconds)
        for shot in self._shots.values():
            barrier.unwatch(shot)
            shot.release()
        self.link.close(seconds)
        self._shots.clear()
        self._pins.drop()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def hear(self, message: Message, fds: list[int]) -> None:
        """Take what the engine says; called in a thread."""
        if isinstance(message, Memory):
            self._take_memory(message, fds)
        elif isinstance(message, Common):
            self._take_common(message)
        elif isinstance(message, Outcome):
            self._take_outcome(message)
        elif isinstance(message, Joined):  # what it was told before that it has not understood
            with self._lock:
                self._forget_what_was_told()
        elif isinstance(message, Free):
            if self._arena is not None:
                self._reach(self._arena, message.slot)
            with self._lock:
                self._free.add(message.slot)
                self._lock.notify_all()

    def lost(self, why: str) -> None:
        """The engine is gone: nothing of what is under way will become durable. Called in a thread."""
        error = Unavailable(f"{why}; what was not durable yet is lost, training goes on, and another agent is started")
        with self._lock:
            self._forget_what_was_told()
            self._free = set()
            under_way = list(self._handles)
            shots, self._shots = list(self._shots.values()), {}
        for shot in shots:
            shot.give_up(error)
            barrier.unwatch(shot)
        for step in under_way:
            self._fail(step, error)

    def _forget_what_was_told(self) -> None:
        """Have the engine told anew what the state consists of. The trainer may have said it to one that was just gone, or to
        one that did not know of this job yet: neither answers."""
        self._number = self._ready = 0
        self._structure = self._census = None
        self._lock.notify_all()

    def _take(self, look: Look) -> None:
        """Tell the engine what the state consists of now."""
        self._contents, self._nbytes = look.contents, look.contents.nbytes
        self._guard.cover([part for _, part in self._state.parts])
        with self._lock:
            self._tables += 1
            self._number = self._tables
        if self._is_shared:
            structure = structure_of(look.contents)
            is_known = self._structure is not None and structure.digest() == self._structure.digest()
            self._structure = structure
            if not is_known or self._census is None:
                self._census = None
                self.link.send(Structured(structure.digest(), structure.encode()))
                return
        self._send_table()

    def _send_table(self) -> None:
        with self._lock:  # all of it: another thread may be told to do the same, and rows go with their number
            self._send_next_table()

    def _send_next_table(self) -> None:
        self._tables += 1
        number = self._number = self._tables
        shares = plan(self.contents, self._census, self._mates) if self._census is not None else None
        optimizers = [part for _, part in self._state.parts if isinstance(part, torch.optim.Optimizer)]
        known = [optimizer for optimizer in optimizers if barrier.has_fired(optimizer)]
        self._rows = rows_of(self.contents, shares, barrier.in_order(known), self._rows)
        mine = 0 if self._arena is None else self._arena.nbytes
        count = versions(self._rows.nbytes, self._here, self._memory, free_bytes() + mine)
        if not count:
            self._number = 0
            raise DoesNotFit(self._rows.nbytes * self._here, self._memory)
        self.link.send(self._rows.message(number, count))

    def _take_common(self, message: Common) -> None:
        """Who holds what is known: the share of this rank, and its memory, follow."""
        try:
            if message.error is not None:
                raise error_of(message.error)
            if self._structure is None:
                return
            self._census = Census(self._structure, Shared.decode(message.data), self._rank)
            self._send_table()
        except HoldfastError as error:
            with self._lock:
                self._fatal = error
                self._lock.notify_all()

    def _take_memory(self, message: Memory, fds: list[int]) -> None:
        if message.number != self._number:
            for fd in fds:
                os.close(fd)
            return
        if message.error is not None or not fds:
            with self._lock:
                self._fatal = error_of(message.error or ["Unavailable", "no memory was given"])
                self._lock.notify_all()
            return
        if self._arena is not None and os.path.sameopenfile(self._arena.fd, fds[0]):  # what is under way in it goes on
            os.close(fds[0])
        else:
            arena = Arena(fds[0], message.slots, message.slot_bytes)
            self._pins.drop()
            for slot in message.free[:1]:
                self._reach(arena, slot)
            with self._lock:
                old, self._arena, self._free, self._shots = self._arena, arena, set(message.free), {}
                if old is not None:  # what is being copied into it has its own view
                    old.close()
        with self._lock:
            self._ready = message.number
            self._lock.notify_all()

    def _reach(self, arena: Arena, slot: int) -> None:
        """Make a slot's memory fast to reach, for this process and its devices."""
        arena.populate(slot)
        self._pins.take(arena, slot, self._rows.devices if self._rows is not None else ())

    def _take_outcome(self, message: Outcome) -> None:
        found = self._handles.get(message.step)
        if message.error is None:
            ref = StepRef(message.step, message.attempt)
            self._committed(ref)
            if found is not None:
                handle, began, nbytes = found
                self.last_durable = (message.step, began)
                with self._lock:
                    self._durations.append((time.monotonic() - began, nbytes))
                handle.reach(DURABLE)
                self._handles.pop(message.step, None)
            return
        error = error_of(message.error)
        if message.was_superseded or isinstance(error, Superseded):
            with self._lock:
                self._fatal = self._fatal or error
        if message.step < 0:
            with self._lock:
                self._problems.append(error)
            return
        if message.turn in (0, self._turns.get(message.step, message.turn)):  # else it was begun anew before this word came
            self._fail(message.step, error, message.is_skip)

    def _fail(self, step: int, error: HoldfastError, is_skip: bool = False) -> None:
        found = self._handles.pop(step, None)
        if found is not None:
            found[0].fail(error)
            with self._lock:
                if not is_skip:
                    self._problems.append(error)

    def _place(self, orders: Orders, look: Look, start: float) -> Place | LeftOut:
        """Where to capture to, if the save is not left out."""
        if look.is_new:
            self._has_saved = False
        self._await_ready(look, _READY_SECONDS if orders.may_wait or not self._has_saved else 0.0)
        if orders.displaces and not self._free and self._is_ready:
            self.link.send(Displace(orders.step))
            with self._lock:
                self._lock.wait_for(lambda: self._free or not self._is_ready, _DISPLACE_SECONDS)
        # where all wait there is nothing to agree on, and the answer about this step may be there: that it was left out
        if not orders.may_wait and not self._agree(orders.step, self._is_ready and bool(self._free)):
            self._check_present(orders)
            return LeftOut(by_all=True)
        # another rank has a slot, and this one will hear of its own; or this one may wait
        left = self._seconds - (time.monotonic() - start) if orders.may_wait else _LATE_SECONDS
        with self._lock:
            self._lock.wait_for(lambda: (self._free and self._is_ready) or self._fatal is not None, max(0.0, left))
            if self._fatal is not None:
                raise self._fatal
            if self._free and self._is_ready:
                self._has_saved = True
                return self._take_place()
        if orders.may_wait:
            raise Deadline(f"step {orders.step}: no memory was free within {self._seconds:.0f} s")
        self._check_present(orders)
        return LeftOut(by_all=False)

    def _take_place(self) -> Place:
        """A free slot, and all that belongs to it; a moment later another thread may have put others in their places."""
        assert self._rows is not None
        assert self._arena is not None
        slot = self._free.pop()
        census = self._census.common.digest() if self._census is not None else ""
        return Place(slot, self._arena.slot(slot), self._rows, self._ready, census)

    def _check_present(self, orders: Orders) -> None:
        """Raises:
        Unavailable: nobody is there to save, which is another reason to leave a save out than that earlier ones take long.
        """
        if not self._is_ready and not self._has_saved:
            raise Unavailable(f"step {orders.step}: no agent, or no memory, after {_READY_SECONDS:.0f} s")

    def _await_ready(self, look: Look, seconds: float) -> None:
        """Have the engine know what the state consists of, and wait for the memory."""
        until = time.monotonic() + seconds
        while self._fatal is None:
            if self.link.is_up.wait(max(0.0, min(1.0, until - time.monotonic()))):
                if look.is_new or self._number == 0 or self._rows is None:
                    self._take(look)
                    look = Look(look.contents, look.fresh, False)
                with self._lock:
                    self._lock.wait_for(
                        lambda: self._is_ready or self._fatal is not None or not self._number,  # the last: it was lost
                        max(0.0, until - time.monotonic()),
                    )
            if self._is_ready or time.monotonic() >= until:
                break
        if self._fatal is not None:
            raise self._fatal

    @property
    def _is_ready(self) -> bool:
        return self._number > 0 and self._ready == self._number

    def _renew(self, rows: Rows, look: Look) -> list[int]:
        """Give rows that only this look knows their sources; returns the positions of those that must be copied at once."""
        at_once = []
        fresh = set(look.fresh)
        for row in (*rows.rows, *(replica.row for replica in rows.replicas)) if fresh else ():
            if row.position not in fresh:
                continue
            item = look.contents.tensors[row.position]
            source = item.source if row.share is None else share_of(item, row.share).source
            assert source is not None
            is_same = row.renew(source)
            if not is_same or item.role not in look.stable:
                at_once.append(row.position)
        return at_once

    def _copy_all(self) -> None:
        while (work := self._work.get()) is not None:
            shot, handle, begin = work
            self.link.send(begin)
            shot.work()
            try:
                shot.check()
            except HoldfastError as error:
                self.link.send(Dropped(handle.step, said_of(error), turn=begin.turn))
                self._fail(handle.step, error)
                continue
            phases = self._phases(shot, begin)
            self.link.send(Captured(handle.step, shot.proofs, phases), partial(handle.reach, CAPTURED))

    def _phases(self, shot: Shot, begin: Begin) -> tuple[Phase, ...]:
        """What a capture that has just ended took, and for how long it held up training."""
        now = time.time()
        held = shot.held_seconds
        return (
            Phase("capture", begin.began, max(0.0, now - begin.began), shot.nbytes),
            Phase("step", begin.began, shot.call_seconds, 0, TRAINER),
            Phase("barrier", max(begin.began, now - held), held, 0, TRAINER),
        )
