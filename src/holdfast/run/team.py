"""A team of ranks that make one call together: what each says, what the first one answers, with a deadline for every wait.

Messages go over a board, a small key-value store that is not a training process group. A call has one outcome: an error of any
rank, the leader's verdict included, becomes the error of all. What a rank cannot learn over the board, because that is gone or
it waited too long, the commit record in the checkpoint store tells: see `joint.py`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from .. import errors
from ..errors import Deadline, HoldfastError, Replaced, Unavailable
from .agreement import Decisions
from .board import Board

_GRACE_SECONDS = 1.0
"""How much longer than its leader a rank waits: the leader knows for whom all are waiting, and says so."""
_LOOK_SECONDS = 0.25
_LOOKED_AT = 64
_REMEMBERED = 256
_UNREAD = 8
"""For how many calls the leader keeps answers that nobody may have read."""
_FOR_EVER = 1 << 62
"""The order of the call after all others: who is in it takes part in none any more."""


class Where(msgspec.Struct, array_like=True):
    """Which call a rank is in, or was in last."""

    key: str
    name: str
    order: int
    is_over: bool
    """It has failed there, and goes on."""


class Said(msgspec.Struct):
    """One message: the data, or the error that took its place."""

    data: Any = None
    error: list[str] | None = None
    """[name of the error's class, text]."""


@dataclass(frozen=True)
class Team:
    """The ranks that call together.

    Attributes:
        ranks: global ranks, ascending; the first one leads. rank: of this process. node: equal for ranks that share memory.
        names: of members that are more than the rank that stands for them.
        ended: once it is set, nobody is waited for any more.
    """

    ranks: tuple[int, ...]
    rank: int
    board: Board
    node: str = ""
    names: Mapping[int, str] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    _calls: dict[str, int] = field(default_factory=dict)
    _made: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Keys of the calls that this rank has made, the last ones."""
    _spent: list[list[str]] = field(default_factory=list)
    _decisions: dict[str, Decisions] = field(default_factory=dict)
    _topics: dict[str, int] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def position(self) -> int:
        """Of this rank among the ranks of the team."""
        return self.ranks.index(self.rank)

    def name_of(self, rank: int) -> str:
        """A member as messages call it."""
        return self.names.get(rank, f"rank {rank}")

    def lead(self, name: str, seconds: float, work: Callable[[], Any]) -> Any:
        """Let the leader do `work`, and return on all ranks what it gave, or raise what it raised."""
        call = self.call(name, seconds, [name])
        return call.answer(name, work) if self.leads else call.hear(name)

    def decide(self, topic: str, number: int, mine: int) -> int:
        """One value for each number of a topic, the same on all ranks: that of the first to ask. Waits for no other rank.

        Args:
            number: not below zero, and ascending; all ranks ask for the same ones. mine: the value, if this rank is the first.
        Raises:
            Refused: this rank is hopelessly behind the others; see `Decisions`.  BoardGone
        """
        decisions = self._decisions.setdefault(topic, Decisions(self.board, topic))
        return decisions.decide(number, int(mine))

    def numbered(self, topic: str) -> str:
        """The topic with a number: another one each time, the same on all ranks that name it equally often."""
        number = self._topics[topic] = self._topics.get(topic, 0) + 1
        return f"{topic}/{number}"

    def call(self, name: str, seconds: float, phases: Sequence[str], order: int = -1, enters: bool = True) -> Call:
        """Begin a call that all ranks of the team make.

        Args:
            name: what is done, and on what; equal on all ranks. seconds: until it must be over.
            phases: of the call, in order: see `Call.round`. order: calls with a larger one come later, if it is not negative.
            enters: False for a call that this rank only says to take no part in, maybe before its turn.
        """
        number = self._calls[name] = max(self._calls.pop(name, 0) + 1, self._number_of_others(name))
        if len(self._calls) > _REMEMBERED:
            del self._calls[next(iter(self._calls))]
        if enters or not self._spent:
            # the leader has answered two calls since; its own answers go when all have come to the next one, if they ever do
            if len(self._spent) > (_UNREAD if self.leads else 2):
                self.board.drop(self._spent.pop(0))
            self._spent.append([])
        call = Call(self, f"{name}/{number}", name, seconds, tuple(phases), order)
        if enters:
            call.enter()
        return call

    def leave(self, why: str) -> None:
        """Let the others know that this member makes no call any more, until it makes the next one.

        Raises:
            BoardGone
        """
        self.say_where(Where("", why, _FOR_EVER, True))

    def stay(self) -> None:
        """Take back what `leave`, or a process that was this member before, has said.

        Raises:
            BoardGone
        """
        self.say_where(Where("", "", -1, True))

    def take_over(self, phases: Sequence[str], why: str) -> None:
        """Fail the calls in which the process that was this member before has taken part, or had entered.

        Args:
            phases: of those calls.
        Raises:
            BoardGone
        """
        error = msgspec.msgpack.encode(Said(error=[Replaced.__name__, f"{self.name_of(self.rank)}: {why}"]))
        for rank in self.ranks:
            where = self.where(rank)
            if where is None or where.is_over:
                continue
            keys = [f"{where.key}/{phase}/{'answer' if self.leads else self.rank}" for phase in phases]
            # in a call that it had not entered, and has said nothing in, this one can take part
            if rank == self.rank or any(self.board.wait([key], 0.0) for key in keys):
                for key in keys:
                    self.board.decide(key, error)
        if self.where(self.rank) is not None:
            self.stay()

    def where(self, rank: int) -> Where | None:
        """Which call a member is in, or was in last."""
        key = f"now/{rank}"
        if not self.board.wait([key], 0.0):
            return None
        return msgspec.msgpack.decode(self.board.read([key])[0], type=Where)

    def say_where(self, where: Where) -> None:
        self.board.post(f"now/{self.rank}", msgspec.msgpack.encode(where))

    def _number_of_others(self, name: str) -> int:
        """Of the call that the leader (for the leader: the second rank) is in, if it has this name."""
        where = self.where(self.ranks[1 if self.leads else 0])
        return int(where.key.rpartition("/")[2]) if where is not None and where.name == name and not where.is_over else 0


class Call:
    """One call of a team under way."""

    def __init__(self, team: Team, key: str, name: str, seconds: float, phases: tuple[str, ...], order: int = -1) -> None:
        self.team, self.name, self.phases = team, name, phases
        self.seconds = seconds
        self.start = time.monotonic()
        self._key, self._order = key, order
        self._at = 0

    def enter(self) -> None:
        """Let the other ranks see that this one is here."""
        self.team._made.append(self._key)
        self._say_where(is_over=False)

    @property
    def left(self) -> float:
        """Seconds that this rank still waits, not below zero: until the deadline, and a little longer if it does not lead."""
        if self.team.ended.is_set():
            return 0.0
        grace = 0.0 if self.team.leads else _GRACE_SECONDS
        return max(0.0, self.start + self.seconds + grace - time.monotonic())

    def round(self, phase: str, work: Callable[[], Any], conclude: Callable[[list[Any]], Any]) -> Any:
        """Do this rank's work, hear all, and return what the leader concludes from what all ranks' work gave.

        Args:
            work: of this rank; what it returns must be plain containers. conclude: run by the leader on the list by position.
        Raises:
            The error of whichever rank failed first, on all ranks.  Deadline: naming the ranks that did not come.
        """
        mine = self.say(phase, work)
        return self.hear(phase) if not self.team.leads else self.answer(phase, lambda: conclude(self.hear_all(phase, mine)))

    def say(self, phase: str, work: Callable[[], Any]) -> Any:
        """Do this rank's work and post what it gave. An error is posted for this and all later phases, and raised."""
        self._enter(phase)
        try:
            mine = work()
        except BaseException as error:
            self.fail(error)
            raise
        self._post(self._mine(phase), Said(mine))
        return mine

    def hear_all(self, phase: str, mine: Any) -> list[Any]:
        """What all ranks said, by position: for the leader.

        Raises:
            What any rank posted instead.  Deadline: naming those that said nothing.
        """
        team = self.team
        keys = {rank: f"{self._key}/{phase}/{rank}" for rank in team.ranks if rank != team.rank}
        if not self._wait_for(phase, keys):
            absent = [rank for rank, key in keys.items() if not team.board.wait([key], 0.0)]
            failed = [rank for rank in keys if rank not in absent]
            try:
                self._raise_first(failed, [keys[r] for r in failed])
            except Deadline:  # whoever gave up waiting for this rank does not know who is missing
                if not absent:
                    raise
            if absent:
                raise Deadline(self._overdue(phase, absent))
        heard = self._raise_first(list(keys), list(keys.values()))
        while self._key in team._made and len(team._spent) > 1:  # all are in this call, and have read what was said before
            team.board.drop(team._spent.pop(0))
        return [mine if rank == team.rank else heard[rank] for rank in team.ranks]

    def answer(self, phase: str, conclude: Callable[[], Any]) -> Any:
        """Post the leader's conclusion, or the error in its place; both end the phase for all."""
        try:
            verdict = conclude()
        except BaseException as error:
            self.fail(error)
            raise
        self._post(f"{self._key}/{phase}/answer", Said(verdict))
        return verdict

    def hear(self, phase: str) -> Any:
        """The leader's answer.

        Raises:
            The error that the leader answered.  Deadline: it did not answer in time.
        """
        if not self._wait_for(phase, {self.team.ranks[0]: f"{self._key}/{phase}/answer"}):
            raise self.failed(Deadline(self._overdue(phase, [self.team.ranks[0]])))
        said = msgspec.msgpack.decode(self.team.board.read([f"{self._key}/{phase}/answer"])[0], type=Said)
        if said.error is not None:
            raise error_of(said.error)
        return said.data

    def tell(self, phase: str, group: str, data: Any) -> None:
        """Post what only some ranks are to hear, who know their group's name: by the leader, before it answers the phase."""
        self._post(f"{self._key}/{phase}/of/{group}", Said(data))

    def told(self, phase: str, group: str) -> Any:
        """What the leader told a group in a phase that it has answered."""
        return msgspec.msgpack.decode(self.team.board.read([f"{self._key}/{phase}/of/{group}"])[0], type=Said).data

    def among(self, ranks: tuple[int, ...], what: str, phases: Sequence[str]) -> Call:
        """A call within this one, of some of its ranks, this one among them; it has the same deadline."""
        team = replace(self.team, ranks=ranks, _calls={}, _decisions={}, _topics={})
        inner = Call(team, f"{self._key}/{what}/{ranks[0]}", self.name, self.seconds, tuple(phases))
        inner.start = self.start
        return inner

    def excuse(self, error: BaseException) -> None:
        """Say why this rank breaks off what it does for others in this call; they ask with `excuse_of`. Never raises."""
        with contextlib.suppress(Exception):  # the board is gone: they name this rank instead
            self._post(self._excuse(self.team.rank), Said(error=[type(error).__name__, str(error)]))

    def excuse_of(self, rank: int) -> HoldfastError | None:
        """Why a rank has broken off; None if it does not say it within a grace, as one that was killed does not."""
        with contextlib.suppress(Exception):
            if self.team.board.wait([self._excuse(rank)], min(_GRACE_SECONDS, self.left)):
                said = msgspec.msgpack.decode(self.team.board.read([self._excuse(rank)])[0], type=Said)
                return None if said.error is None else error_of(said.error)
        return None

    def is_answered(self, phase: str, seconds: float) -> bool:
        """Whether the leader answers within so many seconds.

        Raises:
            Unavailable: the board is gone.
        """
        return self.team.board.wait([f"{self._key}/{phase}/answer"], seconds)

    def failed(self, error: HoldfastError) -> HoldfastError:
        """Tell the others of an error, and return it to be raised."""
        self.fail(error)
        return error

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed: in every phase from here on, so that nobody waits for it. Never raises."""
        text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        name = self.team.name_of(self.team.rank)
        if not text.startswith(name.partition(" ")[0] + " "):
            text = f"{name}: {text}"
        said = Said(error=[type(error).__name__, text])
        try:
            if self._key in self.team._made:
                self._say_where(is_over=True)
            for phase in self.phases[self._at :]:
                self._post(f"{self._key}/{phase}/answer" if self.team.leads else self._mine(phase), said)
        except Exception:  # the board is gone: whoever waits has a deadline
            return

    def _wait_for(self, phase: str, keys: dict[int, str]) -> bool:
        """Whether these keys of other ranks are there before the deadline.

        Raises:
            Deadline: a rank is in another call, which waits for this rank: neither would end.
        """
        while not self.team.board.wait(list(keys.values()), min(_LOOK_SECONDS, self.left)):
            if self.left <= 0:
                return False
            absent = [rank for rank, key in keys.items() if not self.team.board.wait([key], 0.0)]
            for rank in absent[:_LOOKED_AT]:
                where = self.team.where(rank)
                if where is None or where.key in self.team._made or 0 <= where.order < self._order:
                    continue
                if where.is_over and not self._is_before(where):
                    continue
                if self.team.board.wait([keys[rank]], 0.0):  # it has said it meanwhile, and gone on
                    continue
                raise self.failed(self._elsewhere(phase, rank, where))
        return True

    def is_left_by(self, rank: int, phase: str) -> bool:
        """Whether a rank has gone on to later calls, and has not answered this phase; for calls that are in an order."""
        where = self.team.where(rank)
        return where is not None and self._is_before(where) and not self.is_answered(phase, 0.0)

    def _is_before(self, where: Where) -> bool:
        """Whether who is there will not come to this call any more, even if it has failed there."""
        return 0 <= self._order < where.order

    def _elsewhere(self, phase: str, rank: int, where: Where) -> HoldfastError:
        """Why a rank that is in another call is not waited for."""
        after = f"{self.name}: not waiting on in {phase!r} after {time.monotonic() - self.start:.1f} s"
        name = self.team.name_of(rank)
        if where.order == _FOR_EVER:
            return Unavailable(f"{after}: {name} takes no part any more: {where.name}")
        return Deadline(
            f"{after}: {name} is in {where.name!r} and has not made this call; all ranks of a team make the same calls in the "
            "same order"
        )

    def _say_where(self, is_over: bool) -> None:
        self.team.say_where(Where(self._key, self.name, self._order, is_over))

    def _enter(self, phase: str) -> None:
        self._at = self.phases.index(phase)

    def _excuse(self, rank: int) -> str:
        return f"{self._key}/excuse/{rank}"

    def _mine(self, phase: str) -> str:
        return f"{self._key}/{phase}/{self.team.rank}"

    def _post(self, key: str, said: Said) -> None:
        self.team._spent[-1].append(key)
        self.team.board.post(key, msgspec.msgpack.encode(said))

    def _raise_first(self, ranks: list[int], keys: list[str]) -> dict[int, Any]:
        """What these ranks said; raises the first error among it."""
        said = [msgspec.msgpack.decode(data, type=Said) for data in self.team.board.read(keys)] if keys else []
        for message in said:
            if message.error is not None:
                raise error_of(message.error)
        return {rank: message.data for rank, message in zip(ranks, said, strict=True)}

    def _overdue(self, phase: str, absent: list[int]) -> str:
        """Who is missing, where they were seen last, and for how long."""
        before = self.phases[: self.phases.index(phase) + (absent == [self.team.ranks[0]])]  # the leader has a part in it, too
        seen = []
        for rank in absent[:8]:
            done = [p for p in before if self.team.board.wait([f"{self._key}/{p}/{rank}"], 0.0)]
            where = None if done else self.team.where(rank)
            elsewhere = f"; it was last in {where.name!r}" if where is not None else ""
            last = f"last seen after {done[-1]!r}" if done else f"it never began{elsewhere}"
            seen.append(f"{self.team.name_of(rank)} ({last})")
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        return f"{self.name}: waited {time.monotonic() - self.start:.1f} s in {phase!r} for {', '.join(seen)}{more}"


def error_of(said: list[str]) -> HoldfastError:
    """The error that another rank posted, as one of our own."""
    kind = getattr(errors, said[0], None)
    is_ours = isinstance(kind, type) and issubclass(kind, HoldfastError)
    return kind(said[1]) if is_ours and kind is not None else HoldfastError(said[1])
