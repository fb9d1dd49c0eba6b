"""Pins, holds, notes, the best step, and waiting for the next one."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import holdfast
from holdfast import Deadline, Keep, NoCheckpoint, Refused, Run
from holdfast.format.records import Pin, Process, StepRef
from holdfast.run import history, marks
from holdfast.run.marks import clear_marks, hold, intent, live_intents
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore
from holdfast.testing.clock import FakeClock

from .world import contents, damage, prune, read, save, steps_of


@pytest.fixture
def store() -> Store:
    """Steps 100, 200 and 300."""
    store = MemoryStore()
    save(store, (100, 1), (200, 2), (300, 3))
    return store


# --- pins -------------------------------------------------------------------------------------------------------------


def test_a_pinned_step_outlives_pruning_and_has_a_name(store: Store) -> None:
    Run(store).pin(200, "good")
    assert prune(store) == [100]
    assert (Run(store).find("good").step, read(store, "good")) == (200, 2)
    assert Run(store).find(200).pins == ("good",)


def test_an_unpinned_step_goes_with_the_next_pruning(store: Store) -> None:
    Run(store).pin(200, "good")
    prune(store)
    Run(store).unpin("good")
    assert prune(store) == [200]
    assert steps_of(store) == [300]


def test_a_step_may_have_several_pins_and_goes_with_the_last(store: Store) -> None:
    for name in ("good", "paper"):
        Run(store).pin(100, name)
    Run(store).unpin("good")
    assert 100 not in prune(store)
    Run(store).unpin("paper")
    assert prune(store) == [100]


def test_pinning_twice_is_pinning_once(store: Store) -> None:
    for _ in range(2):
        Run(store).pin(200, "good")
    assert store.list("pins") == ["good.json"]


def test_a_pin_names_one_step_until_it_is_unpinned(store: Store) -> None:
    Run(store).pin(200, "good")
    with pytest.raises(Refused, match="already names step 200"):
        Run(store).pin(300, "good")
    Run(store).unpin("good")
    Run(store).pin(300, "good")
    assert Run(store).find("good").step == 300


@pytest.mark.parametrize("name", ["", "latest", "best", "7", "1st", "a b", "a/b", "../up", "hold-1", "x" * 101, "naïve"])
def test_names_that_could_mean_something_else_are_refused(store: Store, name: str) -> None:
    with pytest.raises(Refused, match="cannot name a pin"):
        Run(store).pin(200, name)
    assert store.list("pins") == []


def test_what_is_not_there_cannot_be_pinned_or_unpinned(store: Store) -> None:
    with pytest.raises(NoCheckpoint, match="no step 150"):
        Run(store).pin(150, "good")
    with pytest.raises(NoCheckpoint, match="no pin good"):
        Run(store).unpin("good")
    with pytest.raises(NoCheckpoint, match="no pin good"):
        Run(store).find("good")


def test_an_abandoned_step_may_be_pinned(store: Store) -> None:
    Run(store).rollback(100)
    save(store, (150, 15))
    Run(store).pin(200, "old")
    prune(store)
    assert read(store, "old") == 2


def test_a_save_whose_pin_is_taken_leaves_no_step() -> None:
    """After an error of a save the step does not exist."""
    store = MemoryStore("a save whose pin is taken")
    holdfast.save(store, {"progress": {"step": 1}}, 1, pin="good")
    with pytest.raises(Refused, match="already names step 1"):
        holdfast.save(store, {"progress": {"step": 2}}, 2, pin="good")
    assert steps_of(store) == [1]


# --- holds ------------------------------------------------------------------------------------------------------------


def test_a_held_step_outlives_pruning_for_as_long_as_it_is_held(store: Store) -> None:
    with Run(store).hold(200) as held:
        assert held.step == 200
        pruned = Run(store).prune(Keep(last=1))
        assert pruned.removed == [100]
        assert read(store, 200) == 2
    assert store.list("pins") == []
    assert prune(store) == [200]


def test_a_hold_that_comes_after_the_verdict_spares_the_step(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = Keep.decide
    holds = []

    def decide_and_then(self: Keep, candidates: Any) -> Any:
        verdict = decide(self, candidates)
        holds.append(Run(store).hold(200))
        holds[-1].__enter__()
        return verdict

    monkeypatch.setattr(Keep, "decide", decide_and_then)
    pruned = Run(store).prune(Keep(last=1))
    assert (pruned.removed, pruned.spared) == ([100], {200: "pinned, or held by a reader"})
    holds[-1].__exit__(None, None, None)
    assert damage(store) == []


def test_a_hold_ends_with_an_error_too(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), Run(store).hold(200):
        raise ZeroDivisionError
    assert store.list("pins") == []


def test_a_hold_of_a_process_that_is_gone_holds_nothing(store: Store) -> None:
    here = marks.this_process()
    gone = Process(host=here.host, boot=here.boot, pid=here.pid, started="long ago")
    pin = Pin(name="hold-1", step=200, attempt=1, created=time.time(), expires=time.time() + 1000, by=gone)
    store.create("pins/hold-1.json", marks.seal(pin))
    assert prune(store) == [100, 200]
    assert store.list("pins") == []


def test_a_hold_from_another_machine_ends_by_the_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(time.time())
    for module in (marks, history):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(marks, "this_process", lambda: Process(host="elsewhere", pid=1))
    held = hold(store, StepRef(200, 1))
    held.__enter__()
    clock.sleep(marks.HOLD_SECONDS - 1)
    assert 200 not in prune(store)
    clock.sleep(2)
    assert 200 in prune(store)
    held.__exit__(None, None, None)


def test_an_intent_from_another_machine_ends_by_the_clock(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(time.time())
    monkeypatch.setattr(marks, "time", clock)
    monkeypatch.setattr(marks, "this_process", lambda: Process(host="elsewhere", pid=1))
    with intent(store, 400, 1, [StepRef(300, 1)]):
        clock.sleep(marks.INTENT_SECONDS - 1)
        assert [i.parents for i in live_intents(store)] == [[StepRef(300, 1)]]
        clock.sleep(2)
        assert live_intents(store) == []


def test_marks_of_the_living_are_not_cleared(store: Store) -> None:
    Run(store).pin(100, "good")
    with Run(store).hold(200), intent(store, 400, 1, []), marks.burying(store, [StepRef(100, 1)]):
        before = [store.list(folder) for folder in ("pins", "intents", "tombstones")]
        assert before[2]
        clear_marks(store)
        assert [store.list(folder) for folder in ("pins", "intents", "tombstones")] == before


# --- notes and the best step ------------------------------------------------------------------------------------------


def test_notes_are_added_to_the_metrics_and_the_later_wins(store: Store) -> None:
    run = Run(store)
    run.note(200, {"loss": 0.5, "by": "eval"})
    run.note(200, {"loss": 0.25})
    assert run.find(200).metrics == {"loss": 0.25, "by": "eval"}
    assert [note.metrics for note in run.find(200).notes] == [{"loss": 0.5, "by": "eval"}, {"loss": 0.25}]
    with pytest.raises(NoCheckpoint):
        run.note(150, {"loss": 1})


def test_the_best_step_is_found_by_the_metric_and_kept(store: Store) -> None:
    run = Run(store)
    for step, loss in ((100, 0.5), (200, 0.1), (300, float("nan"))):
        run.note(step, {"loss": loss, "accuracy": loss})
    assert run.best().step == run.find("best").step == 200
    assert run.best("accuracy", "max").step == 100
    assert run.best("absent") is None
    run.prune(Keep(last=1, best=1, metric="accuracy", mode="max"))
    assert steps_of(store) == [100, 300]


def test_the_best_step_is_of_the_lineage(store: Store) -> None:
    Run(store).note(300, {"loss": 0.0})
    Run(store).note(100, {"loss": 1.0})
    Run(store).rollback(200)
    assert Run(store).best().step == 100


def test_a_run_ranks_by_the_metric_that_its_trainer_named() -> None:
    store = MemoryStore()
    session = save(store)
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.5)):
        session.save(contents(step), step, metrics={"score": score, "loss": score}, best=["score", "max"])
    assert Run(store).best().step == Run(store).find("best").step == 2
    assert Run(store).best("loss").step == 1


@pytest.mark.parametrize("wrong", [[1, 2], {"a": 1}, object()])
def test_a_metric_that_is_no_number_is_refused_by_its_name(store: Store, wrong: object) -> None:
    with pytest.raises(holdfast.HoldfastError, match="the metric loss is a"):
        Run(store).note(200, {"loss": wrong})
    assert store.list("notes") == []


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_waiting_returns_the_step_that_comes(store: Store) -> None:
    waited: list[int] = []
    waiter = threading.Thread(target=lambda: waited.append(Run(store).wait(after=300, timeout=30).step))
    waiter.start()
    save(store, (400, 4))
    waiter.join(30)
    assert waited == [400]


def test_waiting_for_what_is_there_takes_no_time(store: Store) -> None:
    start = time.monotonic()
    assert Run(store).wait().step == 300
    assert Run(store).wait(after=200, timeout=0).step == 300
    assert time.monotonic() - start < 1


def test_waiting_ends_at_the_deadline_and_says_what_for(store: Store) -> None:
    with pytest.raises(Deadline, match=r"no step beyond 300 was committed in .* within 0\.1 s"):
        Run(store).wait(after=300, timeout=0.1)
    with pytest.raises(Deadline, match="no step was committed"):
        Run(MemoryStore()).wait(timeout=0.1)


def test_waiting_may_begin_before_the_run_does() -> None:
    store = MemoryStore()
    waited: list[int] = []
    waiter = threading.Thread(target=lambda: waited.append(Run(store).wait(timeout=30).step))
    waiter.start()
    save(store, (1, 1))
    waiter.join(30)
    assert waited == [1]
