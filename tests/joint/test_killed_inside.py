"""One rank is killed by SIGKILL in a save: before it, at each of its system calls in turn, and after it.

The others all commit the step, or all get an error that names the dead rank; then they save the next step without it.
"""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path

import pytest

from .breaking import Fault, die
from .stories import Breakage, Telling, Told, calls_of, stories

pytestmark = pytest.mark.slow

WORLD = 3
DEADLINE = 2.5
AT_A_TIME = 8
RANKS = pytest.mark.parametrize("rank", [0, 1], ids=["the_leader", "another_rank"])


def distinct(changes: list[str]) -> list[int]:
    """The calls to be killed before. Of a run of equal calls, which write one file piece by piece, the first and the last."""
    chosen = []
    for _, run in itertools.groupby(enumerate(changes), key=lambda item: item[1]):
        numbers = [number for number, _ in run]
        chosen += sorted({numbers[0], numbers[-1]})
    return chosen


def told_with(directory: Path, rank: int, breakages: list[Breakage]) -> list[Told]:
    making = [partial(Telling, directory / str(i), WORLD, {rank: b}, DEADLINE, [rank]) for i, b in enumerate(breakages)]
    return stories(making, AT_A_TIME)


def unnamed(told: Told, rank: int) -> list[str]:
    """Messages of survivors that do not say for which rank and how long they waited."""
    errors = [o for o in told.first if o is not None and o.is_error]
    return [o.text for o in errors if not (re.search(rf"rank {rank}\b", o.text) and re.search(r"waited \d+\.\d s", o.text))]


@RANKS
@pytest.mark.timeout(240)
def test_a_rank_that_is_killed_at_any_system_call_of_a_save_leaves_one_outcome(tmp_path: Path, rank: int) -> None:
    (tmp_path / "counted").mkdir()
    changes = calls_of(tmp_path / "counted", WORLD, rank)[1]
    chosen = distinct(changes)
    told = told_with(tmp_path, rank, [Breakage(dies_at=number) for number in chosen])
    wrong = {f"killed before {changes[n]} {n}": one.wrong for n, one in zip(chosen, told, strict=True) if one.wrong}
    assert wrong == {}
    assert [text for one in told for text in unnamed(one, rank)] == []
    assert any(one.is_committed for one in told), "a rank that dies after the decision does not undo it"
    assert not told[0].is_committed


@RANKS
def test_a_rank_that_is_killed_around_its_calls_is_named_with_the_phase(tmp_path: Path, rank: int) -> None:
    """Before it says anything, when it has said that it begins, and when it has written everything and not said so."""
    breakages = [
        Breakage((Fault(die, "list", "attempts"),)) if rank == 0 else Breakage((Fault(die, "size", "intents/*"),)),
        Breakage((Fault(die, "create", "*/index-n*", after=True),)),
        Breakage((Fault(die, "delete", "*/index-n*"),)),
    ]
    first, wrote, over = told_with(tmp_path, rank, breakages)
    assert first.wrong + wrote.wrong + over.wrong == []
    assert over.is_committed
    phase = "begin" if rank == 0 else "wrote"
    assert all(f"in '{phase}' for rank {rank}" in text for text in first.texts), first.texts
    assert all(f"rank {rank}" in text for text in wrote.texts), wrote.texts
