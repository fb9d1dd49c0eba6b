"""The crash matrix: whatever a crash leaves of a scenario, the run opens at what was announced, or newer.

Every state is opened with the public interface: the newest step, every listed step bit for bit, pins and notes. On a
sample of the states a restarted job saves, prunes and saves again. `HOLDFAST_CRASH_SUBSETS` sets how many random
subsets are tried at each instant, beyond the systematic ones.
"""

from __future__ import annotations

import os
import zlib

import pytest

from .disk import crashes
from .judge import Judge
from .recorder import Fsync, Mark, Recording, Rename
from .scenarios import SCENARIOS

pytestmark = pytest.mark.slow

SUBSETS = int(os.environ.get("HOLDFAST_CRASH_SUBSETS", "12"))
GOES_ON_ONE_IN = 25
SHOWN = 3


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_crash_leaves_what_was_announced(name: str, recordings: dict[str, Recording], judge: Judge) -> None:
    recording = recordings[name]
    assert recording.strangers == []
    failures, states, gone_on = [], set(), 0
    for number, crash in enumerate(crashes(recording, subsets=SUBSETS, seed=zlib.crc32(name.encode()))):
        states.add(crash.state.key)
        broken = judge.verdict(recording, crash)
        if not broken and number % GOES_ON_ONE_IN == 0:
            gone_on += 1
            broken = judge.go_on(recording, crash)
        if broken:
            failures.append("\n".join([crash.describe(recording), *(f"  => {what}" for what in broken)]))
            if len(failures) == SHOWN:
                break
    print(f"{name}: {len(recording.operations)} operations, {len(states)} states, {gone_on} gone on from")
    assert not failures, "\n\n".join(["", *failures])


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_says_what_it_does_and_makes_it_durable(name: str, recordings: dict[str, Recording]) -> None:
    operations = recordings[name].operations
    assert len([o for o in operations if isinstance(o, Mark)]) > 1
    assert any(isinstance(o, Fsync) for o in operations)


def test_files_are_moved_away_and_written_over(recordings: dict[str, Recording]) -> None:
    moved = {name: [o for o in r.operations if isinstance(o, Rename)] for name, r in recordings.items()}
    assert moved["prune_and_recycle"]
    assert moved["save_over_recycled_files"]
    again = moved["prune_then_save_over_what_it_freed"]
    assert len({o.inode for o in again}) < len(again), "no file was both retired and written over"
