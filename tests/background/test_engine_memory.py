"""The engine and the memory of ranks: what is still to be written stays as it was captured, whatever becomes of the memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.agent.arena import Arena
from holdfast.agent.engine import Engine
from holdfast.agent.messages import Begin, Captured, Dropped, Free, Memory, Message, Outcome, Row, Table
from holdfast.agent.versions import DURABLE, FAILED, FILLING, WRITING
from holdfast.agent.writer import SessionWriter
from holdfast.run.session import Session
from holdfast.store.local import LocalStore

SLOTS = 3


class Ranks:
    """Real engine, writer and disk; the ranks are this test, which fills their memory itself."""

    def __init__(self, run: Path, ranks: tuple[int, ...]) -> None:
        store = LocalStore(run)
        writer = SessionWriter(Session(store, {"holdfast": "0"}), holdfast.Keep(last=100), False)
        self.run, self.told = run, {rank: [] for rank in ranks}  # type: ignore[var-annotated]
        self.arenas: dict[int, Arena] = {}
        self.elements: dict[int, int] = {}
        self.engine = Engine(ranks, writer, self._hear, store, 1)

    def _hear(self, rank: int, message: Message, fds: Any) -> None:
        if isinstance(message, Memory):
            self.arenas[rank] = Arena(os.dup(fds[0]), message.slots, message.slot_bytes)
        self.told[rank].append(message)

    def table(self, rank: int, number: int, elements: int) -> None:
        """The rank's state has one tensor of so many elements from here on."""
        name = f"state.r{rank}"
        row = Row(name, ["state", f"r{rank}"], "float32", (elements,), "state", None, None, None, 0, 4 * elements, 1)
        self.elements[rank] = elements
        self.engine.receive(rank, Table(number, [row], SLOTS, 4 * elements))

    def begin(self, rank: int, step: int, slot: int, table: int, turn: int = 1) -> None:
        """Capture a step: every element is the step's number."""
        count = self.elements[rank]
        self.arenas[rank].slot(slot)[: 4 * count].view(np.float32)[:] = step
        self.engine.receive(rank, Begin(step, slot, table, "", [], {"state": "dict"}, {}, False, "", time.time(), turn))

    def captured(self, rank: int, step: int, turn: int = 1) -> None:
        self.engine.receive(rank, Captured(step, {}, turn=turn))

    def levels(self) -> dict[int, str]:
        return {version.step: version.level for version in self.engine.versions}

    def await_level(self, step: int, *levels: str) -> None:
        end = time.monotonic() + 20
        while self.levels().get(step) not in levels:
            assert time.monotonic() < end, self.levels()
            time.sleep(0.002)

    def free_slots(self, rank: int) -> list[int]:
        return [message.slot for message in self.told[rank] if isinstance(message, Free)]

    def await_free(self, rank: int, slots: list[int]) -> None:
        """Wait until the rank was told of these free slots, in whatever order."""
        end = time.monotonic() + 20
        while sorted(self.free_slots(rank)) != slots:
            assert time.monotonic() < end, self.free_slots(rank)
            time.sleep(0.002)

    def stored(self, step: int, name: str) -> list[float]:
        """The distinct numbers of a tensor of a step."""
        found: list[float] = holdfast.load(self.run, step=step)["state"][name].unique().tolist()
        return found


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(tmp_path / "run", tuple(range(count))))
        return made[0]

    yield make
    for one in made:
        assert one.engine.close(20.0)
        for arena in one.arenas.values():
            arena.close()


def test_a_step_that_waits_to_be_written_is_not_harmed_by_larger_memory_for_later_ones(ranks: Callable[[int], Ranks]) -> None:
    job = ranks(1)
    job.table(0, 1, 1000)
    job.begin(0, 1, 0, 1)
    job.await_level(1, "writing")  # and held up there: its bytes are not complete
    job.begin(0, 2, 1, 1)
    job.captured(0, 2)
    job.table(0, 2, 50_000)
    job.begin(0, 3, 1, 2)
    job.captured(0, 1)
    job.captured(0, 3)
    job.await_level(3, DURABLE)
    assert job.levels() == {1: DURABLE, 2: DURABLE, 3: DURABLE}
    assert [job.stored(step, "r0") for step in (1, 2, 3)] == [[1.0], [2.0], [3.0]]


def test_memory_that_a_rank_has_no_more_is_not_given_back_to_it(ranks: Callable[[int], Ranks]) -> None:
    job = ranks(1)
    job.table(0, 1, 1000)
    for step, slot in ((1, 0), (2, 1)):
        job.begin(0, step, slot, 1)
        job.captured(0, step)
        job.await_level(step, DURABLE)
    job.await_free(0, [0, 1, 2])  # 1 and 2 when their pages were made, 0 when another step was the newest
    job.begin(0, 3, 0, 1)
    job.table(0, 2, 50_000)  # a word about the slots that steps 2 and 3 are in would speak of others
    job.captured(0, 3)
    job.await_level(3, DURABLE)
    job.begin(0, 4, 2, 2)
    job.captured(0, 4)
    job.await_level(4, DURABLE)
    job.await_free(0, [0, 1, 1, 2, 2])
    time.sleep(0.2)
    assert sorted(job.free_slots(0)) == [0, 1, 1, 2, 2]


def test_larger_memory_of_one_rank_leaves_the_others_all_of_their_slots(ranks: Callable[[int], Ranks]) -> None:
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
    free = set(range(SLOTS))
    for step in range(1, 2 * SLOTS + 1):  # each is the newest in memory, on both ranks, when rank 0 gets another
        assert free, f"rank 1 had no slot left at step {step}"
        for rank, slot, table in ((0, 0, step), (1, free.pop(), 1)):
            job.begin(rank, step, slot, table)
            job.captured(rank, step)
        job.await_level(step, DURABLE)
        job.told[1].clear()
        job.table(0, step + 1, 2000 * (step + 1))
        free |= set(job.free_slots(1))
    assert free == set(range(SLOTS))


def test_a_step_that_one_rank_has_dropped_ends_without_harm_to_the_line_of_the_others(ranks: Callable[[int], Ranks]) -> None:
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
    job.engine.receive(0, Dropped(1, ["Torn", "rank 0 had no memory free"], True))
    job.begin(1, 1, 0, 1)
    job.captured(1, 1)  # it knows nothing of that yet
    assert job.levels() == {1: FAILED}
    assert 0 in job.free_slots(1)
    for rank in (0, 1):
        job.begin(rank, 2, 1, 1)
        job.captured(rank, 2)
    job.await_level(2, DURABLE)
    assert job.stored(2, "r0") == job.stored(2, "r1") == [2.0]
    outcomes = [(m.step, m.error is None) for m in job.told[1] if isinstance(m, Outcome)]
    assert outcomes == [(1, False), (1, False), (2, True)], "told when it was dropped, and again as it may not have known of it"


def test_a_rank_that_is_late_for_a_step_which_others_have_lost_twice_is_told_so(ranks: Callable[[int], Ranks]) -> None:
    """When a rank is gone, the others try their last step again at the end. One that is slow begins it the first time then."""
    job = ranks(3)
    for rank in (0, 1, 2):
        job.table(rank, 1, 1000)
    job.engine.leave(0)
    for turn, slot in ((1, 0), (2, 1)):
        job.begin(2, 1, slot, 1, turn)
    assert job.levels() == {1: FAILED}
    job.told[1].clear()
    job.begin(1, 1, 0, 1, 1)
    assert [(m.step, m.error is None) for m in job.told[1] if isinstance(m, Outcome)] == [(1, False)]
    assert job.free_slots(1) == [0]


def test_what_a_rank_says_late_of_one_try_is_not_taken_for_the_next_one(ranks: Callable[[int], Ranks]) -> None:
    """Rank 0 has given its first try up and begun a second one before it hears anything of the first one of rank 1."""
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
        job.await_free(rank, [1, 2])
        job.told[rank].clear()
    job.engine.receive(0, Dropped(5, ["Torn", "it moved"]))
    job.begin(0, 5, 0, 1, turn=2)
    job.captured(0, 5, turn=2)
    job.begin(1, 5, 0, 1, turn=1)
    job.captured(1, 5, turn=1)
    assert job.levels() == {5: FILLING}, "rank 1 has not begun what rank 0 has"
    assert job.free_slots(1) == [0]
    job.begin(1, 5, 1, 1, turn=2)
    job.await_level(5, WRITING)
    job.captured(1, 5, turn=1)
    time.sleep(0.1)
    assert job.levels() == {5: WRITING}, "its bytes are still on their way"
    job.captured(1, 5, turn=2)
    job.await_level(5, DURABLE)
    assert job.stored(5, "r1") == [5.0]


def test_a_rank_that_comes_back_to_the_same_engine_saves_again_in_memory_of_its_own(ranks: Callable[[int], Ranks]) -> None:
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
    for rank in (0, 1):
        job.begin(rank, 1, 0, 1)
    job.captured(1, 1)
    job.engine.leave(1)  # its bytes are all there
    job.engine.join(1)
    job.table(1, 2, 1000)
    job.begin(1, 2, 0, 2)  # it fills slot 0 of its new memory, while step 1 is still to be written from the old
    job.captured(0, 1)
    job.await_level(1, DURABLE)
    job.begin(0, 2, 1, 1)
    for rank in (0, 1):
        job.captured(rank, 2)
    job.await_level(2, DURABLE)
    assert [job.stored(step, "r1") for step in (1, 2)] == [[1.0], [2.0]]


@pytest.mark.parametrize("late", [True, False])
def test_a_step_that_a_rank_begins_after_or_before_the_others_have_passed_it_ends(
    ranks: Callable[[int], Ranks], late: bool
) -> None:
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
    for rank, step in ((0, 2), (1, 1)) if late else ((1, 1), (0, 2)):
        job.begin(rank, step, 0, 1)
    assert job.levels()[1] == FAILED
    assert 0 in job.free_slots(1)
    job.begin(1, 2, 1, 1)
    for rank in (0, 1):
        job.captured(rank, 2)
    job.await_level(2, DURABLE)


def test_a_step_that_one_rank_has_not_captured_is_never_committed(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    job = ranks(2)
    for rank in (0, 1):
        job.table(rank, 1, 1000)
    for rank in (0, 1):
        job.begin(rank, 1, 0, 1)
    job.captured(0, 1)
    job.await_level(1, "writing")
    time.sleep(0.3)  # enough to write and commit what is there
    assert job.levels() == {1: "writing"}
    job.engine.leave(1)
    job.await_level(1, FAILED)
    assert holdfast.Run(tmp_path / "run").latest() is None
