"""One rank's saving in the background: when its memory is ready, what is under way, and what has come of it.

The trainer's thread looks at the state, copies what cannot wait, and goes on. A thread copies the rest; the engine behind the
link writes. What goes wrong there is kept until the trainer's next call.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..agent.gate import said_of
from ..agent.links import Link
from ..agent.messages import (
    Begin,
    Captured,
    Common,
    Dropped,
    Free,
    Joined,
    Memory,
    Message,
    Outcome,
    Progress,
)  # fmt: skip
from ..errors import Deadline, HoldfastError, Superseded, Unavailable
from ..format.records import StepRef
from ..handle import CAPTURED, DURABLE, Handle
from ..run.contents import Contents
from ..run.shares import share_of
from ..run.team import error_of
from ..run.timings import TRAINER, Phase
from ..state import State
from . import barrier
from .rows import Rows
from .shot import Shot
from .slots import NoRoom, Orders, Slots
from .view import Look, View

log = logging.getLogger("holdfast")


@dataclass(frozen=True)
class UnderWay:
    """A step that is not durable yet.

    Attributes:
        began: seconds on the monotonic clock. nbytes: of the state. turn: how many times it was begun.
    """

    handle: Handle
    began: float
    nbytes: int
    turn: int


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
        self._view, self._rank = View(state, ranks), rank
        self._state, self._seconds, self._attempt, self._committed = state, seconds, attempt, committed
        self._slots = Slots(state, rank, here, is_shared, memory, seconds, agree, self._forget_shots)
        self._lock = threading.Condition()
        self._shots: dict[int, Shot] = {}
        """By slot."""
        self._handles: dict[int, UnderWay] = {}
        """By step."""
        self._turns: dict[int, int] = {}
        """How many times a step was begun; the last one only."""
        self._problems: list[HoldfastError] = []
        """For the trainer's next call."""
        self._durations: list[tuple[float, int]] = []
        self._turn = 0
        self.last_durable: tuple[int, float] | None = None
        """(step, seconds on the monotonic clock at its call)."""
        self._work: queue.SimpleQueue[tuple[Shot, Handle, Begin] | None] = queue.SimpleQueue()
        self._copier = threading.Thread(target=self._copy_all, name="holdfast-capture", daemon=True)
        self._copier.start()
        self._guard = barrier.Guard()
        barrier.install()

    @property
    def link(self) -> Link:
        """To the engine; made with `hear` and `lost` of this object, and set before anything else is done with it."""
        return self._slots.link

    @link.setter
    def link(self, link: Link) -> None:
        self._slots.link = link

    @property
    def contents(self) -> Contents:
        """Of the last look."""
        assert self._slots.contents is not None
        return self._slots.contents

    def prepare(self) -> None:
        """Have memory made for what the state consists of, in the background. Does nothing where that was done.

        Raises:
            DoesNotFit: not one version fits.
        """
        self._slots.prepare(self._look)

    def check_memory(self) -> None:
        """Whether what the state consists of now would fit, as far as that is known.

        Raises:
            DoesNotFit: not one version of it.
        """
        self._slots.check(self._look().contents.nbytes)

    def begin(self, orders: Orders) -> Handle | None:
        """Capture the state now; the rest happens in the background.

        Returns None if it is left out because no memory is free.

        Raises:
            Unsupported: something has no stored form.  DoesNotFit.  Deadline: there was no memory in time.
        """
        start, wall = time.monotonic(), time.time()
        self._turns = {orders.step: self._turns.get(orders.step, 0) + 1}
        look = self._look()
        turn = self._turns[orders.step]
        try:
            place = self._slots.place(orders, look, start)
        except HoldfastError as error:  # other ranks may take part
            self.link.send(Dropped(orders.step, said_of(error), turn=turn))
            raise
        if isinstance(place, NoRoom):  # that it was left out is counted where all is counted
            why = ["Unavailable", f"rank {self._rank}: no memory was free"]
            self.link.send(Dropped(orders.step, why, True, turn, place.by_all))
            return None
        rows, slot = place.rows, place.slot
        at_once = self._renew(rows, look)
        if (old := self._shots.get(slot)) is not None:
            barrier.unwatch(old)
            old.release()
        handle = Handle(orders.step, self._attempt, "begun")
        self._handles[orders.step] = UnderWay(handle, start, self._slots.nbytes, turn)
        step = orders.step
        shot = Shot(rows, at_once, place.memory, self._turn, lambda at: self.link.send(Progress(step, at, turn)))
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
        for step, one in list(self._handles.items()):
            if now - one.began > self._seconds and not one.handle.is_over:
                late = f"step {step} is not durable after {now - one.began:.0f} s; the writer goes on trying"
                self._fail(step, Deadline(late))
        if self._slots.fatal is not None:
            raise self._slots.fatal
        with self._lock:
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
        for one in list(self._handles.values()):
            try:
                one.handle.wait(DURABLE, max(0.0, until - time.monotonic()))
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
        self._slots.close()

    def hear(self, message: Message, fds: list[int]) -> None:
        """Take what the engine says; called in a thread."""
        if isinstance(message, Outcome):
            self._take_outcome(message)
        elif isinstance(message, (Memory, Common, Free, Joined)):
            self._slots.hear(message, fds)

    def lost(self, why: str) -> None:
        """The engine is gone: nothing of what is under way will become durable. Called in a thread."""
        error = Unavailable(f"{why}; what was not durable yet is lost, training goes on, and another agent is started")
        self._slots.lost()
        with self._lock:
            under_way = {step: one.turn for step, one in self._handles.items()}
            shots, self._shots = list(self._shots.values()), {}
        for shot in shots:
            shot.give_up(error)
            barrier.unwatch(shot)
        for step, turn in under_way.items():
            self._fail(step, error)
            self.link.send(Dropped(step, said_of(error), turn=turn))  # the next one tells agents that wait for it

    def _look(self) -> Look:
        look = self._view.look()
        if look.is_new:
            self._guard.cover([part for _, part in self._state.parts])
        return look

    def _forget_shots(self) -> None:
        with self._lock:
            shots, self._shots = list(self._shots.values()), {}
        for shot in shots:
            shot.finish()

    def _take_outcome(self, message: Outcome) -> None:
        found = self._handles.get(message.step)
        if message.error is None:
            ref = StepRef(message.step, message.attempt)
            self._committed(ref)
            if found is not None:
                self.last_durable = (message.step, found.began)
                with self._lock:
                    self._durations.append((time.monotonic() - found.began, found.nbytes))
                found.handle.reach(DURABLE)
                self._handles.pop(message.step, None)
            return
        error = error_of(message.error)
        if message.was_superseded or isinstance(error, Superseded):
            self._slots.stop(error)
        if message.step < 0:
            with self._lock:
                self._problems.append(error)
            return
        if message.turn in (0, self._turns.get(message.step, message.turn)):  # else it was begun anew before this word came
            self._fail(message.step, error, message.is_skip)

    def _fail(self, step: int, error: HoldfastError, is_skip: bool = False) -> None:
        found = self._handles.pop(step, None)
        if found is not None:
            found.handle.fail(error)
            with self._lock:
                if not is_skip:
                    self._problems.append(error)

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
            captured = Captured(handle.step, shot.proofs, phases, begin.turn)
            self.link.send(captured, partial(handle.reach, CAPTURED))

    def _phases(self, shot: Shot, begin: Begin) -> tuple[Phase, ...]:
        """What a capture that has just ended took, and for how long it held up training."""
        now = time.time()
        held = shot.held_seconds
        return (
            Phase("capture", begin.began, max(0.0, now - begin.began), shot.nbytes),
            Phase("step", begin.began, shot.call_seconds, 0, TRAINER),
            Phase("barrier", max(begin.began, now - held), held, 0, TRAINER),
        )
