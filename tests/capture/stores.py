"""Stores that are slow, stuck or full, for writers in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.store.wrap import Wrapped

T = TypeVar("T")


class Gated(Wrapped):
    """Writes of data wait while the gate is shut."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation == "write_at" and not self.gate.is_set():
            self.waiting.set()
            self.gate.wait(60)
        return run()


class Slow(Wrapped):
    """Each write of data takes a while longer."""

    def __init__(self, inner: Any, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation == "write_at":
            time.sleep(self._seconds)
        return run()
