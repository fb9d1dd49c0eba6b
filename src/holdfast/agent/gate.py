"""How far one rank's capture of one step has come, for those that write it: they follow close behind."""

from __future__ import annotations

import threading

import numpy as np

from ..errors import HoldfastError
from ..run.team import error_of
from .arena import Bytes

ALL = 1 << 62
"""Behind everything, the capture's own checks included."""


class Gate:
    """Opens as the bytes come; closes for ever with an error if they never will."""

    def __init__(self) -> None:
        self.at = 0
        self._error: list[str] | None = None
        self._changed = threading.Condition()

    def come(self, at: int) -> None:
        """What is ready at `at` or before is there."""
        with self._changed:
            self.at = max(self.at, at)
            self._changed.notify_all()

    def fail(self, said: list[str]) -> None:
        """Nothing more will come; `said` is [name of the error's class, text]."""
        with self._changed:
            self._error = self._error or said
            self._changed.notify_all()

    def wait(self, at: int) -> None:
        """Raises:
        What the capture failed with.
        """
        if self.at >= at and self._error is None:
            return
        with self._changed:
            while self._error is None and self.at < at:
                self._changed.wait()
            if self._error is not None:
                raise error_of(self._error)


class ArenaSource:
    """The bytes of one row in a slot, when they have come."""

    def __init__(self, slot: Bytes, at: int, nbytes: int, gate: Gate, ready: int) -> None:
        self._bytes = slot[at : at + nbytes]
        self._gate, self._ready = gate, ready
        self.nbytes = nbytes

    def view(self, start: int, nbytes: int) -> Bytes:
        """The bytes themselves."""
        self._gate.wait(self._ready)
        return self._bytes[start : start + nbytes]

    def copy_into(self, start: int, out: Bytes) -> None:
        self._gate.wait(self._ready)
        np.copyto(out, self._bytes[start : start + len(out)])


def said_of(error: BaseException, rank: int | None = None) -> list[str]:
    """An error as messages carry it."""
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    if rank is not None and not text.startswith("rank "):
        text = f"rank {rank}: {text}"
    return [type(error).__name__, text]
