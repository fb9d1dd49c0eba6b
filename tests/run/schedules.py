"""Schedules: in which order the operations of several actors reach one store; and running a scenario under them.

A schedule is a list of (name of an actor, number of its operations at which it stops). Actors that it does not bring to their
end go on to it one after the other. Of schedules that differ only in the order of operations that do not see each other,
such as reads of different files, one is enough.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from holdfast.store.base import Store
from holdfast.testing import faults

END = 1 << 30
Operation = tuple[str, str]
Schedule = tuple[tuple[str, int], ...]
Make = Callable[[Store], Callable[[], Any]]
IS_SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
CHANGES = {"create", "write", "write_at", "finish", "delete", "delete_dir", "retire"}
"""Operations that change a store."""
_READY = ("list", ".ready")


class Actor(Protocol):
    """What a schedule needs of an actor: `holdfast.testing.faults.Actor`, or one in another process."""

    operations: list[Operation]
    result: Any
    error: BaseException | None
    is_done: bool

    def advance(self, to: float = END) -> int: ...

    def stop(self) -> None: ...


@dataclass
class Outcome:
    """What came of one schedule."""

    broken: list[str]
    """One line for each promise that was not kept."""
    logs: dict[str, list[Operation]]
    """What each actor did, from when it was ready."""


@dataclass
class Findings:
    """What came of many."""

    count: int = 0
    broken: dict[str, Schedule] = field(default_factory=dict)
    """What was broken, with the first schedule that broke it."""

    def __str__(self) -> str:
        lines = [f"{line}\n    after {shown(schedule)}" for line, schedule in self.broken.items()]
        return f"{len(lines)} promises were broken in {self.count} orders:\n  " + "\n  ".join(lines)

    def check(self) -> None:
        """Fail the test if a promise was broken."""
        if self.broken:
            pytest.fail(str(self), pytrace=False)

    def add(self, schedule: Schedule, outcome: Outcome) -> Outcome:
        self.count += 1
        for line in outcome.broken:
            self.broken.setdefault(line, schedule)
        return outcome


@dataclass(frozen=True)
class Scenario:
    """Actors on copies of one store.

    An actor gets a store object of its own, makes ready (opens a session, looks at the run) and returns what it then does; only
    that is interleaved.
    """

    begin: Callable[[], Store]
    """A fresh copy of the store, as it is before anybody acts."""
    actors: Mapping[str, Make]
    judge: Callable[[Store, Mapping[str, Actor]], list[str]]
    """One line for each promise that was broken, once all have ended."""
    hire: Callable[[Store, str, Make], Actor] = lambda store, name, make: faults.Actor(store, in_two_parts(make))
    leads: dict[str, int] = field(default_factory=dict)
    """How many operations it takes each actor to make ready, where that is known already."""

    def run(self, schedule: Schedule) -> Outcome:
        """Bring everybody to the end in this order, and judge."""
        store = self.begin()
        actors = {name: self.hire(store, name, make) for name, make in self.actors.items()}
        try:
            for name, actor in actors.items():
                self.leads[name] = _make_ready(actor, self.leads.get(name, 0))
            for name, stop in (*schedule, *((name, END) for name in actors)):
                actors[name].advance(self.leads[name] + stop)
        finally:
            for actor in actors.values():
                actor.stop()
        logs = {name: actor.operations[self.leads[name] :] for name, actor in actors.items()}
        return Outcome(self.judge(store, actors), logs)

    def try_all(self, schedules: Iterable[Schedule]) -> Findings:
        """Run these schedules."""
        found = Findings()
        for schedule in schedules:
            found.add(schedule, self.run(schedule))
        return found

    def explore(self, one: str, other: str, at_most: int = 110, seed: int = 1) -> Findings:
        """Every schedule of this form: `one` to any point, `other` to any point, `one` to its end, `other` to its end.

        Args:
            at_most: with more than so many, a sample by `seed`; all where HOLDFAST_SOAK is set.
        """
        found = Findings()
        points = list(range(self.length(one) + 1))
        random.Random(seed).shuffle(points)
        for i in points:
            for _ in self._from(i, one, other, found):
                if found.count >= at_most and not IS_SOAK:
                    return found
        return found

    def _from(self, i: int, one: str, other: str, found: Findings) -> Iterator[None]:
        whole: Schedule = ((one, i), (other, END), (one, END))
        outcome = found.add(whole, self.run(whole))
        yield
        following, log = outcome.logs[one][i : i + 1], outcome.logs[other]
        rest: list[Operation] | None = None
        for j in range(len(log)):
            is_as_one_later = bool(following) and not sees(following, log[:j])
            is_as_other_earlier = rest is not None and not sees([log[j - 1]], rest)
            if is_as_one_later or is_as_other_earlier:
                rest = rest if is_as_other_earlier else None
                continue
            switched: Schedule = ((one, i), (other, j), (one, END), (other, END))
            rest = found.add(switched, self.run(switched)).logs[one][i:]
            yield

    def length(self, name: str) -> int:
        """How many operations an actor does when nobody comes between."""
        return len(self.run(((name, END),)).logs[name])

    def double_switches(self, one: str, other: str) -> Iterator[Schedule]:
        """What `explore` runs, without leaving any out."""
        for i, j in itertools.product(range(self.length(one) + 1), range(self.length(other) + 1)):
            yield ((one, i), (other, j), (one, END), (other, END))

    def triples(self, one: str, other: str, third: str) -> Iterator[Schedule]:
        """The first to any point, the second to any point, the third wholly, the second on, the first on."""
        for i, j in itertools.product(range(self.length(one)), range(self.length(other))):
            yield ((one, i), (other, j), (third, END), (other, END), (one, END))


def sample(schedules: Iterator[Schedule], count: int, seed: int = 1) -> list[Schedule]:
    """So many of the schedules, chosen by `seed`; all where HOLDFAST_SOAK is set."""
    every = list(schedules)
    return every if len(every) <= count or IS_SOAK else random.Random(seed).sample(every, count)


def sees(some: Iterable[Operation], others: Iterable[Operation]) -> bool:
    """Whether the order of the first and the second operations can matter."""
    return any(_meet(*a, *b) or _meet(*b, *a) for a in some for b in others)


def _meet(change: str, path: str, other: str, other_path: str) -> bool:
    if change not in CHANGES:
        return False
    if path == other_path or (change == "delete_dir" and other_path.startswith(f"{path}/")):
        return True
    is_name = change not in ("write_at", "finish")
    return other == "list" and is_name and (not other_path or path.startswith(f"{other_path}/"))


def shown(schedule: Schedule) -> str:
    return ", ".join(f"{name} to {'its end' if stop >= END else stop}" for name, stop in schedule)


def _make_ready(actor: Actor, known: int) -> int:
    """Let an actor make ready, which takes at least `known` operations; returns how many it took."""
    actor.advance(known)
    while not actor.is_done and _READY not in actor.operations:
        actor.advance(len(actor.operations) + 1)
    return len(actor.operations)


def in_two_parts(make: Make) -> Callable[[Store], Any]:
    """What an actor does, with a mark between its parts."""

    def do(store: Store) -> Any:
        act = make(store)
        store.list(_READY[1])
        return act()

    return do
