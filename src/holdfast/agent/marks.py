"""When the parts of a save began and ended, as its calls of the store show it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..store.base import Store
from ..store.wrap import Wrapped

T = TypeVar("T")
_WRITES, _SYNCS = ("write_at",), ("finish",)


class Marks(Wrapped):
    """A store that notes, from `restart` on, when bytes were written and when files were made durable."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self.first_write = self.sync_began = self.synced = 0.0
            self.nbytes = 0

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation in _WRITES:
            with self._lock:
                self.first_write = self.first_write or time.time()
                self.nbytes += nbytes
        elif operation in _SYNCS:
            self.sync_began = self.sync_began or time.time()
            try:
                return run()
            finally:
                self.synced = time.time()
        return run()

    def spans(self, began: float, ended: float) -> list[tuple[str, float, float]]:
        """(name, start, seconds) of what the time from `began` to `ended` was spent on, one after the other without a gap.

        `behind`: waiting for the first bytes of the captures.
        """
        ends = [("behind", self.first_write), ("write", self.sync_began), ("fsync", self.synced), ("commit", ended)]
        found, at = [], began
        for name, end in ends:
            if end > at:
                found.append((name, at, end - at))
                at = end
        return found
