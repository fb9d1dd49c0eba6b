"""A process is killed after any change that it made, and another goes on: nothing is lost, and nothing is left lying about."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

import holdfast
from holdfast import Keep, Run
from holdfast.run import history, marks
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.testing import faults

from .actors import ACTORS, three_steps
from .peer import Peer, Remote
from .schedules import CHANGES, in_two_parts
from .world import committed, copy_of, files, new_directory, save

KILLED = ["saves", "prunes", "ages", "pins 200", "rolls back to 200", "holds 200 and reads"]
THEN = [
    ("saves", "saves"),
    ("saves", "prunes"),
    ("prunes", "saves"),
    ("prunes", "prunes"),
    ("prunes", "pins 200"),
    ("ages", "ages"),
    ("ages", "pins 200"),
    ("ages", "prunes"),
    ("ages", "saves"),
    ("pins 200", "ages"),
    ("pins 200", "pins 200"),
    ("pins 200", "saves"),
    ("rolls back to 200", "saves"),
    ("rolls back to 200", "prunes"),
]


def killed_everywhere(name: str, patch: pytest.MonkeyPatch) -> Iterator[tuple[int, Store]]:
    """(n, run) for each number n of operations after which the run is another than before, with its actor dead."""
    whole = faults.Actor(copy_of(three_steps()), in_two_parts(ACTORS[name]))
    whole.finish()
    for number, (operation, _) in enumerate(whole.operations, start=1):
        if operation not in CHANGES:
            continue
        store = copy_of(three_steps())
        actor = faults.Actor(store, in_two_parts(ACTORS[name]))
        actor.advance(number)
        actor.stop()
        with patch.context() as others:  # this process lives; the one it played does not
            others.setattr(history, "is_gone", lambda process: True)
            others.setattr(marks, "is_gone", lambda process: True)
            yield number, store


def wrong(store: Store, keeps: set[int]) -> list[str]:
    """Steps that do not load, and steps that are not there."""
    there = committed(store)
    lines = [f"step {step} is {what}" for (step, _), what in there.items() if isinstance(what, str)]
    return lines + [f"step {step} is gone" for step in sorted(keeps - {step for step, _ in there})]


@pytest.mark.parametrize(("name", "then"), THEN)
def test_nothing_is_lost_when_another_goes_on(name: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    for number, store in killed_everywhere(name, monkeypatch):
        newest = Run(store).find("latest").step
        keeps = {newest} if "prunes" in (name, then) else {100, 200, 300}
        try:
            ACTORS[then](store)()
        except holdfast.NoCheckpoint:
            assert name == "prunes", "only a pruned step may be missing"
        except holdfast.Refused:
            assert newest == 400, "only a step that was committed may be refused"
        for line in wrong(store, keeps):
            found.setdefault(line, number)
    assert not found, "\n".join(f"{name} killed after {n} operations, {then}: {line}" for line, n in found.items())


@pytest.mark.parametrize("name", KILLED)
def test_the_next_pruning_removes_what_was_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: dict[str, int] = {}
    for number, store in killed_everywhere(name, monkeypatch):
        Run(store).prune(Keep(last=1))
        for path in files(store):
            if path.startswith(("intents/", "tombstones/", "pins/hold-")) or is_stray(store, path):
                left.setdefault(path, number)
    assert not left, "\n".join(f"{name} killed after {n} operations, pruned: {path} is left" for path, n in left.items())


def is_stray(store: Store, path: str) -> bool:
    """A file in a step's directory that no step needs which pruning keeps: the newest, pinned ones, the ends of lines."""
    steps = Run(store).steps(abandoned=True)
    kept = [s for s in steps if s.pins or s == steps[-1] or s.is_abandoned or s == Run(store).find("latest")]
    needed = set()
    for step in kept:
        with holdfast.open(store, step=step.step) as checkpoint:
            needed |= {step.path, *(file.path for file in checkpoint.index.files())}
    return path.startswith("steps/") and path not in needed and path.rpartition("/")[0] not in needed


def test_ageing_that_was_killed_and_pinning_after_it_keep_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, store in killed_everywhere("ages", monkeypatch):
        is_full = Run(store).find(200).kind == "full"
        Run(store).pin(200, "good")
        assert Run(store).find("good").kind == "full" or not is_full, f"killed after {number} operations"


def test_a_save_whose_process_is_really_killed_is_cleaned_up_by_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    for stop in random.Random(1).sample(range(14, 34), 4):
        store = LocalStore(new_directory(three_steps(), tmp_path_factory.mktemp("run")))
        peer = Peer()
        Remote(peer, store, "saves", ACTORS["saves"]).advance(stop)
        peer.kill()
        Run(store).prune(Keep(last=None))
        assert not wrong(store, {100, 200, 300})
        assert [name for folder in ("intents", "tombstones") for name in store.list(folder)] == []
        assert len(store.list("steps")) == len(Run(store).steps())
        save(store, (500, 5))
        assert committed(store)[500, Run(store).find("latest").attempt] == 5
