"""What to keep: a pure function of the committed steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MODES = ("min", "max")


@dataclass(frozen=True)
class Candidate:
    """A committed step, as far as keeping it depends on it."""

    step: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_protected: bool = False
    """Pinned, held by a reader, or otherwise not to be touched."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of each step, with the reason in words."""

    keep: dict[int, str]
    weights_only: tuple[int, ...]
    """Steps that are kept, without their optimizer state."""
    remove: tuple[int, ...]


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of the lineage survive pruning. The newest always does, and pinned ones.

    Attributes:
        last: so many of the newest; None keeps all.
        every: multiples of this, for ever.
        best: so many of the best by `metric`.
        metric, mode: the metric's name, and whether `min` or `max` is better.
        weights: so many of the newest kept steps stay whole, older ones lose their optimizer state; None keeps all state.
    """

    last: int | None = 3
    every: int | None = None
    best: int = 0
    metric: str | None = None
    mode: str = "min"
    weights: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"Keep(mode={self.mode!r}): min or max")
        if self.best and not self.metric:
            raise ValueError("Keep(best=) needs metric=")
        for name, least in (("last", 1), ("every", 1), ("best", 0), ("weights", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"Keep({name}={value}): at least {least}")

    def is_kept_forever(self, step: int) -> bool:
        """Whether `step` will be kept whatever follows, and so should be self-contained."""
        return self.every is not None and step % self.every == 0

    def decide(self, candidates: Sequence[Candidate]) -> Verdict:
        """What becomes of each of the candidates, given in any order."""
        ordered = sorted(candidates, key=lambda c: c.step)
        keep: dict[int, str] = {}
        for number, candidate in enumerate(reversed(ordered)):
            if number == 0:
                keep[candidate.step] = "newest"
            elif self.last is None or number < self.last:
                keep[candidate.step] = f"among the last {self.last}" if self.last else "all are kept"
            elif candidate.is_protected:
                keep[candidate.step] = "pinned or held"
            elif self.is_kept_forever(candidate.step):
                keep[candidate.step] = f"a multiple of {self.every}"
        for candidate in best_of(ordered, self.metric, self.mode)[: self.best]:
            keep.setdefault(candidate.step, f"among the best {self.best} by {self.metric}")
        steps = [c.step for c in ordered]
        recent = set(sorted(keep)[-self.weights :]) if self.weights is not None else set(steps)
        protected = {c.step for c in ordered if c.is_protected}
        weights_only = tuple(s for s in steps if s in keep and s not in recent and s not in protected)
        return Verdict(dict(sorted(keep.items())), weights_only, tuple(s for s in steps if s not in keep))


def best_of(candidates: Sequence[Candidate], metric: str | None, mode: str) -> list[Candidate]:
    """Candidates that have the metric as a finite number, best first; among equals the newest first."""
    if metric is None:
        return []
    sign = 1 if mode == "min" else -1
    scored = [(sign * float(c.metrics[metric]), -c.step, c) for c in candidates if _is_number(c.metrics.get(metric))]
    return [c for _, _, c in sorted(scored, key=lambda item: item[:2])]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
