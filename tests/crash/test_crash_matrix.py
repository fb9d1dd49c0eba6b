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
from .recorder import Fsync, Mark, Recording
from .scenarios import SCENARIOS

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
def test_a_scenario_announces_its_work_and_has_fsyncs(name: str, recordings: dict[str, Recording]) -> None:
    operations = recordings[name].operations
    assert [o.label for o in operations if isinstance(o, Mark)][-1].endswith(": done")
    assert any(isinstance(o, Fsync) for o in operations)
