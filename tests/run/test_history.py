"""Attempts and lineage: going back, being killed, two jobs on one run; what resumes, what stays readable, who must stop."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Checkpointer, Every, Keep, NoCheckpoint, Refused, Run, Superseded
from holdfast.format.records import Attempt, StepRef
from holdfast.run.history import History, lineage_bounds
from holdfast.run.session import Session, forget_session
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faults import Actor

from .world import LIBRARIES, committed, contents, read, save


class Job:
    """A training job whose weights are the sum of what it learned, so that two lines of a run never hold the same."""

    def __init__(self, run: Any, learns: float = 1.0) -> None:
        self.learns = learns
        self.state: dict[str, Any] = {"model": {"weight": torch.zeros(4)}, "progress": {"step": 0}}
        self.checkpointer = Checkpointer(run, self.state, save=Every(steps=100), keep=Keep(last=None))
        self.began = self.checkpointer.resume()

    @property
    def weight(self) -> float:
        return float(self.state["model"]["weight"][0])

    def train(self, until: int) -> Job:
        """Steps of a hundred. The job is then as if killed: nothing closes it."""
        for n in range(self.began + 100, until + 1, 100):
            self.state["model"]["weight"] += self.learns
            self.state["progress"]["step"] = n
            self.checkpointer.step(n)
        return self


def weight_at(run: Any, step: int | None = None) -> float:
    return float(holdfast.load(run, step=step)["model"]["weight"][0])


# --- going back -------------------------------------------------------------------------------------------------------


def test_after_a_rollback_and_a_kill_the_new_line_resumes_and_the_old_one_stays_readable(tmp_path: Path) -> None:
    run = Run(tmp_path)
    Job(tmp_path).train(500)
    run.rollback(400)
    assert [s.step for s in run.steps()] == [100, 200, 300, 400]
    assert run.latest().step == 400
    assert weight_at(tmp_path, 500) == 5, "step 500 is abandoned, not gone"

    retrained = Job(tmp_path, learns=10)
    assert (retrained.began, retrained.weight) == (400, 4)
    retrained.train(500)
    assert weight_at(tmp_path, 500) == 14

    again = Job(tmp_path, learns=10)
    assert (again.began, again.weight) == (500, 14)
    old = next(s for s in run.steps(abandoned=True) if s.is_abandoned)
    assert (old.step, old.attempt, [s.step for s in run.steps()]) == (500, 1, [100, 200, 300, 400, 500])


def test_a_rollback_deletes_nothing_and_may_be_taken_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    Job(tmp_path).train(500)
    run.rollback(200)
    run.rollback(500)
    assert [s.step for s in run.steps()] == [100, 200, 300, 400, 500]
    assert Job(tmp_path).began == 500


def test_skipped_samples_are_recorded_with_the_attempt(tmp_path: Path) -> None:
    Job(tmp_path).train(300)
    number = Run(tmp_path).rollback(200, skip_samples=[(1000, 2000)])
    record = History(Run(tmp_path).store).attempts()[number]
    assert (record.reason, record.parent, record.skipped_samples) == ("rollback", StepRef(200, 1), [[1000, 2000]])


def test_resuming_at_an_older_step_begins_a_new_line(tmp_path: Path) -> None:
    Job(tmp_path).train(500)
    job = Job(tmp_path)
    assert job.checkpointer.resume(at=300) == 300
    assert job.weight == 3
    assert Run(tmp_path).latest().step == 300


def test_pruning_keeps_the_end_of_each_abandoned_line(tmp_path: Path) -> None:
    run = Run(tmp_path)
    Job(tmp_path).train(500)
    run.rollback(200)
    Job(tmp_path).train(300)
    run.prune(Keep(last=1))
    assert [(s.step, s.is_abandoned) for s in run.steps(abandoned=True)] == [(300, False), (500, True)]
    assert weight_at(tmp_path, 500) == 5


def test_going_back_to_where_only_weights_are_left_is_refused(tmp_path: Path) -> None:
    """Nothing could resume there: the run would look empty."""
    store = MemoryStore()
    save(store, (100, 1), (200, 2))
    Run(store).prune(Keep(last=None, weights=1))
    with pytest.raises(Refused):
        Run(store).rollback(100)
    assert Run(store).latest().step == 200


def test_a_rollback_to_a_step_that_is_not_there_says_what_is(tmp_path: Path) -> None:
    Job(tmp_path).train(200)
    with pytest.raises(NoCheckpoint, match="it has 100, 200"):
        Run(tmp_path).rollback(150)


# --- two jobs ---------------------------------------------------------------------------------------------------------


def test_of_two_jobs_on_one_run_the_older_stops_and_nothing_is_mixed(tmp_path: Path) -> None:
    older = Job(tmp_path).train(200)
    newer = Job(tmp_path, learns=10)
    older.began = 200
    with pytest.raises(Superseded) as raised:
        older.train(300)
    assert (raised.value.attempt, raised.value.newer) == (1, 2)
    newer.train(400)
    assert [(s.step, s.attempt) for s in Run(tmp_path).steps(abandoned=True)] == [(100, 1), (200, 1), (300, 2), (400, 2)]
    assert [weight_at(tmp_path, step) for step in (100, 200, 300, 400)] == [1, 2, 12, 22]


def test_a_late_commit_of_an_older_attempt_is_never_chosen() -> None:
    store = MemoryStore()
    save(store, (100, 1), (200, 2))
    late = Actor(store, lambda own: Session(own, LIBRARIES).save(contents(9), 900))
    while not (late.operations and late.operations[-1][1].endswith("index-n0000.safetensors")):
        late.advance(len(late.operations) + 1)
    commit_is_next = len(late.operations)
    while ("list", "attempts") not in late.operations[commit_is_next:]:
        late.advance(len(late.operations) + 1)
    save(store, (300, 3))
    late.finish()
    assert ("create", "steps/0000000900-a0002/commit.json") in late.operations, "it did commit"
    assert (Run(store).latest().step, read(store)) == (300, 3)
    assert [s.step for s in Run(store).steps(abandoned=True) if s.is_abandoned] == [900]
    assert read(store, 900) == 9
    save(store, (400, 4))
    assert [s.step for s in Run(store).steps()] == [100, 200, 300, 400]


def test_each_opening_for_writing_is_an_attempt_of_its_own() -> None:
    store = MemoryStore()
    for step in (100, 200, 300):
        save(store, (step, step))
    attempts = History(store).attempts()
    assert [(n, a.reason, a.parent) for n, a in attempts.items()] == [
        (1, "start", None),
        (2, "restart", StepRef(100, 1)),
        (3, "restart", StepRef(200, 2)),
    ]


def test_looking_at_a_run_begins_no_attempt(tmp_path: Path) -> None:
    Job(tmp_path).train(100)
    run = Run(tmp_path)
    run.steps(), run.latest(), run.best(), run.find(100), run.prune()
    holdfast.load(tmp_path)
    assert list(History(run.store).attempts()) == [1]


# --- one-shot saves ---------------------------------------------------------------------------------------------------


def state(number: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4,), number)}}


@pytest.mark.parametrize("step", [200, 100, 1])
def test_steps_must_grow(tmp_path: Path, step: int) -> None:
    holdfast.save(tmp_path, state(2), 200)
    with pytest.raises(Refused, match=r"does not exceed step 200.*rollback"):
        holdfast.save(tmp_path, state(1), step)
    assert weight_at(tmp_path) == 2


def test_steps_must_grow_across_processes_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path, state(2), 200)
    forget_session(Run(tmp_path).store)
    with pytest.raises(Refused):
        holdfast.save(tmp_path, state(1), 200)
    holdfast.save(tmp_path, state(3), 201)
    assert [(s.step, s.attempt) for s in Run(tmp_path).steps()] == [(200, 1), (201, 2)]


def test_a_save_that_is_refused_does_not_stop_the_job_that_runs(tmp_path: Path) -> None:
    job = Job(tmp_path).train(200)
    forget_session(Run(tmp_path).store)  # as in another process
    with pytest.raises(Refused):
        holdfast.save(tmp_path, state(1), 100)
    job.began = 200
    job.train(300)
    assert weight_at(tmp_path) == 3


def test_saves_of_one_process_belong_to_one_attempt(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        handle = holdfast.save(tmp_path, state(step), step)
        assert (handle.step, handle.attempt, handle.level) == (step, 1, "durable")


def test_a_save_after_a_rollback_begins_the_new_line(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        holdfast.save(tmp_path, state(step), step)
    Run(tmp_path).rollback(1)
    holdfast.save(tmp_path, state(20), 2)
    assert [weight_at(tmp_path, s.step) for s in Run(tmp_path).steps()] == [1, 20]


def test_a_directory_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(Refused, match=r"thesis\.tex"):
        holdfast.save(tmp_path, state(1), 1)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_two_memory_stores_without_a_name_are_two_runs() -> None:
    one, other = MemoryStore(), MemoryStore()
    holdfast.save(one, state(1), 1)
    holdfast.save(other, state(2), 2)
    assert [[s.step for s in Run(store).steps()] for store in (one, other)] == [[1], [2]]


# --- lineage against a naive model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """A commit of the naive model: it knows the one before it."""

    ref: StepRef
    before: Commit | None

    def line(self) -> list[StepRef]:
        return [*(self.before.line() if self.before else []), self.ref]


MOVES = st.lists(st.tuples(st.sampled_from(["save", "save late", "restart", "roll back"]), st.integers(1, 50)), max_size=40)


@given(MOVES)
def test_the_lineage_is_the_chain_of_parents_whatever_was_done(moves: list[tuple[str, int]]) -> None:
    attempts: dict[int, Attempt] = {}
    heads: list[Commit | None] = []
    commits: list[Commit] = []

    def begin(parent: Commit | None) -> None:
        heads.append(parent)
        attempts[len(heads)] = Attempt(run="r", attempt=len(heads), parent=parent.ref if parent else None)

    def commit(attempt: int, further: int) -> None:
        head = heads[attempt - 1]
        heads[attempt - 1] = Commit(StepRef((head.ref.step if head else 0) + further, attempt), head)
        commits.append(heads[attempt - 1])

    begin(None)
    for move, number in moves:
        if move == "save":
            commit(len(heads), number)
        elif move == "save late":  # by an attempt that may have been superseded
            commit(number % len(heads) + 1, 1)
        else:
            begin(commits[number % len(commits)] if move == "roll back" and commits else heads[-1])
    bounds = lineage_bounds(attempts)
    found = [c.ref for c in commits if c.ref.step <= bounds.get(c.ref.attempt, -1)]
    assert sorted(found) == sorted(heads[-1].line() if heads[-1] else [])


def test_the_lineage_reads_the_same_from_a_store() -> None:
    store = MemoryStore()
    numbers = itertools.count(1)
    for steps, back_to in (((100, 200, 300), 200), ((250, 350, 450), 350), ((400, 500), 250), ((300,), None)):
        save(store, *((step, next(numbers)) for step in steps))
        if back_to is not None:
            Run(store).rollback(back_to)
    assert [(s.step, s.attempt) for s in Run(store).steps()] == [(100, 1), (200, 1), (250, 3), (300, 7)]
    assert all(isinstance(number, int) for number in committed(store).values())
    refs = [s.ref for s in Run(store).steps(abandoned=True)]
    assert refs == sorted(refs)


def test_the_newest_step_is_found_without_reading_the_others(tmp_path: Path) -> None:
    store: Store = MemoryStore()
    save(store, *((step, step) for step in range(1, 30)))
    looked = Actor(store, lambda own: History(own).newest().step)
    assert looked.finish() == 29
    assert len([path for operation, path in looked.operations if operation == "read" and "commit" in path]) == 1
