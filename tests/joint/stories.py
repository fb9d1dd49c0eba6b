"""A story of one job: all ranks save step 1; then, under a fault, step 2; then step 3 without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import pool
from ranks.pools import Pool

import holdfast
from holdfast.store.local import LocalStore

from .breaking import Broken, Fault, board_gone_from, dying_at
from .outcomes import Outcome, judge_story, meet, tried
from .states import held

RUN = "run"
START_SECONDS = 30.0
"""Deadline of the saves that nothing disturbs."""


@dataclass(frozen=True)
class Breakage:
    """What is wrong with one rank in the save of step 2."""

    faults: tuple[Fault, ...] = ()
    """Of its store."""
    dies_at: int | None = None
    """Killed before the system call of this number."""
    board_gone_from: int | None = None
    is_absent: bool = False
    """It does not call."""
    late_seconds: float = 0.0

    @contextlib.contextmanager
    def on(self, store: Broken) -> Iterator[None]:
        store.faults[:] = self.faults
        with contextlib.ExitStack() as stack:
            if self.dies_at is not None:
                stack.enter_context(dying_at(self.dies_at))
            if self.board_gone_from is not None:
                stack.enter_context(board_gone_from(self.board_gone_from))
            yield
        store.faults.clear()


def tell(
    directory: Path, breakages: Mapping[int, Breakage], live: Sequence[int] | None, deadline: float
) -> tuple[Outcome | None, Outcome | None]:
    """The story on one rank: the outcomes of steps 2 and 3; None where it took no part."""
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    store = Broken(LocalStore(directory / RUN))
    mine = breakages.get(rank, Breakage())
    first: Outcome | None = None
    holdfast.save(store, held(1, rank), 1, deadline=START_SECONDS)
    state = held(2, rank)
    meet(directory, "begin", rank, everybody)
    with mine.on(store):
        time.sleep(mine.late_seconds)
        if not mine.is_absent:
            first = tried(lambda: holdfast.save(store, state, 2, deadline=deadline))
    if live is not None and rank not in live:
        return first, None
    meet(directory, "end", rank, everybody if live is None else live)
    state = held(3, rank, sharded=live is None)
    return first, tried(lambda: holdfast.save(store, state, 3, ranks=live, deadline=START_SECONDS))


@dataclass(frozen=True)
class Told:
    """What became of a story."""

    first: list[Outcome | None]
    """Of step 2, by rank."""
    wrong: list[str]

    @property
    def is_committed(self) -> bool:
        return any(o is not None and o.step == 2 for o in self.first)

    @property
    def texts(self) -> list[str]:
        return [o.text for o in self.first if o is not None]


class Telling:
    """A story under way in a pool of its own, so that several can be told at a time.

    Args:
        dead: ranks that are killed in it, or may be: step 3 is saved by the others.
    """

    def __init__(
        self,
        directory: Path,
        world: int,
        breakages: Mapping[int, Breakage],
        deadline: float,
        dead: Sequence[int] = (),
        own: bool = True,
    ) -> None:
        directory.mkdir(parents=True)
        self._directory, self._world, self._deadline, self._dead = directory, world, deadline, list(dead)
        self._breakages, self._owns = breakages, own
        self._live = [r for r in range(world) if r not in dead] if dead else None
        self.pool = Pool(world) if own else pool(world)
        self.pool.start(tell, directory, dict(breakages), self._live, deadline)

    def end(self) -> Told:
        try:
            results = self.pool.results(timeout=60, catch=True)
        finally:
            if self._owns:
                self.pool.close(at_once=True)
        taking_part = [r for r in range(self._world) if r not in self._dead]
        if errors := [result for r, result in enumerate(results) if isinstance(result, BaseException) and r in taking_part]:
            raise AssertionError(f"the story could not be told: {errors}")
        first: list[Outcome | None] = [None if isinstance(result, BaseException) else result[0] for result in results]
        then = [results[r][1] for r in taking_part]
        told = [r for r in taking_part if first[r] is not None]
        late = [told.index(r) for r in told if self._breakages.get(r, Breakage()).faults]
        wrong = judge_story(
            self._directory / RUN, self._world, [first[r] for r in told], then, self._deadline, late=late, live=self._live
        )
        return Told(first, wrong)


def story(
    directory: Path, world: int, breakages: Mapping[int, Breakage], deadline: float = 3.0, dead: Sequence[int] = ()
) -> Told:
    """One story, in the pool that tests share."""
    return Telling(directory, world, breakages, deadline, dead, own=False).end()


def stories(making: Sequence[Callable[[], Telling]], at_a_time: int = 6) -> list[Told]:
    """Many stories, some at a time: they wait for deadlines more than they work."""
    told: list[Told] = []
    for start in range(0, len(making), at_a_time):
        under_way = [make() for make in making[start : start + at_a_time]]
        told += [telling.end() for telling in under_way]
    return told


def in_a_new_world(world: int, function: Callable[..., Any], *args: Any, catch: bool = False) -> list[Any]:
    """Run a function on ranks of their own, which end with it: their next calls need not fit those of others."""
    running = Pool(world)
    try:
        return running.run(function, *args, catch=catch)
    finally:
        running.close(at_once=True)


def calls_of(directory: Path, world: int, rank: int) -> list[list[Any]]:
    """What a rank asks of its store, of the disk and of the board while it saves step 2 and nothing is wrong."""
    result: list[list[Any]] = pool(world).run(_count, directory, rank)[rank]
    return result


def _count(directory: Path, chosen: int) -> list[list[Any]] | None:
    from holdfast.ranks import TorchBoard
    from holdfast.store import posix

    from .breaking import BOARD_CALLS, CHANGES, before_each

    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    store = Broken(LocalStore(directory / RUN))
    holdfast.save(store, held(1, rank), 1, deadline=START_SECONDS)
    state = held(2, rank)
    meet(directory, "begin", rank, everybody)
    store.calls.clear()
    with before_each(posix, CHANGES, lambda i: None) as changes, before_each(TorchBoard, BOARD_CALLS, lambda i: None) as asked:
        holdfast.save(store, state, 2, deadline=START_SECONDS)
    return [store.calls, changes, asked] if rank == chosen else None
