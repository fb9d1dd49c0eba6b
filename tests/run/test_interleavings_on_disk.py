"""The same on a directory: two real processes stopped before operations, and readers against files that are written over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Corrupt, NoCheckpoint, Run
from holdfast.policy.keep import Keep
from holdfast.run.session import Session
from holdfast.store import local, posix
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.testing import faults

from .actors import NUMBERS, three_steps
from .peer import Peer, Remote
from .promises import scenario
from .schedules import Actor, Make, Scenario, sample
from .world import LIBRARIES, committed, contents, new_directory, number_in, read

# --- two processes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    both = [Peer(), Peer()]
    yield both
    for peer in both:
        peer.kill()


def directories(tmp_path: Path) -> Callable[[], LocalStore]:
    """A function that gives the run of three steps in a new directory each time."""
    begin, number = three_steps(), itertools.count()

    def fresh() -> LocalStore:
        return LocalStore(new_directory(begin, tmp_path / f"run-{next(number)}"))

    return fresh


@pytest.mark.parametrize(
    ("one", "other", "keeps"),
    [
        ("saves", "prunes", {400}),
        ("removes all", "saves", {400}),
        ("saves and prunes", "reads 200", {400}),
        ("prunes", "prunes less", {300}),
    ],
)
def test_no_order_of_two_processes_breaks_a_promise(
    one: str, other: str, keeps: set[int], peers: list[Peer], tmp_path: Path
) -> None:
    played = dict(zip((one, other), peers, strict=True))
    pair = scenario(one, other, keeps=keeps)
    on_disk = Scenario(
        directories(tmp_path), pair.actors, pair.judge, lambda store, name, make: Remote(played[name], store, name, make)
    )
    found = on_disk.try_all(sample(on_disk.double_switches(one, other), 12))
    found.check()


# --- files that are written over --------------------------------------------------------------------------------------

CALLS = ("open_fd", "pwrite", "truncate", "link", "rename", "unlink", "mkdir", "rmdir")
_here = threading.local()


@pytest.fixture
def stops_at_system_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[Store, str, Make], Actor]:
    """Hires actors that stop before each system call that changes the disk and before each lock. Nothing is synced."""

    def stopping(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            actor = getattr(_here, "actor", None)
            if actor is not None:
                actor.pause(name, str(args[0]))
            return real(*args)

        return call

    for name in CALLS:
        monkeypatch.setattr(posix, name, stopping(name, getattr(posix, name)))
    monkeypatch.setattr(local, "_lock", stopping("lock", local._lock))
    monkeypatch.setattr(posix, "fsync", lambda fd: None)

    def hire(store: Store, name: str, make: Make) -> Actor:
        def do(stepping: Store) -> Any:
            _here.actor = None
            act = make(LocalStore(store.url))
            stepping.list(".ready")
            _here.actor = actor
            return act()

        actor = faults.Actor(store, do)
        return actor

    return hire


def prunes_and_writes_over(store: Store) -> Callable[[], Any]:
    """Prunes all but the newest step, keeps their files, and saves twice over them."""
    session, run = Session(store, LIBRARIES), Run(store)

    def act() -> None:
        run.prune(Keep(last=1), recycle=True)
        session.save(contents(4), 400)
        run.prune(Keep(last=1), recycle=True)
        session.save(contents(5), 500)

    return act


def opens_and_reads(step: int) -> Make:
    def make(store: Store) -> Callable[[], Any]:
        return lambda: read(store, step)

    return make


@pytest.mark.parametrize("step", [100, 200, 300])
def test_a_reader_never_sees_the_bytes_of_a_later_step(
    step: int, tmp_path: Path, stops_at_system_calls: Callable[[Store, str, Make], Actor]
) -> None:
    def judge(store: Store, actors: Mapping[str, Actor]) -> list[str]:
        wrong = [f"step {s} is {what}" for (s, _), what in committed(store).items() if what != {**NUMBERS, 500: 5}[s]]
        reader = actors["reads"]
        if not (reader.result == NUMBERS[step] or isinstance(reader.error, NoCheckpoint)):
            wrong.append(f"the reader of step {step} got {reader.result}, {reader.error!r}")
        writer = actors["writes over"]
        return wrong + ([f"the writer raised {writer.error!r}"] if writer.error else [])

    both = Scenario(
        directories(tmp_path),
        {"reads": opens_and_reads(step), "writes over": prunes_and_writes_over},
        judge,
        stops_at_system_calls,
    )
    orders = (sample(both.double_switches(*names), 25) for names in itertools.permutations(both.actors))
    found = both.try_all(itertools.chain(*orders))
    found.check()


def test_files_are_written_over_when_nobody_reads(tmp_path: Path) -> None:
    """The test above would prove nothing if recycling never happened."""
    store = directories(tmp_path)()
    old = {path.stat().st_ino for path in Path(store.root).rglob("n0000-*")}
    prunes_and_writes_over(store)()
    assert {path.stat().st_ino for path in Path(store.root).rglob("n0000-*")} & old


def test_an_open_checkpoint_is_read_whole_after_its_step_was_pruned_and_its_files_wanted(tmp_path: Path) -> None:
    store = directories(tmp_path)()
    with holdfast.open(store, step=200) as checkpoint:
        prunes_and_writes_over(LocalStore(store.url))()
        assert number_in(checkpoint) == 2


def test_without_locks_a_reader_meets_the_bytes_of_a_later_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_lock", lambda fd, kind: True)
    store = directories(tmp_path)()
    with holdfast.open(store, step=200) as checkpoint:
        prunes_and_writes_over(LocalStore(store.url))()
        with pytest.raises(Corrupt):
            number_in(checkpoint)
