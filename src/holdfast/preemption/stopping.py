"""Stopping as all ranks agree on it: whether to, at which call, and whether a save may still begin."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable

from ..policy.forecast import LAST, Forecast, Past, forecast, may_begin
from ..run.agreement import Stop, StopRegister
from ..run.team import Team
from .settings import Preemption
from .watch import Watch

log = logging.getLogger("holdfast")

_AHEAD_SECONDS = 0.1
_MOST_AHEAD = 16
"""A stop comes up to so many calls later, where calls are fast; few enough if they become slow all at once."""
_GAPS = 8


class Stopping:
    """One job's stop. Every rank has one, made for the same Checkpointer.

    Args:
        preemption: None: nothing tells this job to stop; equal on all ranks. team: None for a process alone. name: of the run.
    Raises:
        ValueError: a deadline that the environment gives makes no sense.
    """

    def __init__(self, preemption: Preemption | None, team: Team | None, name: str) -> None:
        self._preemption, self._team, self._name = preemption, team, name
        if preemption is not None:
            preemption.killed_at(os.environ)  # if that makes no sense, it is told now and not in the middle of training
        self._watch: Watch | None = None
        self._register: StopRegister | None = None
        self._topic = ""
        self._calls = 0
        self._called_at = 0.0
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        """Seconds between the last calls."""
        self._past: deque[Past] = deque(maxlen=LAST)
        self._stop: Stop | None = None

    @property
    def reason(self) -> str:
        """Why the job stops, once `should_stop` was true; equal on all ranks."""
        return "" if self._stop is None else self._stop.reason

    def should_stop(self) -> bool:
        """Whether to stop: the same answer on all ranks at the same call, and yes for ever once it was yes.

        With one process it is a look at a flag. With several it is one round trip to the store of torch.distributed, and less
        where calls are fast: the rank that is first at a call clears the calls of the next tenth of a second along with it, by
        the longest of the last gaps between calls, but never more than 16. See `StopRegister` why the answers are the same.

        Raises:
            BoardGone: the store by which ranks talk does not answer.
        """
        if self._preemption is None or self._stop is not None:
            return self._stop is not None
        if self._watch is None:
            self._watch = Watch(self._preemption)
            self._be_in_time()
        watch = self._watch
        reason = watch.wanted()
        if self._team is None:
            stop = Stop(0, reason, _unix(watch.seconds_left())) if reason else None
        else:
            stop = self._ask(self._team, reason, watch)
        if stop is not None:
            self._stop = stop
            left = self.seconds_left()
            log.warning("stopping: %s%s", stop.reason, "" if left is None else f"; {left:.1f} s are left")
        return stop is not None

    def seconds_left(self) -> float | None:
        """Until the job is killed, by what this rank knows and by what the rank knew that wanted the stop; not below zero.

        The latter is a time of day: the clocks of nodes must agree within a second or so, as those of a cluster do.
        """
        mine = self._watch.seconds_left() if self._watch is not None else None
        theirs = self._stop.ends_at - time.time() if self._stop is not None and self._stop.ends_at is not None else None
        known = [max(0.0, left) for left in (mine, theirs) if left is not None]
        return min(known, default=None)

    def within(self, seconds: float) -> float:
        """A deadline of so many seconds, or what is left of the job if that is less."""
        left = self.seconds_left() if self._stop is not None else None
        return min(seconds, left) if left else seconds

    def note_save(self, seconds: float, nbytes: int = 0) -> None:
        """A save of so many bytes, 0 if they were not counted, took so long until it was durable: the next one is thought to take
        as long, and the stop comes early enough."""
        self._past.append(Past(seconds, nbytes))
        self._be_in_time()

    def forecast(self, nbytes: int = 0) -> Forecast | None:
        """What the next save will take, by what this rank has seen."""
        return forecast(tuple(self._past), nbytes)

    def refusal(self, step: int, last_good: int | None, nbytes: Callable[[], int]) -> str:
        """Why the save of `step` must not begin any more; empty if it may. The same on all ranks: the first to ask decides.

        Args:
            last_good: the last durable step. nbytes: tells how large the state is now; asked only if the job stops.
        Raises:
            BoardGone
        """
        if self._stop is None:
            return ""
        _, reason = may_begin(self.forecast(nbytes()), self.seconds_left(), last_good)
        if self._team is None:
            return reason
        return self._team.board.decide(f"stop/{self._topic}/save/{step}", f"={reason}".encode()).decode()[1:]

    def close(self) -> None:
        """Put the signals' handlers back."""
        if self._watch is not None:
            self._watch.close()

    def _ask(self, team: Team, reason: str, watch: Watch) -> Stop | None:
        if self._register is None:
            self._topic = team.numbered(self._name)
            self._register = StopRegister(team.board, self._topic)
        wish = Stop(0, f"{reason} on rank {team.rank}", _unix(watch.seconds_left())) if reason else None
        self._calls += 1
        return self._register.ask(self._calls, wish, self._ahead())

    def _be_in_time(self) -> None:
        """Let the watch stop early enough before the deadline for one more save."""
        expected = self.forecast()
        if self._watch is not None and expected is not None:
            self._watch.need(expected.worst)

    def _ahead(self) -> int:
        """How many calls to clear along with this one, if this rank is the first at it."""
        now = time.monotonic()
        if self._called_at:
            self._gaps.append(now - self._called_at)
        self._called_at = now
        if len(self._gaps) < _GAPS:
            return 0
        return min(_MOST_AHEAD, int(_AHEAD_SECONDS / max(*self._gaps, 1e-9)))


def _unix(seconds: float | None) -> float | None:
    """The time of day in so many seconds."""
    return None if seconds is None else time.time() + seconds
