"""Members of a team whose processes come, go and are replaced: who is waited for, and what counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Replaced, Unavailable
from holdfast.run.store_board import StoreBoard, board_folder
from holdfast.run.team import Team
from holdfast.store.local import LocalStore

PHASES = ("begin", "write")
LOOKS = 0.8
"""Seconds in which whoever waits looks where the others are, several times."""


@pytest.fixture
def member(tmp_path: Path) -> Callable[[int], Team]:
    """A process that is a member of a team of two, made anew each time."""

    def make(rank: int) -> Team:
        return Team((0, 1), rank, StoreBoard(LocalStore(tmp_path / "run"), board_folder(1), 2), names={1: "node b (rank 1)"})

    return make


def save(team: Team, step: int, seconds: float = 20.0) -> int:
    """Both phases; returns the sum of what the members gave."""
    call = team.call(f"save of step {step}", seconds, PHASES, step)
    for phase in PHASES:
        found: Any = call.round(phase, lambda: team.rank + 1, sum)
    return int(found)


def test_who_refuses_a_later_save_still_takes_part_in_the_one_before_it(member: Callable[[int], Team]) -> None:
    first, second = member(0), member(1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(save, first, 5)
        second.call("save of step 6", 0.0, PHASES[:1], 6, enters=False).fail(Unavailable("no memory was free"))
        time.sleep(LOOKS)
        assert save(second, 5) == 3
        assert waiting.result() == 3
        with pytest.raises(Unavailable, match=r"node b \(rank 1\): no memory was free"):
            save(first, 6)
        assert [f.result() for f in (pool.submit(save, first, 7), pool.submit(save, second, 7))] == [3, 3]


def test_a_call_that_a_process_had_entered_when_it_was_killed_fails_for_those_who_come_to_it_later(
    member: Callable[[int], Team],
) -> None:
    first = member(0)
    member(1).call("save of step 5", 20.0, PHASES, 5)
    member(1).take_over(PHASES, "its agent was killed")
    with pytest.raises(Replaced, match=r"node b \(rank 1\): its agent was killed"):
        save(first, 5)
    second = member(1)
    second.take_over(PHASES, "its agent was killed")
    with ThreadPoolExecutor(2) as pool:
        assert [f.result() for f in (pool.submit(save, first, 6), pool.submit(save, second, 6))] == [3, 3]
