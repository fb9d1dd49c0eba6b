"""What a running agent tells of itself: who is there, what is under way, what was done. A value; it travels as JSON.

A field may be added with a default, so that an older `holdfast top` understands a newer agent, and the other way round.
"""

from __future__ import annotations

import msgspec

FILLING, CAPTURED, WRITING, DURABLE, FAILED = LEVELS = ("filling", "captured", "writing", "durable", "failed")
"""Of a save, in order; `failed` is another end."""


class RankStatus(msgspec.Struct, frozen=True):
    """A rank that this agent serves."""

    rank: int
    pid: int = 0
    is_connected: bool = True
    last_step: int | None = None
    """The last step that it began to capture."""
    blocked_seconds: float = 0.0
    """For how long saves have held up its training, in all."""


class SaveStatus(msgspec.Struct, frozen=True):
    """A save that the agent has in memory."""

    step: int
    level: str = FILLING
    done_bytes: int = 0
    """At the level `filling`: captured; after it: written."""
    total_bytes: int = 0
    began: float = 0.0
    """Seconds since 1970, UTC; so are all times here."""


class ErrorStatus(msgspec.Struct, frozen=True):
    """Something that went wrong."""

    at: float
    text: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """An agent, now."""

    pid: int
    version: str = ""
    node: str = ""
    run: str = ""
    """The run's URL."""
    run_id: str = ""
    attempt: int = 0
    at: float = 0.0
    """When this was told."""
    uptime_seconds: float = 0.0
    resident_bytes: int = 0
    """Memory of the agent's process, without the arena."""
    arena_bytes: int = 0
    memory_budget_bytes: int = 0
    """The most that the arena may take."""
    versions_held: int = 0
    """Whole snapshots in memory."""
    ranks: tuple[RankStatus, ...] = ()
    saves: tuple[SaveStatus, ...] = ()
    """Oldest first."""
    committed_step: int | None = None
    committed_at: float = 0.0
    committed_saves: int = 0
    """Counted, as all below, since the agent began."""
    skipped_saves: int = 0
    failed_saves: int = 0
    written_bytes: int = 0
    phase_seconds: dict[str, float] = {}
    """By the names of `timings.Phase`, all ranks together."""
    errors: tuple[ErrorStatus, ...] = ()
    """The last few, oldest first."""
