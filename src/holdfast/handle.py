"""A save, and how far it has come."""

from __future__ import annotations

import threading

from .errors import Deadline, HoldfastError

BEGUN, CAPTURED, REPLICATED, DURABLE, REMOTE = LEVELS = ("begun", "captured", "replicated", "durable", "remote")
HERE = (CAPTURED, DURABLE)
"""Levels that this version has."""


class Handle:
    """A save under way, or done.

    Attributes:
        step, attempt: of the checkpoint. level: begun, captured (survives this process's death, if an agent saves), or durable.
        error: why it failed, or None.
    """

    def __init__(self, step: int, attempt: int, level: str = DURABLE) -> None:
        self.step, self.attempt = step, attempt
        self.level = level
        self.error: HoldfastError | None = None
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"Handle(step={self.step}, attempt={self.attempt}, level={self.level!r}, error={self.error!r})"

    def wait(self, level: str = DURABLE, timeout: float | None = None) -> Handle:
        """Return when `level` is reached.

        Args:
            timeout: seconds; None waits for as long as it takes.
        Raises:
            HoldfastError: the save failed; or the level is one that this version does not have.  Deadline: not in time.
        """
        if level not in HERE:
            raise HoldfastError(f"level {level} is not available: this version has {' and '.join(HERE)}")
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._has(level), timeout)
            if self._has(level):
                return self
            if self.error is not None:
                raise self.error
        raise Deadline(f"step {self.step} was not {level} within {timeout:g} s; it is {self.level}")

    @property
    def is_over(self) -> bool:
        """Whether it is durable or has failed."""
        return self.error is not None or self._has(DURABLE)

    def reach(self, level: str) -> None:
        """Say that it has come so far."""
        with self._changed:
            if not self._has(level):
                self.level = level
            self._changed.notify_all()

    def fail(self, error: HoldfastError) -> None:
        """Say that it has failed; what has ended stays as it ended."""
        with self._changed:
            if not self.is_over:
                self.error = error
            self._changed.notify_all()

    def _has(self, level: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(level)
