"""Real kills: a process that saves, prunes, rolls back and pins is killed at a random instant, again and again.

100 times, and 1,000 with `HOLDFAST_SOAK=1`; `HOLDFAST_SEED` repeats the choices, though not the instants.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from .truth import Facts, observe, violations
from .workload import serving

pytestmark = pytest.mark.slow

KILLS = 1000 if os.environ.get("HOLDFAST_SOAK") == "1" else 100
KILLS_OF_ONE_RUN = 12
"""Then a new run is begun, so that the first save is met too."""
SHOWN = 60
LONGEST_SECONDS = 0.15


@pytest.mark.timeout(120 if KILLS == 100 else 1200)
def test_a_killed_process_loses_nothing_that_it_announced(tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", "0")) or random.randrange(1 << 30)
    rng = random.Random(seed)
    done, interrupted = 0, 0
    story: list[str] = []
    with serving() as server:
        for kill in range(KILLS):
            path = tmp_path / f"run{kill // KILLS_OF_ONE_RUN}"
            if kill % KILLS_OF_ONE_RUN == 0:
                shutil.rmtree(tmp_path, ignore_errors=True)
                tmp_path.mkdir()
                facts = Facts()
                story.clear()
            child = server.start(path, rng.randrange(1 << 30), facts)
            child.run_for(rng.random() * LONGEST_SECONDS)
            child.end()
            story += [*child.story, "killed"]
            seen = observe(path)
            broken = [*child.errors, *violations(child.window, seen)]
            assert not broken, f"kill {kill} of seed {seed}, during {child.begun}: {broken}; left in {path}; {story[-SHOWN:]}"
            facts = seen.facts()
            done += child.done
            interrupted += child.begun is not None
    print(f"{KILLS} kills, {interrupted} of them inside an operation; {done} operations were announced")
    assert interrupted > KILLS // 4, "the kills did not meet the operations"
