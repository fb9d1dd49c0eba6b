"""Ends the pools of ranks with the session; no test leaves a signal handler behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from ranks.fixture import no_ranks_left  # noqa: F401

from holdfast.preemption import signals

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


@pytest.fixture(autouse=True)
def handlers_are_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test begins with default handlers and without a word of a launcher, and ends as it began."""
    for name in ("HOLDFAST_DEADLINE", "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(signals, "_has_warned", False)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    after = {number: signal.getsignal(number) for number in NUMBERS}
    left = list(signals._taps)
    signals._taps.clear()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == []
    assert set(after.values()) == {signal.SIG_DFL}, "a handler was left behind"
