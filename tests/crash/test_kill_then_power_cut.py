"""A kill and then a power cut: what the killed process had not made durable is lost, and the next one had built on it.

The process is killed before each of its fsyncs. The next one sees everything, and prunes, or saves; then the power fails
and takes with it what nobody had made durable. What either process announced has to be there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .disk import crashes_after_kill
from .judge import Judge
from .recorder import Recording
from .scenarios import RUN, SCENARIOS
from .sequel import Deed, pin_again, prune, prune_and_save, prune_to_weights_again, save, sequels

pytestmark = pytest.mark.slow

SHOWN = 3
PAIRS: list[tuple[str, Deed]] = [
    ("first_save_of_a_new_run", save),
    ("save_after_another", prune),
    ("save_after_another", prune_and_save),
    ("prune_to_the_last", prune),
    ("prune_to_the_last", save),
    ("prune_and_recycle", prune_and_save),
    ("rollback_then_save", prune),
    ("pin_a_step_that_refers_to_others", pin_again),
    ("prune_to_weights", prune_to_weights_again),
]
if os.environ.get("HOLDFAST_SOAK") == "1":
    PAIRS += [(name, then) for name in SCENARIOS for then in (prune, save, prune_and_save) if "copy" not in name]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "then"), PAIRS)
def test_what_was_announced_outlives_a_kill_and_a_power_cut(
    name: str, then: Deed, recordings: dict[str, Recording], judge: Judge, tmp_path: Path
) -> None:
    failures = []
    for killed_at, recording in sequels(recordings[name], then, tmp_path / RUN):
        assert recording.strangers == []
        for crash in crashes_after_kill(recording, killed_at):
            if broken := judge.verdict(recording, crash):
                report = [f"killed before operation {killed_at}", crash.describe(recording), *broken]
                failures.append("\n  => ".join(report))
    assert not failures, "\n\n".join([f"{len(failures)} states", *failures[:SHOWN]])
