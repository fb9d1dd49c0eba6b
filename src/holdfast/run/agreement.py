"""What all ranks of a team know alike although none of them waits for another: registers on the board.

A register is one key whose value is changed by compare and set, and only ever grows. Who changes it says what it took for the
present value, so that of two changes at a time one is first, and the other is made anew upon it. What a value has settled, every
later value says, too: so an answer may come from the value last seen, without a round trip.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

import msgspec

from ..errors import BoardGone, Refused

_RUNS = 64
"""Of equal values, that a series remembers."""


class Swaps(Protocol):
    """What a register needs of a board."""

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes: ...


class Register:
    """One key of a board. Its values must differ from all that came before, and from b""; each rank has a Register of its own."""

    def __init__(self, board: Swaps, key: str) -> None:
        self._board, self._key = board, key
        self._seen = b""
        self._lock = threading.Lock()

    def change(self, change: Callable[[bytes], bytes | None]) -> bytes:
        """Make the value what `change` makes of it; return the value that stands.

        Args:
            change: called with a value, b"" where there is none: first the one last seen, then newer ones, until a change is
                the first upon its value. None: the value already settles what is asked.
        Raises:
            BoardGone
        """
        with self._lock:
            while (wanted := change(self._seen)) is not None:
                expected, self._seen = self._seen, self._board.swap(self._key, self._seen, wanted)
                if self._seen == wanted:
                    break
                if self._seen == expected:  # stores answer so for a key that is gone; to ask again would never end
                    raise BoardGone(f"the key-value store by which ranks talk has lost {self._key}; end the job and resume")
            return self._seen


class Series(msgspec.Struct, array_like=True):
    """What is decided of a series of numbered calls."""

    last: int = -1
    """The last call that is decided; so are all before it."""
    runs: list[tuple[int, int]] = []
    """(first call, value) of each run of equal values, ascending; the last ones."""

    def value_of(self, number: int) -> int | None:
        """Of a call that is decided; None where its run is forgotten."""
        at = bisect_right(self.runs, number, key=lambda run: run[0])
        return self.runs[at - 1][1] if at else None

    def then(self, number: int, value: int) -> Series:
        """With one call more."""
        is_new = not self.runs or self.runs[-1][1] != value
        return Series(number, [*self.runs, (number, value)][-_RUNS:] if is_new else self.runs)


class Decisions:
    """One value for each call of a series, the same on all ranks: the first rank to reach a call decides it.

    A call takes one round trip on ranks that are abreast: then only the decision of this very call can be missing in the value
    last seen, whoever has made it meanwhile. A rank behind the others often needs none. One key, however long the series.
    """

    def __init__(self, board: Swaps, topic: str) -> None:
        self._register, self._topic = Register(board, f"decided/{topic}"), topic

    def decide(self, number: int, mine: int) -> int:
        """The value of call `number`, not below zero and larger than those before: what the first rank to get there gave.

        Raises:
            Refused: this rank is so far behind that the others have forgotten.  BoardGone
        """

        def change(now: bytes) -> bytes | None:
            series = _series(now)
            return None if number <= series.last else msgspec.msgpack.encode(series.then(number, mine))

        series = _series(self._register.change(change))
        value = series.value_of(number)
        if value is None:
            raise Refused(
                f"{self._topic} {number}: the other ranks are at {series.last}, and {_RUNS} changes of the answer or more lie "
                "between; all ranks of a team make the same calls in the same order"
            )
        return value


class Stop(msgspec.Struct, array_like=True):
    """From which call on all ranks stop, why, and until when they must be done."""

    call: int
    reason: str
    ends_at: float | None = None
    """When the job is killed, as far as the rank knows that wanted the stop: unix seconds."""


class Horizon(msgspec.Struct, array_like=True):
    """What is decided about stopping."""

    clear: int = 0
    """Up to this call nobody stops. Calls count from 1."""
    stop: Stop | None = None
    """Its call is the one after `clear`; then nothing changes any more."""


class StopRegister:
    """From which of their calls on the ranks of a team stop; all of them at the same one.

    Why all get the same answer at the same call. The register says "clear up to call c", and c only grows, or "stop from c + 1
    on", which is final. A rank answers call n with no only when it has seen c >= n, and with yes only when it has seen a stop
    at n or before. Both cannot be: a stop lies beyond every c that the register ever had, and after a stop c does not grow.
    And each call is answered: a rank that finds neither sets one of both itself.

    A rank that wants to stop when others have passed its call already answers no, and sets the stop to the first call that
    nobody has passed. It needs no luck for that: only one rank can be first at that call, and everybody reads its change.
    """

    def __init__(self, board: Swaps, topic: str) -> None:
        self._register = Register(board, f"stop/{topic}")

    def ask(self, number: int, wish: Stop | None, ahead: int = 0) -> Stop | None:
        """The stop, if call `number` is one of those that stop; else None.

        One round trip at most where the ranks are abreast and nobody wishes to stop; none where the call is known to be clear.

        Args:
            number: of this call: 1, 2, 3, as all ranks count them. wish: why this rank wants to stop; its `call` is not read.
            ahead: if nobody has reached this call: how many more to clear along with it. So many calls a stop may come later.
        Raises:
            BoardGone
        """

        def change(now: bytes) -> bytes | None:
            horizon = _horizon(now)
            if horizon.stop is not None or (wish is None and number <= horizon.clear):
                return None
            if wish is None:
                return msgspec.msgpack.encode(Horizon(number + ahead))
            clear = max(horizon.clear, number - 1)
            return msgspec.msgpack.encode(Horizon(clear, Stop(clear + 1, wish.reason, wish.ends_at)))

        stop = _horizon(self._register.change(change)).stop
        return stop if stop is not None and number >= stop.call else None


def _series(data: bytes) -> Series:
    return msgspec.msgpack.decode(data, type=Series) if data else Series()


def _horizon(data: bytes) -> Horizon:
    return msgspec.msgpack.decode(data, type=Horizon) if data else Horizon()
