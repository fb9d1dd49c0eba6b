"""An agent's status as Prometheus text (exposition format 0.0.4). Base units; counters end in `_total`.

Every sample has the label `run`, the run's id, so that the agents of several runs can be scraped together; `holdfast_info` says
where that run lies. What an agent does not know is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ..run.status import LEVELS, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})

Sample = tuple[Mapping[str, object], float]
"""Labels and value."""


@dataclass(frozen=True)
class Family:
    """The samples of one metric."""

    name: str
    kind: str
    """counter or gauge."""
    about: str
    """One line; for people."""
    samples: tuple[Sample, ...] = field(default=())


def prometheus(status: Status) -> str:
    """The whole text, with the newline at its end that the format wants."""
    run = {"run": status.run_id}
    lines: list[str] = []
    for family in families(status):
        if family.samples:
            lines += [f"# HELP {family.name} {family.about}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{_labels({**run, **labels})} {_number(value)}" for labels, value in family.samples]
    return "\n".join(lines) + "\n"


def families(status: Status) -> Iterator[Family]:
    """Every metric that the status has something to say about."""
    yield from _process(status)
    yield from _ranks(status)
    yield from _saves(status)


def _process(status: Status) -> Iterator[Family]:
    about = {"version": status.version, "node": status.node, "url": status.run}
    yield Family("holdfast_info", "gauge", "Always 1; the agent and its run are the labels.", ((about, 1.0),))
    yield _gauge("holdfast_attempt", "The attempt under which the agent saves.", status.attempt)
    yield _gauge("holdfast_uptime_seconds", "Since the agent began.", status.uptime_seconds)
    yield _gauge("holdfast_resident_bytes", "Memory of the agent's process, without the arena.", status.resident_bytes)
    yield _gauge("holdfast_arena_bytes", "Shared memory in which snapshots lie.", status.arena_bytes)
    yield _gauge("holdfast_memory_budget_bytes", "The most that the arena may take.", status.memory_budget_bytes)
    yield _gauge("holdfast_versions_held", "Whole snapshots in memory.", status.versions_held)


def _ranks(status: Status) -> Iterator[Family]:
    yield _by("holdfast_rank_connected", "gauge", "Whether the rank is connected.", "rank",
              ((r.rank, r.is_connected) for r in status.ranks))  # fmt: skip
    yield _by("holdfast_rank_last_step", "gauge", "The last step that the rank began to capture.", "rank",
              ((r.rank, r.last_step) for r in status.ranks if r.last_step is not None))  # fmt: skip
    yield _by("holdfast_rank_blocked_seconds_total", "counter", "For how long saves have held up the rank's training.", "rank",
              ((r.rank, r.blocked_seconds) for r in status.ranks))  # fmt: skip


def _saves(status: Status) -> Iterator[Family]:
    levels = Counter(save.level for save in status.saves)
    yield _by("holdfast_saves_in_memory", "gauge", "Saves that the agent has in memory, by how far they are.", "level",
              ((level, levels[level]) for level in dict.fromkeys((*LEVELS, *levels))))  # fmt: skip
    pending = sum(max(save.total_bytes - save.done_bytes, 0) for save in status.saves)
    yield _gauge("holdfast_pending_bytes", "Of those, what is not yet captured, or not yet written.", pending)
    if status.committed_step is not None:
        yield _gauge("holdfast_committed_step", "The newest committed step.", status.committed_step)
        yield _gauge("holdfast_committed_timestamp_seconds", "When it was committed, since 1970.", status.committed_at)
    outcomes = {"committed": status.committed_saves, "skipped": status.skipped_saves, "failed": status.failed_saves}
    yield _by("holdfast_saves_total", "counter", "Saves that have ended, by how.", "outcome", outcomes.items())
    yield Family("holdfast_written_bytes_total", "counter", "Bytes of data files written.", (({}, status.written_bytes),))
    yield _by("holdfast_phase_seconds_total", "counter", "Time of saves by phase, all ranks together.", "phase",
              sorted(status.phase_seconds.items()))  # fmt: skip


def _gauge(name: str, about: str, value: float) -> Family:
    return Family(name, "gauge", about, (({}, value),))


def _by(name: str, kind: str, about: str, label: str, values: Iterable[tuple[object, float]]) -> Family:
    """A sample for each value of a label; of two with the same one, which no reader takes, the last."""
    return Family(name, kind, about, tuple(({label: key}, value) for key, value in dict(values).items()))


def _labels(labels: Mapping[str, object]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    """`text` within quotes; what UTF-8 cannot hold becomes a question mark."""
    return text.translate(_ESCAPES).encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    """A value as the format has it; integers with all of their digits."""
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
