"""A job that saves in the background, on one rank or four: trainers, agent, both or some ranks are killed at random instants.

200 kills, and 2,000 with `HOLDFAST_SOAK=1`; `HOLDFAST_SEED` repeats the choices, though not the instants.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from .lives import Life, Promises, end_well, status

pytestmark = pytest.mark.slow

KILLS = 2000 if os.environ.get("HOLDFAST_SOAK") == "1" else 200
WORLDS = [1, 1, 4]
AGENT_KILLS = 3
"""The most in one life: the job goes on after each."""
LONGEST_SECONDS = 0.25
STARTING_SECONDS = 0.5
"""From the start of a life: some kills meet it while it resumes."""
KILLS_OF_ONE_RUN = 50


@pytest.mark.timeout(420 if KILLS == 200 else 4200)
def test_whatever_is_killed_the_job_resumes_from_the_last_step_that_was_safe(in_background: Path, tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", "0")) or random.randrange(1 << 30)
    rng, kills, lives = random.Random(seed), Counter[str](), 0
    while kills.total() < KILLS:
        run = tmp_path / f"run{lives}"
        promises, most = Promises(run), kills.total() + KILLS_OF_ONE_RUN
        while kills.total() < min(most, KILLS):
            lives += 1
            life = Life(run, tmp_path / f"diary{lives}", in_background, rng.choice(WORLDS), rng.randrange(1 << 30), promises)
            try:
                agent_lives = die(life, rng, kills)
                told = f"life {lives} of seed {seed}, {life.world} ranks, {dict(kills)}; left in {run}"
            except AssertionError:
                print(seed, life.where())
                raise
            finally:
                life.close()
            assert promises.ended(life, agent_lives) == [], told
        lives += 1
        end_well(run, tmp_path / f"diary{lives}", in_background, rng.choice(WORLDS), promises)
    print(f"{kills.total()} kills in {lives} lives: {dict(kills)}")


def die(life: Life, rng: random.Random, kills: Counter[str]) -> bool:
    """Kill the agent a few times, then the ranks. Returns whether an agent lives on."""
    time.sleep(rng.random() * STARTING_SECONDS)
    for _ in range(rng.randint(0, AGENT_KILLS)):
        if life.kill_agent():
            kills["agent"] += 1
            life.await_recovery()
        time.sleep(rng.random() * LONGEST_SECONDS)
    how = rng.choice(["trainers", "some first", "both", "agent first", "agent hangs"])
    found = status(life.run) if how != "trainers" else None
    agent = found.pid if found else 0
    if how == "agent hangs" and agent:
        os.kill(agent, signal.SIGSTOP)
        time.sleep(rng.random() * LONGEST_SECONDS / 4)
    if how == "agent first" and agent:
        life.kill_agent()
        time.sleep(rng.random() * LONGEST_SECONDS)
    if how == "some first":
        life.end(rng.sample(range(life.world), rng.randint(1, life.world)))
        time.sleep(rng.random() * LONGEST_SECONDS / 4)
    life.end()
    if how == "agent hangs" and agent:
        os.kill(agent, signal.SIGCONT)
    if how == "both" and agent:
        life.kill_agent()
    kills[how] += 1
    return not (how == "both" and agent)
