"""A kill and then a power cut: what the killed process had not made durable is lost, though the next one had built on it.

The process is killed before each of its fsyncs. The next one sees everything, and prunes, or saves; then the power fails and
takes with it what nobody had made durable. What either process announced has to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .disk import crashes_after_kill
from .judge import Judge, announced
from .recorder import Fsync, Recording
from .scenarios import RUN, Stage
from .sequel import with_sequel
from .truth import Facts, Version, between, observe

SHOWN = 3


def prune(stage: Stage) -> None:
    stage.prune(1, recycle=True)


def prune_and_save(stage: Stage) -> None:
    stage.prune(1, recycle=True)
    save(stage)


def save(stage: Stage) -> None:
    lineage = stage.facts[RUN].lineage
    stage.save(lineage[-1].step + 1 if lineage else 1, 500)


@pytest.mark.parametrize("then", [prune, save, prune_and_save])
@pytest.mark.parametrize(
    "name", ["first_save_of_a_new_run", "save_after_another", "prune_to_the_last", "rollback_then_save"]
)
def test_what_was_announced_outlives_a_kill_and_a_power_cut(
    name: str, then: Callable[[Stage], None], recordings: dict[str, Recording], judge: Judge, tmp_path: Path
) -> None:
    first = recordings[name]
    failures = []
    for killed_at, operation in enumerate(first.operations):
        if not isinstance(operation, Fsync):
            continue
        promised = announced(first, killed_at)[RUN]

        def play(stage: Stage) -> None:
            """What the second process finds is true for it, but only what was announced has to survive."""
            found = observe(stage.root / RUN).facts()
            stage.facts = {RUN: found}
            then(stage)

        recording = with_sequel(first, killed_at, play, tmp_path / f"{killed_at}")
        for crash in crashes_after_kill(recording, killed_at):
            if broken := judge.verdict(recording, crash):
                failures.append("\n".join([crash.describe(recording), *(f"  => {what}" for what in broken)]))
    assert not failures, "\n\n".join(["", f"{len(failures)} states", *failures[:SHOWN]])
