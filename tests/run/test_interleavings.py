"""Saves, prunings, readings, holds, pins and rollbacks, interleaved at every operation on the store.

Two or three processes act on one run. Whatever the order in which their operations arrive: no commit refers to a file that is
gone, no reader sees other bytes than were saved, and what was announced, held, pinned or kept by the policy is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast import runs
from holdfast.run import marks
from holdfast.run import prune as pruning
from holdfast.run import session as sessions
from holdfast.store.base import Store
from holdfast.testing.faults import Fault, Faulty

from .actors import ACTORS
from .promises import scenario
from .schedules import Findings, sample
from .world import contents

PAIRS = [
    ("saves", "prunes", {400}),
    ("prunes", "saves", {400}),
    ("saves", "removes all", {400}),
    ("removes all", "saves", {400}),
    ("saves", "ages", {100, 200, 300, 400}),
    ("ages", "saves", {100, 200, 300, 400}),
    ("saves", "pins 200", {100, 200, 300, 400}),
    ("pins 200", "saves", {100, 200, 300, 400}),
    ("reads 200", "prunes", {300}),
    ("prunes", "reads 200", {300}),
    ("opens 200 and reads later", "prunes", {300}),
    ("prunes", "opens 200 and reads later", {300}),
    ("reads latest", "saves and prunes", {400}),
    ("saves and prunes", "reads latest", {400}),
    ("resumes", "saves and prunes", set()),
    ("saves and prunes", "resumes", set()),
    ("reads 200", "ages", {100, 200, 300}),
    ("ages", "reads 200", {100, 200, 300}),
    ("reads 200", "pins 200", {100, 200, 300}),
    ("pins 200", "reads 200", {100, 200, 300}),
    ("prunes", "prunes less", {300}),
    ("prunes less", "prunes", {300}),
    ("ages", "prunes", {300}),
    ("prunes", "ages", {300}),
    ("ages", "ages too", {100, 200, 300}),
    ("ages", "pins 200", {100, 200, 300}),
    ("pins 200", "ages", {100, 200, 300}),
    ("pins 200", "pins 200 too", {100, 200, 300}),
    ("holds 200 and reads", "prunes", {300}),
    ("prunes", "holds 200 and reads", {300}),
    ("holds 200 and reads", "ages", {100, 200, 300}),
    ("ages", "holds 200 and reads", {100, 200, 300}),
    ("pins 200", "prunes", {300}),
    ("prunes", "pins 200", {300}),
    ("copies 200", "prunes", {300}),
    ("prunes", "copies 200", {300}),
    ("copies 200", "pins 200", {100, 200, 300}),
    ("pins 200", "copies 200", {100, 200, 300}),
    ("rolls back to 200", "prunes", set()),
    ("prunes", "rolls back to 200", set()),
    ("rolls back to 200", "saves", {100, 200, 300}),
    ("saves", "rolls back to 200", {100, 200, 300}),
    ("restarts and saves", "saves something else", {100, 200, 300, 400}),
]
"""One actor, another, and the steps that must survive both whatever the order."""

TWINS = {"ages too": ACTORS["ages"], "pins 200 too": ACTORS["pins 200"], "removes all too": ACTORS["removes all"]}


def ids(pair: tuple[Any, ...]) -> str:
    return ", ".join(name for name in pair if isinstance(name, str))


@pytest.mark.parametrize("pair", PAIRS, ids=ids)
def test_no_order_of_two_actors_breaks_a_promise(pair: tuple[str, str, set[int]]) -> None:
    one, other, keeps = pair
    found = scenario(one, other, keeps=keeps, more=TWINS).explore(one, other)
    found.check()


TRIPLES = [
    ("removes all", "saves", "removes all too", set()),
    ("saves", "removes all", "prunes", set()),
    ("prunes", "saves", "reads 200", {400}),
    ("saves and prunes", "prunes less", "reads latest", {400}),
    ("prunes", "pins 200", "ages", {300}),
]


@pytest.mark.parametrize("triple", TRIPLES, ids=ids)
def test_no_order_of_three_actors_breaks_a_promise(triple: tuple[str, str, str, set[int]]) -> None:
    *names, keeps = triple
    three = scenario(*names, keeps=keeps, more=TWINS)  # type: ignore[arg-type]
    found = three.try_all(sample(three.triples(*names), 100))  # type: ignore[arg-type]
    found.check()


def saves_but_hears_no_answer(store: Store) -> Callable[[], Any]:
    """The commit record arrives, and its answer is lost."""
    session = sessions.Session(Faulty(store, Fault("create", "steps/*/commit.json", is_answer_lost=True)), {})
    return lambda: session.save(contents(4), 400).step


@pytest.mark.parametrize("is_saving_first", [True, False])
def test_a_commit_whose_answer_was_lost_does_not_cost_the_step_before(is_saving_first: bool) -> None:
    names = ["saves but hears no answer", "prunes"]
    pair = scenario(*names, keeps=set(), more={names[0]: saves_but_hears_no_answer})
    found = pair.explore(*(names if is_saving_first else reversed(names)))
    found.check()


# --- the tests bite: without a rule of the protocol some order breaks a promise ---------------------------------------


def explored(one: str, other: str) -> Findings:
    return scenario(one, other, keeps=set()).explore(one, other)


def test_without_tombstones_a_step_goes_that_was_just_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "is_buried", lambda store, ref: False)
    found = explored("prunes", "holds 200 and reads")
    assert any("held, and then" in line for line in found.broken), str(found)


def test_without_intents_a_commit_refers_to_a_file_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "live_intents", lambda store: [])
    found = explored("saves", "removes all")
    assert any("step 400" in line and "n0000" in line for line in found.broken), str(found)


def test_without_holds_a_step_goes_under_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pruning, runs):
        monkeypatch.setattr(module, "live_pins", lambda store: [])
    found = explored("holds 200 and reads", "prunes")
    assert any("held, and then" in line for line in found.broken), str(found)


def test_without_a_second_look_a_save_loses_its_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was undecided at first may be committed by the time its files are swept."""
    look = pruning.History.look
    seen: dict[int, list[Any]] = {}

    def look_once(self: pruning.History) -> Any:
        """The actor's own look, and the first of the removal; the second of the removal is that first one again."""
        looks = seen.setdefault(id(self), [])
        looks.append(look(self) if len(looks) < 2 else looks[-1])
        return looks[-1]

    monkeypatch.setattr(pruning.History, "look", look_once)
    found = explored("saves", "removes all")
    assert found.broken, str(found)
