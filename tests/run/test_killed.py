"""A process is killed between any two of its operations, and another goes on: nothing is lost, and nothing is left lying about."""

from __future__ import annotations

import random

import pytest

import holdfast
from holdfast import Keep, Run
from holdfast.run import history, marks
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.testing import faults

from .actors import ACTORS, three_steps
from .peer import Peer, Remote
from .schedules import in_two_parts
from .world import committed, copy_of, files, new_directory, save

ALL = {100, 200, 300}
KILLED = ["saves", "prunes", "ages", "pins 200", "rolls back to 200", "holds 200 and reads", "restarts and saves"]
GO_ON = ["ages", "pins 200", "saves", "prunes"]


def killed_at(name: str, operations: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, bool]:
    """A run on which an actor did so many operations and died; and whether it had more to do."""
    store = copy_of(three_steps())
    actor = faults.Actor(store, in_two_parts(ACTORS[name]))
    actor.advance(operations)
    is_cut = not actor.is_done
    actor.stop()
    for module in (history, marks):  # this process lives; the one it played does not
        monkeypatch.setattr(module, "is_gone", lambda process: True)
    return store, is_cut


def wrong(store: Store, keeps: set[int]) -> list[str]:
    there = committed(store)
    lines = [f"step {step} is {what}" for (step, _), what in there.items() if isinstance(what, str)]
    return lines + [f"step {step} is gone" for step in sorted(keeps - {step for step, _ in there})]


@pytest.mark.parametrize("then", GO_ON)
@pytest.mark.parametrize("name", KILLED)
def test_nothing_is_lost_when_another_goes_on(name: str, then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = {300} if "prunes" in (name, then) else ALL
    found: dict[str, int] = {}
    operations, is_cut = 0, True
    while is_cut:
        with monkeypatch.context() as patch:
            store, is_cut = killed_at(name, operations, patch)
            if name == "rolls back to 200" and Run(store).find().step == 200 and then == "prunes":
                keeps = {200}
            try:
                ACTORS[then](store)()
            except holdfast.NoCheckpoint:
                assert name == "prunes", "only a pruned step may be missing"
            except Exception as error:
                found.setdefault(f"{then} raised {error!r}", operations)
            for line in wrong(store, keeps):
                found.setdefault(line, operations)
        operations += 1
    assert not found, "\n".join(f"{name} killed after {n} operations: {line}" for line, n in found.items())


@pytest.mark.parametrize("name", KILLED)
def test_the_next_pruning_removes_what_was_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: dict[str, int] = {}
    operations, is_cut = 0, True
    while is_cut:
        with monkeypatch.context() as patch:
            store, is_cut = killed_at(name, operations, patch)
            Run(store).prune(Keep(last=1))
            survivor = Run(store).find()
            expected = {survivor.path} | {f.path.rpartition("/")[0] for f in needed_by(store)}
            for path in files(store):
                is_mark = path.startswith(("intents/", "tombstones/", "pins/hold-"))
                if is_mark or (path.startswith("steps/") and path.rpartition("/")[0] not in expected):
                    left.setdefault(path, operations)
        operations += 1
    left = {path: n for path, n in left.items() if not is_last_of_a_line(path)}
    assert not left, "\n".join(f"{name} killed after {n} operations, pruned: {path} is left" for path, n in left.items())


def needed_by(store: Store) -> list[holdfast.format.index.FileRow]:
    with holdfast.open(store) as checkpoint:
        return checkpoint.index.files()


def is_last_of_a_line(path: str) -> bool:
    """A step that a rollback abandoned, which pruning keeps."""
    return path.startswith("steps/0000000300-a0001/")


def test_a_save_whose_process_is_really_killed_is_cleaned_up_by_another(tmp_path_factory: pytest.TempPathFactory) -> None:
    for stop in random.Random(1).sample(range(14, 34), 4):
        store = LocalStore(new_directory(three_steps(), tmp_path_factory.mktemp("run")))
        peer = Peer()
        remote = Remote(peer, store, "saves", ACTORS["saves"])
        remote.advance(stop)
        peer.kill()
        Run(store).prune(Keep(last=None))
        assert not wrong(store, ALL)
        assert [name for folder in ("intents", "tombstones") for name in store.list(folder)] == []
        last = Run(store).find()
        assert [name for name in store.list("steps") if "400" in name] == ([] if last.step == 300 else [last.path[6:] + "/"])
        save(store, (500, 5))
        assert committed(store)[500, Run(store).find().attempt] == 5
