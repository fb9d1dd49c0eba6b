"""Findings: what `doctor` says of one thing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: str
    """ok, warning or failed."""
    detail: str
    """In words; what to do where it is not ok."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The same in numbers: bytes, seconds, names."""
    exit_code: int = 0
    """That of the command where this failed."""
