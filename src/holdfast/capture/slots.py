"""The memory that captures go to: what the engine was told of the state, the slots that it gave for it, and which is next.

The engine is told what the state consists of, and answers with memory: with a slot for each version that the budget allows. An
engine that is gone is forgotten, and the next one is told anew.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..agent.arena import Arena, Bytes
from ..agent.host import free_bytes
from ..agent.links import Link
from ..agent.messages import Common, Displace, Free, Joined, Memory, Structured
from ..errors import Deadline, HoldfastError, Refused, Unavailable
from ..policy.memory import versions
from ..run.census import Census, Structure
from ..run.census import Common as Shared
from ..run.contents import Contents
from ..run.shares import plan, structure_of
from ..run.team import error_of
from ..state import State
from . import barrier
from .device import Pins
from .rows import Rows, rows_of
from .view import Look

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
class NoRoom:
    """No memory is free for a save. `by_all`: the ranks have agreed on that, and none of them begins it."""

    by_all: bool


class DoesNotFit(Refused):
    """Not even one version fits into the memory that is allowed; `nbytes`: of one, on this node."""

    def __init__(self, nbytes: int, memory: int | str) -> None:
        super().__init__(
            f"one version of the state takes {nbytes / 2**30:.2f} GiB of this node's memory: memory={memory!r} does not hold it"
        )
        self.nbytes = nbytes


class Slots:
    """Args:
    here: global ranks on this node, this one among them. is_shared: the engine unites them, so that this one captures its share
        only; else it captures all that it holds.
    memory: of the node, as `policy.memory.versions` takes it. seconds: until a save that waits for memory gives up.
    agree: what all ranks do about a step, from what this one could: the first to ask decides.
    replaced: called, in a thread, before other memory takes the place of what was there; no device may copy into that any more.
    """

    def __init__(
        self,
        state: State,
        rank: int,
        here: tuple[int, ...],
        is_shared: bool,
        memory: int | str,
        seconds: float,
        agree: Callable[[int, bool], bool],
        replaced: Callable[[], None],
    ) -> None:
        self._state, self._rank, self._mates, self._is_shared = state, rank, here, is_shared
        self._memory, self._seconds, self._agree, self._replaced = memory, seconds, agree, replaced
        self.link: Link
        self._lock = threading.Condition()
        self.contents: Contents | None = None
        """Of the last look."""
        self.nbytes = 0
        """Of the state, since it has consisted of these tensors."""
        self._rows: Rows | None = None
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
        self.fatal: HoldfastError | None = None
        """Why nothing can be saved any more."""

    def prepare(self, look: Callable[[], Look]) -> None:
        """Have memory made for what a look shows, in the background. Does nothing where that was done.

        Raises:
            DoesNotFit: not one version fits.
        """
        if self._number == 0 and self.link.is_up.is_set():
            self._tell(look())

    def check(self, nbytes: int) -> None:
        """Whether so many bytes on this rank would fit, as far as that is known: replicas may share the writing.

        Raises:
            DoesNotFit: not one version of them.
        """
        least = nbytes // len(self._mates) if self._is_shared else nbytes
        if not versions(least, len(self._mates), self._memory, free_bytes()):
            raise DoesNotFit(least * len(self._mates), self._memory)

    def stop(self, error: HoldfastError) -> None:
        """From now on, nothing is saved any more."""
        with self._lock:
            self.fatal = self.fatal or error
            self._lock.notify_all()

    def lost(self) -> None:
        """The engine is gone."""
        with self._lock:
            self._free = set()
            self._forget_what_was_told()

    def hear(self, message: Memory | Common | Free | Joined, fds: list[int]) -> None:
        """Take what the engine says of memory; called in a thread."""
        if isinstance(message, Memory):
            self._take_memory(message, fds)
        elif isinstance(message, Common):
            self._take_common(message)
        elif isinstance(message, Joined):  # what it was told before that it has not understood
            with self._lock:
                self._forget_what_was_told()
        else:
            if self._arena is not None:
                self._reach(self._arena, message.slot)
            with self._lock:
                self._free.add(message.slot)
                self._lock.notify_all()

    def close(self) -> None:
        """Let go of the memory. Nothing may be copied into it any more."""
        self._pins.drop()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def place(self, orders: Orders, look: Look, start: float) -> Place | NoRoom:
        """Where to capture to, if the save is not left out; waits until then.

        Args:
            start: of the save, seconds on the monotonic clock.
        Raises:
            DoesNotFit.  Deadline: there was no memory in time.  Unavailable: nobody is there to save.
        """
        self.contents = look.contents
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
            return NoRoom(by_all=True)
        # another rank has a slot, and this one will hear of its own; or this one may wait
        left = self._seconds - (time.monotonic() - start) if orders.may_wait else _LATE_SECONDS
        with self._lock:
            self._lock.wait_for(lambda: (self._free and self._is_ready) or self.fatal is not None, max(0.0, left))
            if self.fatal is not None:
                raise self.fatal
            if self._free and self._is_ready:
                self._has_saved = True
                return self._take_place()
        if orders.may_wait:
            raise Deadline(f"step {orders.step}: no memory was free within {self._seconds:.0f} s")
        self._check_present(orders)
        return NoRoom(by_all=False)

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
        while self.fatal is None:
            if self.link.is_up.wait(max(0.0, min(1.0, until - time.monotonic()))):
                if look.is_new or self._number == 0 or self._rows is None:
                    self._tell(look)
                    look = Look(look.contents, look.fresh, False)
                with self._lock:
                    self._lock.wait_for(
                        lambda: self._is_ready or self.fatal is not None or not self._number,  # the last: it was lost
                        max(0.0, until - time.monotonic()),
                    )
            if self._is_ready or time.monotonic() >= until:
                break
        if self.fatal is not None:
            raise self.fatal

    @property
    def _is_ready(self) -> bool:
        return self._number > 0 and self._ready == self._number

    def _forget_what_was_told(self) -> None:
        """Have the engine told anew what the state consists of. The trainer may have said it to one that was just gone, or to
        one that did not know of this job yet: neither answers."""
        self._number = self._ready = 0
        self._structure = self._census = None
        self._lock.notify_all()

    def _tell(self, look: Look) -> None:
        """Tell the engine what the state consists of now."""
        self.contents, self.nbytes = look.contents, look.contents.nbytes
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
        assert self.contents is not None
        self._tables += 1
        number = self._number = self._tables
        shares = plan(self.contents, self._census, self._mates) if self._census is not None else None
        optimizers = [part for _, part in self._state.parts if isinstance(part, torch.optim.Optimizer)]
        known = [optimizer for optimizer in optimizers if barrier.has_fired(optimizer)]
        self._rows = rows_of(self.contents, shares, barrier.in_order(known), self._rows)
        mine = 0 if self._arena is None else self._arena.nbytes
        count = versions(self._rows.nbytes, len(self._mates), self._memory, free_bytes() + mine)
        if not count:
            self._number = 0
            raise DoesNotFit(self._rows.nbytes * len(self._mates), self._memory)
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
            self.stop(error)

    def _take_memory(self, message: Memory, fds: list[int]) -> None:
        if message.number != self._number:
            for fd in fds:
                os.close(fd)
            return
        if message.error is not None or not fds:
            self.stop(error_of(message.error or ["Unavailable", "no memory was given"]))
            return
        if self._arena is not None and os.path.sameopenfile(self._arena.fd, fds[0]):  # what is under way in it goes on
            os.close(fds[0])
            later = []
        else:
            later = self._replace(Arena(fds[0], message.slots, message.slot_bytes), message.free)
        with self._lock:
            self._ready = message.number
            self._lock.notify_all()
        for slot in later:
            self.hear(Free(slot), [])

    def _replace(self, arena: Arena, free: list[int]) -> list[int]:
        """Use other memory from now on; returns the free slots that a device must be made to reach first."""
        self._replaced()
        self._pins.drop()
        for slot in free[:1]:
            self._reach(arena, slot)
        later = free[1:] if self._rows is not None and self._rows.devices else []
        with self._lock:
            old, self._arena, self._free = self._arena, arena, set(free) - set(later)
            if old is not None:  # what is being copied into it has its own view
                old.close()
        return later

    def _reach(self, arena: Arena, slot: int) -> None:
        """Make a slot's memory fast to reach, for this process and its devices."""
        arena.populate(slot)
        self._pins.take(arena, slot, self._rows.devices if self._rows is not None else ())
