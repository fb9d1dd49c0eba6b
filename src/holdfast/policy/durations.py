"""Durations as users write them: seconds as a number, or "30s", "10m", "2h", "1d"."""

from __future__ import annotations

import math
import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])\Z")


def seconds_of(duration: float | str, name: str) -> float:
    """The seconds of a duration, above zero.

    Raises:
        ValueError: naming the parameter `name`.
    """
    if isinstance(duration, str):
        match = _TEXT.match(duration.strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    else:
        seconds = float(duration)
    if not 0 < seconds < math.inf:
        raise ValueError(f'{name}={duration!r}: give seconds, or a text such as "30s", "10m", "2h"')
    return seconds
