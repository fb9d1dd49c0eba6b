"""The decision lands while a rank gives up waiting for it, or while the board that would tell of it is gone."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from ranks import pool
from ranks.pools import Pool

import holdfast

from .breaking import Fault
from .outcomes import Outcome, judge_outcomes, judge_run, meet, tried
from .states import held, whole
from .stories import RUN, START_SECONDS, Breakage, Telling, stories

WORLD = 3
DEADLINE = 2.0
COMMIT = "*/commit.json"


@pytest.mark.slow
def test_a_decision_that_lands_while_the_others_give_up_is_the_outcome_of_all(tmp_path: Path) -> None:
    """The leader stops just before the decision, for about as long as the others wait: their aborts and its commit race."""
    delays = [DEADLINE + 0.1 * i for i in range(-4, 20)]
    making = [
        partial(
            Telling, tmp_path / str(number), WORLD,
            {0: Breakage((Fault(partial(time.sleep, delay), "create", COMMIT),))}, DEADLINE,
        )
        for number, delay in enumerate(delays)
    ]  # fmt: skip
    told = stories(making, 8)
    wrong = {f"{delay:.1f} s": one.wrong for delay, one in zip(delays, told, strict=True) if one.wrong}
    assert wrong == {}
    assert told[0].is_committed, "the leader was in time"
    assert not told[-1].is_committed, "the others had given up"


def test_an_abort_that_is_slower_than_the_commit_changes_nothing(tmp_path: Path) -> None:
    """Another rank gives up and stops just before it writes the abort; the leader's decision overtakes it."""
    aborting = Fault(partial(time.sleep, 2.0), "create", COMMIT)
    deciding = Fault(partial(time.sleep, DEADLINE + 1.5), "create", COMMIT)
    told = Telling(
        tmp_path / "story", WORLD, {0: Breakage((deciding,)), 1: Breakage((aborting,)), 2: Breakage((aborting,))}, DEADLINE
    ).end()
    assert told.wrong == []
    assert told.is_committed


def test_ranks_learn_of_a_commit_from_the_store_if_the_leader_is_slow_to_tell(tmp_path: Path) -> None:
    slow = Fault(partial(time.sleep, DEADLINE + 1.5), "create", COMMIT, after=True)
    told = Telling(tmp_path / "story", WORLD, {0: Breakage((slow,))}, DEADLINE).end()
    assert told.wrong == []
    assert told.is_committed
    assert all(o is not None and o.seconds < DEADLINE + 2 for o in told.first[1:])


# --- the board is gone ------------------------------------------------------------------------------------------------


def save_while_the_board_dies(directory: Path, faults: dict[int, Fault], deadline: float) -> tuple[Outcome, Outcome]:
    """Step 2 is under way when the test kills the board; it says when all ranks are there."""
    from holdfast.store.local import LocalStore

    from .breaking import Broken

    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    store = Broken(LocalStore(directory / RUN))
    holdfast.save(store, held(1, rank), 1, deadline=START_SECONDS)
    state = held(2, rank)
    meet(directory, "begin", rank, everybody)
    store.faults[:] = [faults[rank]] if rank in faults else []
    first = tried(lambda: holdfast.save(store, state, 2, deadline=deadline))
    return first, tried(lambda: holdfast.save(store, held(3, rank), 3, deadline=deadline))


def host_of(running: Pool) -> psutil.Process:
    """The process that hosts the store of a pool's world: it has no thread of a rank, and came before its ranks."""
    server = psutil.Process(running.pids[0]).parent()
    assert server is not None
    others = {child.pid: child for child in server.children() if child.pid not in running.pids}
    return others[max(pid for pid in others if pid < min(running.pids))]


def load_in_a_new_job(run: Path) -> int | None:
    rank = dist.get_rank()
    return holdfast.restore(run, held(9, rank), deadline=START_SECONDS).step


@pytest.mark.parametrize(
    ("broken", "is_committed"),
    [
        ({0: Fault(partial(time.sleep, 1.0), "finish", "*/n*")}, False),
        ({1: Fault(partial(time.sleep, 1.0), "finish", "*/n*")}, False),
        ({0: Fault(partial(time.sleep, 1.0), "create", COMMIT)}, True),
        ({0: Fault(partial(time.sleep, 1.0), "create", COMMIT, after=True)}, True),
    ],
    ids=["the_leader_writes", "another_rank_writes", "before_the_decision", "after_the_decision"],
)
def test_ranks_learn_the_outcome_from_the_commit_record_when_the_board_dies(
    tmp_path: Path, broken: dict[int, Fault], is_committed: bool
) -> None:
    running = pool(WORLD, fresh=True)
    host = host_of(running)
    running.start(save_while_the_board_dies, tmp_path, broken, 5.0)
    meet(tmp_path, "begin", WORLD, range(WORLD))
    time.sleep(0.5)
    host.kill()
    try:
        first, then = zip(*running.results(timeout=60, catch=True), strict=True)
    finally:
        running.close(at_once=True)
    assert judge_outcomes(first, 5.0) == []
    assert [o.step for o in first] == [2 if is_committed else None] * WORLD
    assert {o.error for o in then} == {"Unavailable"}, "without a board no save begins, and none hangs"
    assert all("key-value store" in o.text for o in then), then
    steps = {1: whole(1, [0, 1, 2])} | ({2: whole(2, [0, 1, 2])} if is_committed else {})
    assert judge_run(tmp_path / RUN, steps) == []
    assert pool(WORLD).run(load_in_a_new_job, tmp_path / RUN) == [max(steps)] * WORLD
