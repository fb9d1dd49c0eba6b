"""What a user says about preemption, and what the launcher says in the environment."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..policy.durations import seconds_of

_EARLIEST_UNIX = 1e9
"""A deadline from here on is a time, September 2001 or later; below, it is seconds from the start of the job: up to 31 years."""
_LOADED_AT = time.time()


@dataclass(frozen=True)
class Preemption:
    """What tells a job that it must stop: for `Checkpointer(preemption=)`, asked by `Checkpointer.should_stop()`.

    Attributes:
        signals: names or numbers. They are caught from the first call of `should_stop()` on: a program that never asks is ended
            by them as ever. Handlers that were there before are still called, and are there again afterwards.
        file: a path; the job stops once it exists, on any rank.
        deadline: when the job is killed: unix seconds, or from the start of the job, in seconds or as "2h". HOLDFAST_DEADLINE in
            the environment may say the same, and SLURM_JOB_END_TIME too; the earliest counts.
        window: from a signal to the kill, in seconds or as "30s"; also how long before the deadline to stop, at least.
    Raises:
        ValueError: naming the parameter.
    """

    signals: Sequence[str | int] = ("SIGTERM", "SIGUSR1")
    file: str | os.PathLike[str] | None = None
    deadline: float | str | None = None
    window: float | str = "30s"

    def __post_init__(self) -> None:
        seconds_of(self.window, "window")
        _ = self.numbers
        if self.deadline is not None:
            _time_of(self.deadline, "deadline", 0.0)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The signals' numbers."""
        return tuple(dict.fromkeys(_number_of(one) for one in self.signals))

    def killed_at(self, environment: Mapping[str, str]) -> float | None:
        """When the job is killed, as far as it is known beforehand: unix seconds."""
        said: dict[str, float | str | None] = {
            "deadline": self.deadline,
            "HOLDFAST_DEADLINE": environment.get("HOLDFAST_DEADLINE"),
            "SLURM_JOB_END_TIME": environment.get("SLURM_JOB_END_TIME"),
        }
        start = _started_at(environment)
        return min((_time_of(value, name, start) for name, value in said.items() if value not in (None, "")), default=None)


def _number_of(one: str | int) -> int:
    try:
        number = signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
    except (KeyError, ValueError):
        raise ValueError(f'signals: {one!r} is not a signal; give a name such as "SIGTERM"') from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"signals: {number.name} cannot be caught")
    return int(number)


def _time_of(value: float | str | None, name: str, start: float) -> float:
    """Unix seconds.

    Raises:
        ValueError
    """
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = seconds_of(value, name) if isinstance(value, str) else math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f'{name}={value!r}: give unix seconds, or seconds from the start of the job, or a text such as "2h"')
    return seconds if seconds >= _EARLIEST_UNIX else start + seconds


def _started_at(environment: Mapping[str, str]) -> float:
    """When the job began, in unix seconds: by SLURM's word, or else when this process did."""
    try:
        return float(environment["SLURM_JOB_START_TIME"])
    except (KeyError, ValueError):
        return _process_started_at()


@functools.cache
def _process_started_at() -> float:
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, AttributeError):  # no /proc
        return _LOADED_AT
