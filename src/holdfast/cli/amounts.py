"""Amounts as text, and back: bytes, counts of things, times, metrics, values."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from ..address import UsageError

_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS = {u.lower(): 1000**n for n, u in enumerate(_DECIMAL)} | {
    f"{letter}ib": 1024 ** (n + 1) for n, letter in enumerate("kmgtp")
}
_CLOCK = ((60, 1, "min", "s"), (3600, 60, "h", "min"), (86400, 3600, "d", "h"))
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def size(nbytes: float) -> str:
    """Bytes in the largest decimal unit of which there is at least one: `1.23 GB`."""
    for unit in _DECIMAL:
        if abs(nbytes) < 999.5 or unit == _DECIMAL[-1]:
            break
        nbytes /= 1000
    return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.3g} {unit}"


def parse_size(text: str) -> int:
    """Bytes of `500`, `64MiB`, `5GB`.

    Raises:
        UsageError: not a size, or not positive.
    """
    match = _SIZE.match(text)
    unit = match[2].lower() or "b" if match else ""
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise UsageError(f"{text!r} is not a size: give bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * _UNITS[unit])


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def when(seconds: float) -> str:
    """Seconds since 1970 as local time; a dash for 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def duration(seconds: float) -> str:
    """`0 s`, `3.2 ms`, `12.3 s`, `4 min 10 s`, `3 h 12 min`, `2 d 5 h`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds > 0 else "0 s"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    large, small, unit, part = next(u for u in _CLOCK if seconds < u[0] * 100 or u == _CLOCK[-1])
    wholes, parts = divmod(round(seconds / small), large // small)
    return f"{wholes} {unit} {parts} {part}" if parts else f"{wholes} {unit}"


def number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def metrics_text(metrics: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in metrics.items())


def one_line(text: str) -> str:
    """`text` with nothing in it that moves a terminal's cursor."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def short(text: str, limit: int = 80) -> str:
    """`text`, cut in its middle where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 2]} ... {text[3 - limit // 2 :]}"
