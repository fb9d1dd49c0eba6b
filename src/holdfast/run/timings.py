"""Where the time of each save went: phases by rank, kept in the run as small sealed records.

Nothing depends on these records: they may be lost, damaged or deleted without harm to any checkpoint. Reading them back is for
whoever asks what is slow, on which rank, since when.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from ..errors import HoldfastError, Unavailable
from ..format.records import Record, seal, unseal
from ..store.base import Store

COMMITTED, SKIPPED, FAILED = "committed", "skipped", "failed"
AGENT = -1
"""In place of a rank's number: the node's agent, or whoever writes for it."""
TRAINER = "trainer"
"""The lane of what holds up training: a rank waits there, beside the phases that make up the save."""

Unix = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Seconds since 1970, UTC; anything up to the year 5138."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]

_FOLDER = "timings"
_NAME = re.compile(r"(\d{10,18})-a(\d{4,9})-[0-9a-f]{4}\.json\Z", re.ASCII)
_PRUNE_EVERY = 100
_TRIES = 20
_kept: dict[str, int] = {}
"""How many records this process has written, by the store's URL."""


class Phase(msgspec.Struct, frozen=True, array_like=True):
    """One stretch of a rank's work for a save."""

    name: str
    """capture, barrier, wait, code, write, fsync, commit, prune, ..."""
    start: Unix
    seconds: Seconds
    """Taken from a monotonic clock, as `start` cannot be."""
    nbytes: Bytes = 0
    lane: str = ""
    """Empty: a part of the save's way from its begin to its end. Else it runs beside that, as `trainer` does."""


class RankPhases(msgspec.Struct, frozen=True):
    """What one rank, or the agent of a node, did for a save."""

    rank: Annotated[int, msgspec.Meta(ge=AGENT, le=2**31)]
    node: str = ""
    phases: tuple[Phase, ...] = ()


class SaveTimes(Record, frozen=True, kw_only=True):
    """`timings/*.json`: how a save went. Where several nodes write one step, each may keep a record of its own ranks."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=10**9)]
    outcome: str = COMMITTED
    """committed, skipped or failed."""
    reason: str = ""
    """Why it is not committed."""
    began: Unix
    ended: Unix
    raw_bytes: Bytes = 0
    """Of all tensors, aliases once."""
    new_bytes: Bytes = 0
    """Of the data files that the save wrote."""
    stored_ratio: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    """Bytes of the chunks that were written, after coding by before."""
    ranks: tuple[RankPhases, ...] = ()

    @property
    def seconds(self) -> float:
        """From begin to end; 0 where the clock was set back meanwhile."""
        return max(self.ended - self.began, 0.0)


def keep_times(store: Store, record: SaveTimes, most: int = 1000) -> None:
    """Add a record to the run. The oldest beyond `most` go, now and then: a directory is not listed for every save.

    Raises:
        Unavailable, NoSpace: the record is not kept. No reason for a save to fail.
    """
    stem, data = f"{_FOLDER}/{record.step:010d}-a{record.attempt:04d}", seal(record)
    for _ in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            _create(store, f"{stem}-{secrets.token_hex(2)}.json", data)
            break
    written = _kept.get(store.url, 0)
    _kept[store.url] = written + 1
    if written % _PRUNE_EVERY == 0:  # the first of a process, too, so that many short ones leave no more than a long one
        names = _names(store)
        for name in names[: max(len(names) - most, 0)]:
            store.delete(f"{_FOLDER}/{name}")


def times_of(store: Store, attempt: int | None = None, newest: int | None = None) -> list[SaveTimes]:
    """The records of a run by attempt, then step; what cannot be read, as a power cut may leave it, is left out.

    Args:
        attempt: only of this one. newest: no more than so many, the newest; reads no others.
    Raises:
        Unavailable.
    """
    names = [name for name in _names(store) if attempt is None or _key(name)[0] == attempt]
    found = []
    for name in names if newest is None else names[max(len(names) - newest, 0) :]:
        with contextlib.suppress(FileNotFoundError, HoldfastError):
            found.append(unseal(store.read(f"{_FOLDER}/{name}"), SaveTimes, f"{_FOLDER}/{name}"))
    return sorted(found, key=lambda record: (record.attempt, record.step, record.began))


def unaccounted(record: SaveTimes) -> float:
    """The share of the save's time, 0 to 1, in which no phase of the lane `` was under way on any rank."""
    if not record.seconds:
        return 0.0
    phases = (phase for rank in record.ranks for phase in rank.phases if not phase.lane)
    spans = sorted((max(p.start, record.began), min(p.start + p.seconds, record.ended)) for p in phases)
    return max(1.0 - _covered(spans) / record.seconds, 0.0)


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans that are sorted by where they begin."""
    covered, until = 0.0, 0.0
    for begin, end in spans:
        covered += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return covered


def _names(store: Store) -> Sequence[str]:
    """The names of the records, oldest first."""
    return sorted((name for name in store.list(_FOLDER) if _NAME.match(name)), key=_key)


def _key(name: str) -> tuple[int, int]:
    """Attempt, then step: after a rollback a newer save may have a smaller step."""
    match = _NAME.match(name)
    return (int(match[2]), int(match[1])) if match else (0, 0)


def _create(store: Store, path: str, data: bytes) -> None:
    try:
        store.create(path, data, sync=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{store.url} is not there any more: is its storage mounted?") from error
