"""How a rank is broken from inside: its store stops, fails or kills it at a chosen call; its board is gone from some call on.

All of this happens in the process of the rank that is broken; the others run what is shipped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import pytest

from holdfast import NoSpace, Unavailable, ranks
from holdfast.store import posix
from holdfast.store.base import Store
from holdfast.store.wrap import Wrapped

T = TypeVar("T")
CHANGES = ("open_fd", "pwrite", "fsync", "truncate", "allocate", "link", "rename", "unlink", "mkdir", "rmdir")
"""The system calls of the local store that may matter to a kill; closing a file changes nothing."""
BOARD_CALLS = ("post", "wait", "read")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def unavailable() -> None:
    raise Unavailable("injected: the storage does not answer")


def no_space() -> None:
    raise NoSpace("injected: the disk is full")


@dataclass
class Fault:
    """What happens at some calls of a store.

    Args:
        do: what happens. operation, path: patterns of calls that count. nth: the first of them that is hit, from 0.
        times: how many are hit; None: all from there on. after: the call takes effect before it happens.
    """

    do: Callable[[], None]
    operation: str = "*"
    path: str = "*"
    nth: int = 0
    times: int | None = 1
    after: bool = False
    seen: int = field(default=0, init=False)

    def is_hit(self, operation: str, path: str) -> bool:
        if not (fnmatchcase(operation, self.operation) and fnmatchcase(path, self.path)):
            return False
        self.seen += 1
        past = self.seen - 1 - self.nth
        return past >= 0 and (self.times is None or past < self.times)


class Broken(Wrapped):
    """A store of which some calls go wrong. `calls` has all that were made; `faults` may change while it is in use."""

    def __init__(self, inner: Store, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.calls: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        with self._lock:
            self.calls.append((operation, path))
            hit = [fault for fault in self.faults if fault.is_hit(operation, path)]
        for fault in hit:
            if not fault.after:
                fault.do()
        result = run()
        for fault in hit:
            if fault.after:
                fault.do()
        return result


@contextlib.contextmanager
def before_each(owner: Any, names: tuple[str, ...], act: Callable[[int], None]) -> Iterator[list[str]]:
    """While the block runs, `act(i)` comes before the i-th call of these functions of `owner`. Gives the names as called."""
    called: list[str] = []
    lock = threading.Lock()

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            with lock:
                called.append(name)
                number = len(called) - 1
            act(number)
            return function(*args, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(owner, name, around(name, getattr(owner, name)))
        yield called


def dying_at(number: int) -> contextlib.AbstractContextManager[list[str]]:
    """This process is killed before the system call of this number that would change the disk."""
    return before_each(posix, CHANGES, lambda i: die() if i == number else None)


def board_gone_from(number: int) -> contextlib.AbstractContextManager[list[str]]:
    """The board does not answer this rank from its call of this number on."""

    def act(i: int) -> None:
        if i >= number:
            raise ranks._gone(RuntimeError("injected: connection reset"))

    return before_each(ranks.TorchBoard, BOARD_CALLS, act)
