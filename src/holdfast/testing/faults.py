"""Stores that do what real ones do only sometimes: fail at a chosen call, or stop before each call until a test lets them go.

`Faulty` is for what one process must survive; `Stepping`, with an `Actor` for each process, is for what several may do to
each other. Both go around any store and have its interface. Closing a reader and aborting a writer are never touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ..errors import Unavailable
from ..store.base import Store
from ..store.wrap import Wrapped

T = TypeVar("T")
WAIT_SECONDS = 60.0
"""How long a test waits for an actor before it says that the actor hangs."""


@dataclass
class Fault:
    """Which calls fail, and how."""

    operation: str = "*"
    """A pattern of names: those of `Store`, and `read_into`, `write_at`, `finish` of readers and writers."""
    path: str = "*"
    """A pattern of paths; `*` also matches `/`."""
    nth: int = 1
    """The first call that fails, counted from 1 among those that match."""
    times: int | None = 1
    """How many calls fail from there on; None: all."""
    every: int = 1
    """Of those, each so many-th."""
    error: Callable[[str], BaseException] = Unavailable
    """Called with a sentence; gives what is raised."""
    is_answer_lost: bool = False
    """The call takes effect and fails all the same, as when a connection breaks before the answer."""
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def is_hit(self, operation: str, path: str) -> bool:
        """Count a call, and say whether it fails."""
        if not (fnmatchcase(operation, self.operation) and fnmatchcase(path, self.path)):
            return False
        self.seen += 1
        past = self.seen - self.nth
        if past < 0 or past % self.every or (self.times is not None and self.fired >= self.times):
            return False
        self.fired += 1
        return True


class Faulty(Wrapped):
    """Fails the calls that its faults choose; the first fault that matches counts.

    Args:
        faults: may be added to while the store is in use.
    """

    def __init__(self, inner: Store, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.fired: list[tuple[str, str]] = []
        """(operation, path) of each call that failed."""
        self._lock = threading.Lock()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        with self._lock:
            hit = next((fault for fault in self.faults if fault.is_hit(operation, path)), None)
            if hit is not None:
                self.fired.append((operation, path))
        if hit is None:
            return run()
        if not hit.is_answer_lost:
            raise hit.error(f"injected: {operation} of {path} was not done")
        run()
        raise hit.error(f"injected: {operation} of {path} was done and its answer lost")


class Stepping(Wrapped):
    """Calls `before(operation, path)` before each operation, one operation at a time whatever the threads."""

    def __init__(self, inner: Store, before: Callable[[str, str], None]) -> None:
        super().__init__(inner)
        self._before = before
        self._turn = threading.RLock()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        with self._turn:
            self._before(operation, path)
            return run()


class Stopped(BaseException):
    """Raised inside an actor whose test is over."""


class Actor:
    """One process of a test, as a thread: what it asks of its store happens only as far as the test lets it.

    While an actor stands still, another may run; a test that only ever lets one run at a time decides the whole order.

    Args:
        store: what it works on. do: what it does, given its own store object around `store`.
    """

    def __init__(self, store: Store, do: Callable[[Store], Any]) -> None:
        self.operations: list[tuple[str, str]] = []
        """(operation, path) of all that it has begun."""
        self.result: Any = None
        """What `do` returned."""
        self.error: BaseException | None = None
        """What `do` raised."""
        self.store = Stepping(store, self.pause)
        self.is_done = False
        self._allowed: float = 0
        self._is_waiting = False
        self._is_stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(do,), daemon=True)
        self._is_started = False

    def __repr__(self) -> str:
        at = "at its end" if self.is_done else f"before operation {len(self.operations)}"
        return f"<Actor {at}: {self.error!r}>" if self.error else f"<Actor {at}>"

    def advance(self, to: float = float("inf")) -> int:
        """Let it run until it has done `to` operations in all, or ends; returns how many it has done.

        Raises:
            AssertionError: it hangs.
        """
        with self._changed:
            self._allowed = max(self._allowed, to)
            self._is_waiting = False
            if not self._is_started:
                self._is_started = True
                self._thread.start()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self.is_done or self._is_waiting, WAIT_SECONDS):
                raise AssertionError(f"an actor hangs after {self.operations[-3:]}")
            return len(self.operations)

    def finish(self) -> Any:
        """Let it run to its end; returns its result.

        Raises:
            What it raised.
        """
        self.advance()
        if self.error is not None:
            raise self.error
        return self.result

    def stop(self) -> None:
        """Let nothing more of it reach the store, and wait for its end."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        if self._is_started:
            self._thread.join(WAIT_SECONDS)

    def pause(self, operation: str, path: str) -> None:
        """What the actor calls before each operation; also for tests that put it before other calls than a store's."""
        with self._changed:
            while len(self.operations) >= self._allowed and not self._is_stopped:
                self._is_waiting = True
                self._changed.notify_all()
                self._changed.wait()
            if self._is_stopped:
                raise Stopped
            self.operations.append((operation, path))

    def _run(self, do: Callable[[Store], Any]) -> None:
        try:
            self.result = do(self.store)
        except Stopped:
            pass
        except BaseException as error:  # whatever it is belongs to the test
            self.error = error
        finally:
            with self._changed:
                self.is_done = True
                self._changed.notify_all()
