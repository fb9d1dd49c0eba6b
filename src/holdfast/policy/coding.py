"""How to code: what the user asks for, and where that is `adaptive`, what is durable soonest. Pure functions of measurements.

A class of tensors (a role, or a kind of optimizer state, of one dtype) is coded where that is sooner than writing it raw: while
the processor codes one chunk the store takes another, so the slower of the two is what counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..patterns import matches_any

RAW, ADAPTIVE, LOSSY = "raw", "adaptive", "int8"
CODECS = ("raw", "zstd", "planes", ADAPTIVE, LOSSY)
WORTH = 0.08
"""Another codec must promise to be this much sooner before the choice changes: about half of what planes can gain at most."""
LEVELS = {"zstd:-5": -5, "zstd": 1, "zstd:3": 3, "zstd:6": 6}
"""What `adaptive` may choose of zstd. Above 6, what hardly shrinks more takes twice as long."""
_FAST, _USUAL, _DEEPER = "zstd:-5", "zstd", ("zstd:3", "zstd:6")
_SAME = 0.02
"""Codecs whose times differ by less are equally soon: then the one that takes the processor least is chosen."""
_BUSY = 0.8
"""A store that was at work this share of the time is what a save waited for."""
_REMEMBERED = 5
_LEAST_CORES = 0.25


@dataclass(frozen=True)
class Coding:
    """Which codec the user asks for, by name of the tensor.

    Attributes:
        rules: (pattern, codec), of which the first that matches counts; raw where none does.
    """

    rules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for pattern, codec in self.rules:
            if codec not in CODECS:
                raise ValueError(f"coding {pattern!r}: {codec!r} is none of {', '.join(CODECS)}")
            if codec == LOSSY and pattern == "*":
                raise ValueError(
                    f'{LOSSY} is lossy: name the moments that may lose bits, as in {{"optimizer.*.exp_avg*": "{LOSSY}"}}'
                )

    @classmethod
    def of(cls, asked: str | Mapping[str, str] | Coding | None) -> Coding:
        """What was asked for as a codec's name for all tensors, or as a mapping of patterns to such names.

        Raises:
            ValueError: no such codec, or a lossy one for all.
        """
        if isinstance(asked, Coding):
            return asked
        if isinstance(asked, str):
            return cls((("*", asked),))
        return cls(tuple((asked or {}).items()))

    @property
    def is_raw(self) -> bool:
        """Whether nothing is coded, whatever a tensor is called."""
        return all(codec == RAW for _, codec in self.rules)

    def wanted(self, name: str) -> str:
        return next((codec for pattern, codec in self.rules if matches_any(name, pattern)), RAW)


@dataclass(frozen=True, slots=True)
class Sample:
    """What coding some chunks of a class gave."""

    ratio: float
    """Coded bytes for each raw one."""
    rate: float
    """Raw bytes that one core codes in a second."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What writing a coded file has shown."""

    raw_bytes: int
    stored_bytes: int
    seconds: float
    """In all; of these, how long the store and coding were at work:"""
    writing_seconds: float
    coding_seconds: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What the store and the processor have given in the saves before."""

    total_cores: float
    seen: tuple[float, ...] = ()
    """Bytes a second that the store took, the newest last."""
    idle_cores: float = float("inf")
    """That were idle while the last raw file was written: coding could have had them."""
    share: float = 1.0
    """Of the idle cores, what coding really had in the last coded file."""
    is_late: bool = False
    """Whether a coded file has taken longer than a raw one would have: then nothing is coded until it is tried again."""

    @property
    def store(self) -> float | None:
        """Bytes a second that the store takes, or None where that is not known."""
        return statistics.median(self.seen) if self.seen else None

    @property
    def cores(self) -> float:
        """Cores that coding may count on. Never none: a training process waits now and then."""
        return max(_LEAST_CORES, min(self.total_cores, self._idle * self.share))

    @property
    def _idle(self) -> float:
        return max(_LEAST_CORES, min(self.total_cores, self.idle_cores))

    def after_raw(self, stored_bytes: int, writing_seconds: float, idle_cores: float) -> Rates:
        """With what writing a raw file has shown; `writing_seconds`: how long the store was at work."""
        return replace(self._with_store(stored_bytes / max(writing_seconds, 1e-9)), idle_cores=idle_cores)

    def after_coded(self, shown: Shown, core_seconds: float) -> Rates:
        """With what writing a coded file has shown; `core_seconds`: what coding should have taken one core."""
        rate = shown.stored_bytes / max(shown.writing_seconds, 1e-9)
        share = core_seconds / max(shown.coding_seconds, 1e-9) / self._idle
        waited_for_store = shown.writing_seconds >= _BUSY * shown.seconds
        waited_for_coding = shown.coding_seconds >= _BUSY * shown.seconds
        is_late = self.store is not None and shown.seconds > shown.raw_bytes / self.store
        known = replace(self, is_late=self.is_late or (is_late and waited_for_coding))
        if waited_for_store:  # so coding had at least this much
            return replace(known._with_store(rate), share=max(self.share, share))
        if self.store is not None and rate > self.store:  # one that waits shows only what it takes at least
            known = known._with_store(rate)
        return replace(known, share=share) if waited_for_coding else known

    def renewed(self) -> Rates:
        """With what coding may have had too little of forgotten, so that it is tried again."""
        return replace(self, share=max(1.0, self.share), is_late=False)

    def _with_store(self, rate: float) -> Rates:
        return replace(self, seen=(*self.seen, rate)[-_REMEMBERED:])


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of a class, and why."""

    codec: str
    reason: str


def another_level(samples: Mapping[str, Sample], rates: Rates) -> str | None:
    """The level of zstd that is worth a sample next, by those that are there; None where no other one could pay.

    A faster one where the processor would hold the store up; deeper ones where the store is waited for, as long as they gain.
    """
    usual, store = samples.get(_USUAL), rates.store
    if usual is None or store is None or usual.ratio >= 1 - WORTH:
        return None

    def holds_the_store_up(sample: Sample) -> bool:
        return sample.rate * rates.cores * sample.ratio < store

    if holds_the_store_up(usual):
        return None if _FAST in samples else _FAST
    last = usual
    for name in _DEEPER:
        if name not in samples:
            return name
        if samples[name].ratio > (1 - _SAME) * last.ratio or holds_the_store_up(samples[name]):
            return None
        last = samples[name]
    return None


def choose(samples: Mapping[str, Sample], rates: Rates, current: str = RAW) -> Choice:
    """The codec with which a class is durable soonest; `current` unless another one is better by WORTH, or raw is better at all.

    Args:
        samples: of the codecs that the class may have, besides raw.
    """
    store = rates.store
    if store is None:
        return Choice(RAW, "how fast the store is will be known after this save")
    if rates.is_late:
        return Choice(RAW, "coding has made a save later than it would have been raw; it is tried again later")
    if not samples:
        return Choice(RAW, "what codecs make of it will be known after this save")

    def seconds(codec: str) -> float:
        """For each byte of the class."""
        if codec not in samples:
            return 1 / store
        return max(1 / (samples[codec].rate * rates.cores), samples[codec].ratio / store)

    best = min((RAW, *samples), key=seconds)
    stays = current if current in samples and seconds(current) <= seconds(RAW) else RAW
    if seconds(best) > (1 - WORTH) * seconds(stays):
        best = stays
    else:
        enough = min((1 - WORTH) * seconds(stays), seconds(best) / (1 - _SAME))
        best = max((name for name in samples if seconds(name) <= enough), key=lambda name: samples[name].rate)
    told = f"the store takes {_rate(store)}, {rates.cores:.1f} cores are free"
    if best != RAW:
        return Choice(best, f"{samples[best].ratio:.2f} of its size at {_rate(samples[best].rate)} a core; {told}")
    codec, nearest = min(samples.items(), key=lambda item: item[1].ratio)
    is_held_up = nearest.rate * rates.cores * (1 - WORTH) < store and nearest.ratio < 1 - WORTH
    why = "would hold the store up" if is_held_up else "gains too little"
    return Choice(RAW, f"{codec} {why}: {nearest.ratio:.2f} of its size at {_rate(nearest.rate)} a core; {told}")


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second / 1e9:.2f} GB/s"
