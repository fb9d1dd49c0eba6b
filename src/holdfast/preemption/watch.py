"""Whether this process is asked to stop, and how long it still has: signals, a file, a deadline. Knows of no other rank."""

from __future__ import annotations

import math
import os
import signal
import time

from ..policy.durations import seconds_of
from .settings import Preemption
from .signals import listen, unlisten

_FILE_SECONDS = 0.5
"""Between two looks at the file."""


class Watch:
    """Catches the signals of `preemption` until `close`. Once it wants a stop, it stays with it."""

    def __init__(self, preemption: Preemption) -> None:
        now = time.monotonic()
        self._window = seconds_of(preemption.window, "window")
        killed_at = preemption.killed_at(os.environ)
        self._killed_at = math.inf if killed_at is None else now + killed_at - time.time()
        self._stops_at = self._killed_at - self._window
        self._file = None if preemption.file is None else os.fspath(preemption.file)
        self._looks_at = 0.0 if self._file is not None else math.inf
        self._reason = ""
        self._signal = 0
        self._noted_at = 0.0
        self._listener = self._note  # one object: a bound method is a new one at each look
        self._taps = [tap for number in preemption.numbers if (tap := listen(number, self._listener)) is not None]

    def wanted(self) -> str:
        """Why to stop; empty as long as nobody wants it. Cheap enough for the innermost loop."""
        if self._reason:
            return self._reason
        if self._signal:
            self._reason = signal.Signals(self._signal).name
            return self._reason
        now = time.monotonic()
        if now >= self._stops_at:
            self._reason = f"the deadline in {self._killed_at - now:.0f} s"
        elif now >= self._looks_at:
            self._looks_at = now + _FILE_SECONDS
            if self._file is not None and os.path.exists(self._file):
                self._reason = f"the file {self._file}"
        return self._reason

    def seconds_left(self) -> float | None:
        """Until this process is killed, not below zero; None if nothing says so."""
        ends_at = self._killed_at
        if self._signal:
            ends_at = min(ends_at, self._noted_at + self._window)
        return None if ends_at == math.inf else max(0.0, ends_at - time.monotonic())

    def need(self, seconds: float) -> None:
        """Stop so long before the deadline, if that is longer than the window: what the last save takes."""
        self._stops_at = self._killed_at - max(self._window, seconds)

    def close(self) -> None:
        """Put the handlers back that were there before."""
        while self._taps:
            unlisten(self._taps.pop(), self._listener)

    def _note(self, number: int) -> None:
        if not self._signal:
            self._noted_at = time.monotonic()
            self._signal = number
