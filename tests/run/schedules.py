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
from typing import Any

import holdfast
from holdfast.store.base import Store
from holdfast.testing.faults import Actor

END = 1 << 30
AT_MOST = 3
"""So many broken schedules are shown."""
Operation = tuple[str, str]
Schedule = tuple[tuple[str, int], ...]
Make = Callable[[Store], Callable[[], Any]]
_CHANGES = {"create", "write", "write_at", "finish", "delete", "delete_dir", "retire"}
_READY = ("ready", "")


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
    broken: list[str] = field(default_factory=list)

    def add(self, schedule: Schedule, outcome: Outcome) -> Outcome:
        self.count += 1
        self.broken += [f"{shown(schedule)}: {line}" for line in outcome.broken]
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

    def run(self, schedule: Schedule) -> Outcome:
        """Bring everybody to the end in this order, and judge."""
        store = self.begin()
        actors = {name: Actor(store, _whole(make)) for name, make in self.actors.items()}
        try:
            lead = {name: _make_ready(actor) for name, actor in actors.items()}
            for name, stop in (*schedule, *((name, END) for name in actors)):
                actors[name].advance(lead[name] + stop)
        finally:
            for actor in actors.values():
                actor.stop()
        broken = [f"{n} raised {a.error!r}" for n, a in actors.items() if a.error and not isinstance(a.error, holdfast.HoldfastError)]
        broken += self.judge(store, actors)
        return Outcome(broken, {name: actor.operations[lead[name] :] for name, actor in actors.items()})

    def try_all(self, schedules: Iterable[Schedule]) -> Findings:
        """Run these schedules; stops when a few were broken."""
        found = Findings()
        for schedule in schedules:
            found.add(schedule, self.run(schedule))
            if len(found.broken) >= AT_MOST:
                break
        return found

    def explore(self, one: str, other: str) -> Findings:
        """Every schedule that switches at most twice: `one` to any point, `other` to any point, `one` on, `other` on."""
        found = Findings()
        for i in itertools.count():
            whole: Schedule = ((one, i), (other, END), (one, END))
            outcome = found.add(whole, self.run(whole))
            following = outcome.logs[one][i : i + 1]
            rest: list[Operation] | None = None
            for j in range(len(outcome.logs[other])):
                is_later = i + 1 <= len(outcome.logs[one]) and not sees(following, outcome.logs[other][:j])
                is_earlier = rest is not None and not sees([outcome.logs[other][j - 1]], rest)
                if is_later or is_earlier:
                    rest = rest if is_earlier else None
                    continue
                switched: Schedule = ((one, i), (other, j), (one, END), (other, END))
                rest = found.add(switched, self.run(switched)).logs[one][i:]
                if len(found.broken) >= AT_MOST:
                    return found
            if not following:
                return found
        raise AssertionError("unreachable")

    def triples(self, one: str, other: str, third: str) -> Iterator[Schedule]:
        """The first to any point, the second to any point, the third wholly, the second on, the first on."""
        lengths = {name: len(self.run(((name, END),)).logs[name]) for name in (one, other)}
        for i, j in itertools.product(range(lengths[one]), range(lengths[other])):
            yield ((one, i), (other, j), (third, END), (other, END), (one, END))


def sample(schedules: Iterator[Schedule], count: int, seed: int = 1) -> list[Schedule]:
    """So many of the schedules, chosen by `seed`; all where HOLDFAST_SOAK is set."""
    every = list(schedules)
    return every if len(every) <= count or os.environ.get("HOLDFAST_SOAK") else random.Random(seed).sample(every, count)


def sees(some: Iterable[Operation], others: Iterable[Operation]) -> bool:
    """Whether the order of the first and the second operations can matter."""
    return any(_meet(*a, *b) or _meet(*b, *a) for a in some for b in others)


def _meet(change: str, path: str, other: str, other_path: str) -> bool:
    if change not in _CHANGES:
        return False
    if path == other_path or (change == "delete_dir" and other_path.startswith(f"{path}/")):
        return True
    is_name = change not in ("write_at", "finish")
    return other == "list" and is_name and (not other_path or path.startswith(f"{other_path}/"))


def shown(schedule: Schedule) -> str:
    return ", ".join(f"{name} to {'its end' if stop >= END else stop}" for name, stop in schedule)


def _make_ready(actor: Actor) -> int:
    """Let an actor make ready; returns how many operations that took."""
    actor.advance(0)
    while not actor.is_done and _READY not in actor.operations:
        actor.advance(len(actor.operations) + 1)
    return len(actor.operations)


def _whole(make: Make) -> Callable[[Store], Any]:
    def do(store: Store) -> Any:
        act = make(store)
        store._before(*_READY)  # type: ignore[attr-defined]
        return act()

    return do
