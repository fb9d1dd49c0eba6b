"""What the time of one save went into, on the ranks and at the writer; kept in the run when it is over."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field

from ..errors import HoldfastError
from ..run.history import Step
from ..run.timings import AGENT, COMMITTED, FAILED, SKIPPED, Phase, RankPhases, SaveTimes, keep_times
from ..store.base import Store
from .marks import Marks

log = logging.getLogger("holdfast")


@dataclass
class Times:
    """Of one version.

    Attributes:
        began, taken, ended: unix seconds at which the first rank's `step` was called, the writer took it, it was over.
        by_rank: what each rank has told of its capture. writing: what the writer did. new_bytes: that it wrote.
    """

    began: float = 0.0
    taken: float = 0.0
    ended: float = 0.0
    by_rank: dict[int, tuple[Phase, ...]] = field(default_factory=dict)
    writing: tuple[Phase, ...] = ()
    new_bytes: int = 0

    def wrote(self, store: Store) -> None:
        """Note what the writer did, as the store has seen it."""
        now = time.time()
        before = [Phase("wait", self.began, max(0.0, self.taken - self.began))] if self.began else []
        spans = store.spans(self.taken, now) if isinstance(store, Marks) else [("write", self.taken, max(0.0, now - self.taken))]
        nbytes = store.nbytes if isinstance(store, Marks) else 0
        self.writing = (*before, *(Phase(name, at, seconds, nbytes if name == "write" else 0) for name, at, seconds in spans))

    def keep(
        self, store: Store, number: int, attempt: int, node: str, error: list[str] | None, is_skip: bool, step: Step | None
    ) -> None:
        """Write the record. That it cannot be written is no harm to anything."""
        outcome = COMMITTED if error is None else SKIPPED if is_skip else FAILED
        ranks = [RankPhases(rank, node, phases) for rank, phases in sorted(self.by_rank.items())]
        record = SaveTimes(
            step=number, attempt=attempt, outcome=outcome, reason=error[1] if error else "", began=self.began or self.ended,
            ended=max(self.ended, self.began), raw_bytes=step.commit.raw_bytes if step else 0,
            new_bytes=self.new_bytes, ranks=(RankPhases(AGENT, node, self.writing), *ranks),
        )  # fmt: skip
        with contextlib.suppress(HoldfastError, OSError):
            keep_times(store, record)
