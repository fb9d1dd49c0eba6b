"""A job on 1 to 4 ranks is killed at random instants on a random subset of its ranks, again and again.

50 times, and 500 with `HOLDFAST_SOAK=1`; `HOLDFAST_SEED` repeats the choices, though not the instants.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from ranks.pools import Pool

import holdfast

from .outcomes import SLACK_SECONDS
from .training import Truth, begin, go_on, read_diary, train

pytestmark = pytest.mark.slow

KILLS = 500 if os.environ.get("HOLDFAST_SOAK") == "1" else 50
DEADLINE = 2.0
LONGEST_SECONDS = 0.9
"""From the start of a life to its kill; resuming takes some tenths of it."""
SURVIVE = 0.45
"""How often the ranks that are left are not ended with the others, as a launcher would, but go on to their deadline."""
KILLS_OF_ONE_RUN = 25
WORLDS = [1, 2, 3, 3, 4, 4]


class Life:
    """One start of the job, and what is told of it."""

    def __init__(self, run: Path, diary: Path, world: int, truth: Truth, most: int, seed: int) -> None:
        self.world = world
        self._diary = diary
        self.pool = Pool(world)
        self.pids = self.pool.pids
        self.pool.start(train, run, diary, truth, DEADLINE, most, seed)

    def end(self, rng: random.Random) -> tuple[list[list[dict[str, Any]]], list[int]]:
        """Kill some ranks at a random instant; what each rank has told, and which survived until they ended by themselves."""
        time.sleep(rng.random() * LONGEST_SECONDS)
        victims = rng.sample(range(self.world), rng.randint(1, self.world))
        for rank in victims:
            self.pool.kill(rank)
        survivors = [rank for rank in range(self.world) if rank not in victims]
        if survivors and rng.random() < SURVIVE:
            results = self.pool.results(timeout=3 * (DEADLINE + SLACK_SECONDS), catch=True)
            wrong = [results[rank] for rank in survivors if results[rank] is not None]
            assert not wrong, f"survivors of {victims}: {wrong}"
        else:
            time.sleep(rng.random() * 0.05)
            survivors = []
        self.pool.close(at_once=True)
        return self.told(), survivors

    def told(self) -> list[list[dict[str, Any]]]:
        return [read_diary(self._diary.with_name(f"{self._diary.name}-{rank}")) for rank in range(self.world)]


def judge(told: list[list[dict[str, Any]]], survivors: list[int], latest: int, announced: int) -> list[str]:
    """In which way a life breaks what holds: all ranks resume from one step, the last one committed, with its exact bits.

    Args:
        latest: the newest step of the run before this life. announced: the greatest that any rank of lives before has told.
    """
    wrong = [] if latest >= announced else [f"step {announced} was announced, the run has {latest}"]
    for rank, lines in enumerate(told):
        for line in lines:
            if line.get("resumed", latest) != latest:
                wrong.append(f"rank {rank} resumed from {line['resumed']}, the run had {latest}")
            if line.get("wrong"):
                wrong.append(f"rank {rank} resumed a state that is not that of step {latest}: {line['wrong']}")
    ends = {tuple(sorted(line["saved"] for line in told[rank] if "saved" in line)) for rank in survivors}
    if len(ends) > 1:
        wrong.append(f"survivors {survivors} do not have one outcome: {[told[rank][-2:] for rank in survivors]}")
    unended = [rank for rank in survivors if not told[rank] or "failed" not in told[rank][-1]]
    if unended:
        wrong.append(f"ranks {unended} were not told of the death of others")
    return wrong


@pytest.mark.timeout(240 if KILLS == 50 else 3000)
def test_all_ranks_resume_from_one_committed_step_whichever_of_them_were_killed(tmp_path: Path) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED", "0")) or random.randrange(1 << 30)
    rng = random.Random(seed)
    before = strays()
    pids: list[int] = []
    saved, survived, begun = 0, 0, 0
    for kill in range(KILLS):
        run = tmp_path / f"run{kill // KILLS_OF_ONE_RUN}"
        if kill % KILLS_OF_ONE_RUN == 0:
            truth, at, announced = begin(), 0, 0
        latest = holdfast.Run(run).latest() if run.exists() else None
        while at < (latest.step if latest else 0):
            at += 1
            go_on(truth, at)
        life = Life(run, tmp_path / f"diary{kill}", rng.choice(WORLDS), truth, 1 << 20, rng.randrange(1 << 30))
        pids += life.pids
        told, survivors = life.end(rng)
        wrong = judge(told, survivors, at, announced)
        assert not wrong, f"kill {kill} of seed {seed}, {life.world} ranks: {wrong}; left in {run}"
        steps = [line["saved"] for lines in told for line in lines if "saved" in line]
        announced = max([announced, *steps])
        saved, survived, begun = saved + len(set(steps)), survived + bool(survivors), begun + any(told)
        if kill % KILLS_OF_ONE_RUN == KILLS_OF_ONE_RUN - 1 or kill == KILLS - 1:
            finish(run, tmp_path / f"last{kill}", announced)
    print(f"{KILLS} kills, {begun} after a resume; {saved} steps were announced; survivors went on {survived} times")
    assert begun > KILLS // 4
    assert saved > KILLS, "the kills did not meet training"
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert strays() - before == set()


def finish(run: Path, diary: Path, announced: int) -> None:
    """A last life that nothing disturbs: it resumes, and leaves nothing of the others behind."""
    latest = holdfast.Run(run).latest()
    assert latest is not None
    assert latest.step >= announced
    truth = begin()
    for step in range(latest.step):
        go_on(truth, step + 1)
    life = Life(run, diary, 3, truth, 4, 0)
    assert life.pool.results(timeout=60) == [None] * 3
    life.pool.close()
    for lines in life.told():
        assert lines[0] == {"resumed": latest.step, "wrong": []}
        assert [line.get("saved") for line in lines[1:]] == [latest.step + i + 1 for i in range(4)]
    steps = holdfast.Run(run).steps()
    assert [step.step for step in steps] == [latest.step + 3, latest.step + 4]
    for step in steps:
        with holdfast.open(run, step=step.step) as checkpoint:
            assert checkpoint.verify() == []
    marks = [str(path.relative_to(run)) for kind in ("intents", "tombstones", "pins") for path in run.glob(f"{kind}/[!.]*")]
    assert marks == [], "marks of the dead are cleared; temporary files of theirs, which are none yet, go an hour later"


def strays() -> set[str]:
    """Sockets and shared memory of ours that have names in the file system."""
    places = [Path(tempfile.gettempdir()), Path("/dev/shm")]
    found = [path for place in places if place.is_dir() for path in place.iterdir()]
    return {str(path) for path in found if path.name.startswith("holdfast") and (path.is_socket() or path.is_file())}
