"""A clock that moves only when told, in place of the module `time`."""

from __future__ import annotations


class FakeClock:
    """Has the functions of `time` that holdfast calls; `sleep` moves it on at once.

    Args:
        now: seconds since 1970 at which it starts.
    """

    def __init__(self, now: float = 1_000_000_000.0) -> None:
        self.now = now
        self.slept: list[float] = []
        """The seconds of each `sleep`, in order."""

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
