"""Each operation of a save, a pruning, a pin and a rollback fails once, before or after it took effect: what is told is true.

After an error of a save its step does not exist; without one it does. Whatever fails, all that was committed loads, and
the same thing done again succeeds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import HoldfastError, Keep, NoSpace, Run, Unavailable
from holdfast.run.session import Session
from holdfast.store.base import Store
from holdfast.store.wrap import Retry
from holdfast.testing.faults import Actor, Fault, Faulty

from .actors import ACTORS, three_steps
from .schedules import CHANGES, in_two_parts
from .world import LIBRARIES, committed, contents, copy_of, damage, steps_of


def operations_of(name: str) -> list[tuple[str, str]]:
    """What an actor does when nothing fails."""
    actor = Actor(copy_of(three_steps()), in_two_parts(ACTORS[name]))
    actor.finish()
    return actor.operations


def outcome(act: Callable[[], Any]) -> BaseException | None:
    try:
        act()
    except Exception as error:
        return error
    return None


def failing_everywhere(name: str, is_answer_lost: bool) -> list[tuple[str, Store, BaseException | None]]:
    """(what failed, the run after it, the error) for each operation of an actor."""
    found = []
    for number, (operation, path) in enumerate(operations_of(name), start=1):
        if is_answer_lost and operation not in CHANGES:
            continue
        store = copy_of(three_steps())
        faulty = Faulty(store, Fault(nth=number, is_answer_lost=is_answer_lost))
        error = outcome(lambda faulty=faulty: in_two_parts(ACTORS[name])(faulty))  # type: ignore[misc]
        found.append((f"{operation} of {path}, number {number}", store, error))
    return found


@pytest.mark.parametrize("is_answer_lost", [False, True], ids=["not done", "answer lost"])
def test_a_save_that_failed_left_no_step_and_one_that_did_not_left_one(is_answer_lost: bool) -> None:
    wrong = []
    for what, store, error in failing_everywhere("saves", is_answer_lost):
        there = committed(store)
        has_step = any(step == 400 for step, _ in there)
        if has_step and error is not None and "commit was not confirmed" in str(error):
            assert is_answer_lost
            assert "commit.json" in what
            continue
        if has_step == (error is not None):
            wrong.append(f"{what}: the step {'is there' if has_step else 'is not there'} after {error!r}")
        if error is not None and not isinstance(error, HoldfastError):
            wrong.append(f"{what}: {error!r}")
        wrong += [f"{what}: {line}" for line in damage(store)]
        if (again := outcome(lambda store=store: Session(store, LIBRARIES).save(contents(5), 500))) is not None:  # type: ignore[misc]
            wrong.append(f"{what}: the next save: {again!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("is_answer_lost", [False, True], ids=["not done", "answer lost"])
@pytest.mark.parametrize("name", ["prunes", "ages", "pins 200", "rolls back to 200", "holds 200 and reads"])
def test_whatever_fails_nothing_is_lost_and_doing_it_again_succeeds(name: str, is_answer_lost: bool) -> None:
    wrong = []
    for what, store, error in failing_everywhere(name, is_answer_lost):
        if error is not None and not isinstance(error, HoldfastError):
            wrong.append(f"{what}: {error!r}")
        if (again := outcome(lambda store=store: ACTORS[name](store)())) is not None:  # type: ignore[misc]
            wrong.append(f"{what}: {name} again: {again!r}")
        wrong += [f"{what}: {line}" for line in damage(store)]
        keeps = {300} if name == "prunes" else {100, 200, 300}
        wrong += [f"{what}: step {step} is gone" for step in keeps - {step for step, _ in committed(store)}]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["saves", "prunes", "ages", "pins 200", "rolls back to 200"])
def test_with_retry_nothing_that_passes_is_noticed(name: str) -> None:
    count = len([operation for operation, _ in operations_of(name) if operation != "finish"])
    for number in range(1, count + 1):
        store = copy_of(three_steps())
        faulty = Faulty(store, Fault("[!f]*", nth=number))  # a finish is never repeated: a second fsync proves nothing
        patient = Retry(faulty, sleep=lambda seconds: None)
        assert outcome(lambda patient=patient: in_two_parts(ACTORS[name])(patient)) is None, faulty.fired  # type: ignore[misc]
        assert not damage(store)


@pytest.mark.parametrize("operation", ["write", "write_at", "finish", "create"])
def test_a_full_disk_is_told_as_such_and_costs_nothing(operation: str) -> None:
    store = copy_of(three_steps())
    session = Session(Faulty(store, Fault(operation, "steps/*", error=NoSpace)), LIBRARIES)
    with pytest.raises(NoSpace):
        session.save(contents(4), 400)
    assert steps_of(store) == [100, 200, 300]
    assert store.list("intents") == []
    assert [name for name in store.list("steps") if "400" in name] == []
    session.save(contents(4), 400)
    assert committed(store)[400, 2] == 4


def test_a_store_that_stays_away_is_unavailable_and_the_run_goes_on_later() -> None:
    store = copy_of(three_steps())
    faulty = Faulty(store)
    session = Session(faulty, LIBRARIES)
    faulty.faults.append(Fault(times=None))
    for step in (400, 500):
        with pytest.raises(Unavailable):
            session.save(contents(4), step)
    faulty.faults.clear()
    session.save(contents(6), 600)
    Run(store).prune(Keep(last=2))
    assert committed(store) == {(300, 1): 3, (600, 2): 6}
