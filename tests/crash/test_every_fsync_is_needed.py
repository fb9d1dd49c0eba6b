"""Every fsync is needed: without the fsyncs of any one place in the code, some crash loses what was announced.

Leaving the fsyncs of a place out of a recording is the same as removing them from the code, for nothing that a
program can see depends on an fsync. A place is who asks for durability: the first frame outside the store, and the
line of the store that does the fsync; the store's `_sync_dir` only carries it out. An fsync without which no crash is
found to lose anything belongs removed, or named in `KEPT` with the reason.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from .disk import Crash, crashes
from .judge import Judge
from .recorder import Fsync, Recording

STATES_AT_MOST = int(os.environ.get("HOLDFAST_FSYNC_STATES", "400"))
"""How many new states of one scenario are tried before it is said that a place does not matter in it."""

KEPT: dict[str, str] = {}
"""Places that stay although no crash of these scenarios shows why: the reason."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    line: str
    """`file:line function` in the store."""
    asked_by: str
    """The same of the first frame outside the store."""

    @classmethod
    def of(cls, fsync: Fsync) -> Place:
        store = [frame for frame in fsync.stack if frame.startswith("store/")]
        line = next((frame for frame in store if "sync" not in frame.split()[1]), store[0])
        return cls(line, next((frame for frame in fsync.stack if not frame.startswith("store/")), "?"))


def fsyncs(recording: Recording) -> Iterator[Fsync]:
    return (o for o in recording.operations if isinstance(o, Fsync))


def first_loss(name: str, recording: Recording, without: Callable[[Fsync], bool], judge: Judge) -> str | None:
    """What is lost in the first crash state that loses something where these fsyncs are left out."""
    removed = next((i for i, o in enumerate(recording.operations) if isinstance(o, Fsync) and without(o)), None)
    if removed is None:
        return None
    new: set[int] = set()
    for crash in crashes(recording, subsets=4, seed=zlib.crc32(name.encode()), without=without):
        if crash.prefix <= removed:
            continue
        new.add(crash.state.key)
        if broken := judge.verdict(recording, crash):
            return f"{_where(crash)}: {broken[0]}"
        if len(new) > STATES_AT_MOST:
            break
    return None


def _where(crash: Crash) -> str:
    return f"after operation {crash.prefix} ({crash.how})"


@pytest.mark.timeout(400)
def test_without_any_one_fsync_some_crash_loses_what_was_announced(
    recordings: dict[str, Recording], judge: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    places = sorted({Place.of(fsync) for recording in recordings.values() for fsync in fsyncs(recording)})
    needed: dict[Place, str] = {}
    for place in places:
        for name, recording in recordings.items():
            if loss := first_loss(name, recording, lambda fsync, place=place: Place.of(fsync) == place, judge):
                needed[place] = f"{name}, {loss}"
                break
    idle = [place for place in places if place not in needed]
    with capsys.disabled():
        print()
        for place, loss in needed.items():
            print(f"needed: {place.line}, for {place.asked_by}\n    {loss}")
        for place in idle:
            print(f"NO EFFECT: {place.line}, for {place.asked_by}")
    unknown = [place for place in idle if not any(kept in f"{place.line}, for {place.asked_by}" for kept in KEPT)]
    assert not unknown, f"no crash shows what these fsyncs are for: {unknown}"
