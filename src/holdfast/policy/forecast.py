"""How long a save will take, and whether it may still begin: pure functions of past saves and of the time that is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST = 5
"""Past saves that count."""
MARGIN = 1.5
"""By how much a save may take longer than any of them."""


@dataclass(frozen=True)
class Past:
    """A save that was made."""

    seconds: float
    """From its begin until it was durable."""
    nbytes: int = 0
    """Of the state; 0 where it was not counted."""


@dataclass(frozen=True)
class Forecast:
    """Seconds that a save is thought to take."""

    likely: float
    worst: float
    """With a margin: so long before its end a job is to stop."""


def forecast(past: Sequence[Past], nbytes: int = 0) -> Forecast | None:
    """What the next save will take, by the slowest of the last ones. None without any.

    Args:
        past: in order of time. nbytes: of the state to save. A larger state takes longer in proportion; a smaller one is not
            thought to be faster, since a part of each save does not depend on its size. 0: as large as those before.
    """
    if not past:
        return None
    slowest = max(one.seconds * (max(1.0, nbytes / one.nbytes) if one.nbytes else 1.0) for one in past[-LAST:])
    return Forecast(slowest, slowest * MARGIN)


def may_begin(expected: Forecast | None, seconds_left: float | None, last_good: int | None) -> tuple[bool, str]:
    """Whether to begin a save before a deadline; and if not, the reason in words.

    One that is killed harms none that is durable: its commit comes last, what is pruned is pruned after that, and only files that
    were retired before are written over. So what is likely to end in time is begun.

    Args:
        expected: None where no save was made yet. seconds_left: until the job is killed; None if nobody says so; 0 when that
            time has passed and the job still runs: then it was no deadline.
        last_good: the last step that is durable; None if there is none, so that there is nothing to lose.
    """
    if seconds_left is None or last_good is None or expected is None:
        return True, ""
    if expected.likely <= seconds_left or seconds_left <= 0:
        return True, ""
    return False, (
        f"this save is not begun: it takes about {expected.likely:.1f} s, {expected.worst:.1f} s at worst, and "
        f"{seconds_left:.1f} s are left until the job is killed. Step {last_good} is the last good one, and stays as it is. "
        "If there is more time, say so: Preemption(window=) or (deadline=)"
    )
