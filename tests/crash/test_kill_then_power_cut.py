"""A kill and then a power cut: what the killed process had not made durable is lost, and the next one had built on it.

The process is killed before each of its fsyncs. The next one sees everything, and prunes, or saves; then the power
fails and takes with it what nobody had made durable. What either process announced has to be there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from .disk import crashes_after_kill
from .judge import Judge, announced
from .recorder import Fsync, Mark, Recording
from .scenarios import RUN, SCENARIOS, Stage
from .sequel import with_sequel
from .truth import Facts, Window, observe

SHOWN = 3


def prune(stage: Stage) -> None:
    stage.prune(1, recycle=True)


def prune_and_save(stage: Stage) -> None:
    stage.prune(1, recycle=True)
    save(stage)


def save(stage: Stage) -> None:
    lineage = stage.facts[RUN].lineage
    stage.save(lineage[-1].step + 1 if lineage else 1, 500)


PAIRS = [
    ("first_save_of_a_new_run", save),
    ("save_after_another", prune),
    ("save_after_another", prune_and_save),
    ("prune_to_the_last", prune),
    ("prune_to_the_last", save),
    ("prune_and_recycle", prune_and_save),
    ("rollback_then_save", prune),
]
if os.environ.get("HOLDFAST_SOAK") == "1":
    PAIRS = [(name, then) for name in SCENARIOS for then in (prune, save, prune_and_save)]


@pytest.mark.parametrize(("name", "then"), PAIRS)
def test_what_was_announced_outlives_a_kill_and_a_power_cut(
    name: str, then: Callable[[Stage], None], recordings: dict[str, Recording], judge: Judge, tmp_path: Path
) -> None:
    first = recordings[name]
    failures = []
    for killed_at in (index for index, o in enumerate(first.operations) if isinstance(o, Fsync)):
        promised = announced(first, killed_at)[RUN]
        sequel = partial(play, then=then, promised=promised)
        recording = with_sequel(first, killed_at, sequel, tmp_path / f"{killed_at}")
        for crash in crashes_after_kill(recording, killed_at):
            broken = judge.verdict(recording, crash)
            failures += ["\n".join([crash.describe(recording), *(f"  => {what}" for what in broken)])] if broken else []
    assert not failures, "\n\n".join([f"{len(failures)} states", *failures[:SHOWN]])


def play(stage: Stage, then: Callable[[Stage], None], promised: Window) -> None:
    """Go on with what is found; only what was promised, and what is announced from here on, has to survive."""
    found = observe(stage.root / RUN).facts()
    stage.facts = {RUN: found}
    recorder = stage.recorder
    assert recorder is not None
    start = len(recorder.recording.operations)
    then(stage)
    for index, operation in enumerate(recorder.recording.operations[start:], start):
        if isinstance(operation, Mark):
            weaker = {RUN: weakened(operation.payload[RUN], found, promised)}
            recorder.recording.operations[index] = Mark(operation.label, weaker)


def weakened(window: Window, found: Facts, promised: Window) -> Window:
    """What was found without having been promised may be lost, but not all that was promised with it."""
    own = window.may - {*found.lineage, *found.abandoned}
    return replace(
        window,
        latest=window.latest if window.latest <= own else window.latest | promised.latest,
        must=window.must & (promised.must | own),
        may=window.may | promised.may,
        pins_must=window.pins_must & promised.pins_must,
        pins_may=window.pins_may | promised.pins_may,
        notes_must=window.notes_must & promised.notes_must,
        notes_may=window.notes_may | promised.notes_may,
    )
