"""Every fsync is needed: without the fsyncs of any one place in the code, some crash loses what was announced.

Leaving the fsyncs of a place out of a recording is the same as removing them from the code, for nothing that a
program can see depends on an fsync. A place is who asks for durability: the first frame outside the store, and the
line of the store that does the fsync; the store's `_sync_dir` only carries it out. An fsync without which no crash is
found to lose anything belongs removed, or named in `KEPT` with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .disk import crashes_without
from .judge import Judge
from .recorder import Fsync, Recording
from .scenarios import RUN
from .sequel import prune, sequels

pytestmark = pytest.mark.slow

CHOSEN_BY_CALLER = ("create", "delete", "_sync_dir")
"""Functions of the store that sync where their caller wants it: each such caller has to need it. Others always sync,
and it is enough that one caller needs it."""

LOSS_SHOWN = 240

KEPT = {
    (
        "create",
        "create_run",
    ): "what a store creates is durable by contract; here the next directory made beside it would do",
}
"""Where no crash shows what an fsync is for, and it stays: function of the store and of its caller, and the reason."""


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


def with_sequels(recordings: dict[str, Recording], directory: Path) -> Iterator[tuple[str, Recording]]:
    """What another process does after a kill, for some fsyncs are there for that."""
    for name in ("save_after_another", "prune_to_the_last", "rollback_then_save"):
        (directory / name).mkdir(parents=True)
        for killed_at, recording in sequels(recordings[name], prune, directory / name / RUN):
            yield f"{name}, killed before operation {killed_at}, and another prunes", recording


def first_loss(recording: Recording, place: Place, judge: Judge) -> str | None:
    """What is lost in the first crash state that loses something because the fsyncs of this place are left out."""
    gone_on = -1
    for crash in crashes_without(recording, lambda fsync: Place.of(fsync) == place):
        broken = judge.verdict(recording, crash)
        if not broken and gone_on != crash.prefix:  # once at each instant: it takes long
            gone_on = crash.prefix
            broken = judge.go_on(recording, crash)
        if broken:
            return f"after operation {crash.prefix}: {broken[0]}"
    return None


@pytest.mark.timeout(300)
def test_without_any_one_fsync_some_crash_loses_what_was_announced(
    recordings: dict[str, Recording], judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recordings = recordings | dict(with_sequels(recordings, tmp_path / "sequel"))
    places = sorted({Place.of(fsync) for recording in recordings.values() for fsync in fsyncs(recording)})
    needed: dict[Place, str] = {}
    for place in places:
        losses = ((name, first_loss(recording, place, judge)) for name, recording in recordings.items())
        name, loss = next(((name, loss) for name, loss in losses if loss), ("", None))
        if loss:
            needed[place] = f"{name}, {loss}"
    needed_lines = {place.line for place in needed}
    idle = [place for place in places if place not in needed]
    with capsys.disabled():
        print()
        for place, loss in needed.items():
            print(f"needed: {place.line}, for {place.asked_by}\n    {loss[:LOSS_SHOWN]}")
        for place in idle:
            print(f"no effect: {place.line}, for {place.asked_by}")
    useless = [p for p in idle if p.line not in needed_lines or p.line.split()[1] in CHOSEN_BY_CALLER]
    unknown = [p for p in useless if (p.line.split()[1], p.asked_by.split()[1]) not in KEPT]
    assert not unknown, f"no crash shows what these fsyncs are for: {unknown}"
