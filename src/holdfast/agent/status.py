"""What an agent tells of itself, from its engine and from the kernel."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from ..run.status import ErrorStatus, RankStatus, SaveStatus, Status
from ..run.timings import TRAINER
from ..version import VERSION
from .engine import Engine
from .versions import OVER, Version


def status_of_engine(engine: Engine | None, url: str, attempt: int, began: float, pids: Mapping[int, tuple[int, bool]]) -> Status:
    """Args:
    began: unix seconds at which the agent began. pids: by rank: its process, and whether it is connected.
    """
    versions = engine.versions if engine is not None else []
    node = engine.node if engine is not None else ""
    arena = engine.arena_bytes if engine is not None else 0
    counts = engine.counts if engine is not None else {}
    last = engine.last_committed if engine is not None else None
    return Status(
        pid=os.getpid(), version=VERSION, node=node, run=url, attempt=attempt, at=time.time(), uptime_seconds=time.time() - began,
        resident_bytes=max(0, _resident() - (engine.touched_bytes if engine is not None else 0)), arena_bytes=arena,
        versions_held=1 if engine is not None and engine.held() is not None else 0,
        ranks=tuple(_rank(rank, pid, is_there, versions) for rank, (pid, is_there) in sorted(pids.items())),
        saves=tuple(_save(version) for version in versions),
        committed_step=last[0] if last else None, committed_at=last[1] if last else 0.0,
        committed_saves=counts.get("durable", 0), skipped_saves=counts.get("skipped", 0), failed_saves=counts.get("failed", 0),
        written_bytes=engine.written_bytes if engine is not None else 0,
        phase_seconds=dict(engine.phase_seconds) if engine is not None else {},
        errors=tuple(ErrorStatus(at, text) for at, text in engine.errors) if engine is not None else (),
    )  # fmt: skip


def _rank(rank: int, pid: int, is_there: bool, versions: list[Version]) -> RankStatus:
    begun = [version.step for version in versions if rank in version.at]
    blocked = sum(p.seconds for v in versions for p in v.times.by_rank.get(rank, ()) if p.lane == TRAINER)
    return RankStatus(rank, pid, is_there, max(begun, default=None), blocked)


def _save(version: Version) -> SaveStatus:
    total = sum(table.nbytes for table in version.tables.values())
    return SaveStatus(version.step, version.level, total if version.level in OVER else 0, total, version.times.began)


def _resident() -> int:
    """Bytes of this process that lie in memory, shared ones included."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
