"""The process in which one method saves beside a training loop: it answers the driver's commands, with values or a reason.

What a checkpoint costs is measured in windows of a loop: some steps with one save, and as many without, in turn. A window
begins at the call, and is long enough for the save to become durable in it. Before each, untimed, every element of
the state changes and the disk is synced.
"""

import contextlib
import gc
import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import xxhash

from bench import measure
from bench.channel import serve
from bench.stall_loops import LOOPS, Trainer, Update
from bench.stall_methods import STRIDE, Declined, Done, Overlapping
from bench.state import SIZES, PrivateSegment, Segment, TrainingState

LONGEST_SECONDS = 30.0
"""Of the window that finds out how many updates a save takes."""
SLACK = 1.25
LEAST_PAIRS = 2

Samples = dict[str, list[float]]


class Watch(threading.Thread):
    """Begins a save, waits beside the loop until it is complete, syncs what the library has not synced; keeps the times."""

    def __init__(self, method: Overlapping, step: int) -> None:
        super().__init__(daemon=True)
        self._method, self._step = method, step
        self._start = time.perf_counter()
        self._done: Done = method.begin(step)
        self.call_seconds = time.perf_counter() - self._start
        self.done_seconds = self.durable_seconds = 0.0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._done()
            self.done_seconds = time.perf_counter() - self._start
            measure.make_durable(self._method.place(self._step))
            self.durable_seconds = time.perf_counter() - self._start
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        """Returns when the save is durable; raises why it failed."""
        while self.is_alive():
            self._method.between()
            self.join(0.01)
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Window:
    """Some steps of a loop, with a save at their beginning or without; seconds."""

    updates: list[Update]
    wall: float
    call: float = 0.0
    done: float = 0.0
    durable: float = 0.0
    others: float = 0.0
    """Cores that other processes kept busy meanwhile."""

    @property
    def waited(self) -> float:
        return sum(update.waited for update in self.updates)


class Session:
    """The commands. Each returns a dict; any exception takes the method out of the comparison."""

    def __init__(self, method: Overlapping, state: TrainingState) -> None:
        self._method, self._state = method, state
        self._step = 0
        self._saved: dict[str, int] = {}

    def warm_up(self) -> None:
        """The first saves, which make plans, buffers, processes, and files that can be written over."""
        for _ in range(self._method.first_saves):
            self.save_once()

    def save_once(self) -> None:
        """One save with an update after it; nothing is timed."""
        self._prepare(saves=True)
        trainer = Trainer(self._state, LOOPS["interval"])
        try:
            watch = self._begin()
            trainer.update(0, self._method.guard)
            watch.finish()
        finally:
            trainer.close()

    def loop(self, name: str, seconds: float) -> dict[str, Any]:
        """Pairs of windows of a loop, with and without a save, for about `seconds`; the last save is loaded and compared.

        Returns:
            `samples`: seconds by column, one for each pair; `wrong`: tensors of the last checkpoint that differ from the
            state at the call; `stored_bytes`; `updates` in a window.
        """
        trainer = Trainer(self._state, LOOPS[name])
        try:
            count = self._count_updates(trainer, LOOPS[name].least_updates)
            having: list[Window] = []
            lacking: list[Window] = []
            start = time.perf_counter()
            while len(having) < LEAST_PAIRS or time.perf_counter() - start < seconds:
                if len(having) % 2:  # which of the two comes first changes, so that what drifts hits both
                    having.append(self._with(trainer, count))
                    lacking.append(self._without(trainer, count))
                else:
                    lacking.append(self._without(trainer, count))
                    having.append(self._with(trainer, count))
        finally:
            trainer.close()
        stored = measure.nbytes_below(self._method.place(self._step))
        return {"samples": compared(having, lacking), "wrong": self._wrong(), "stored_bytes": stored, "updates": count}

    def overlap(self) -> dict[str, int]:
        """Two saves, the second begun before the first is durable, the state changed in between: how many tensors are wrong?

        A library may decline the second; it may not take it and damage the first.
        """
        self._prepare(saves=True)
        trainer = Trainer(self._state, LOOPS["interval"])
        try:
            first = self._begin()
            trainer.update(0, self._method.guard)
            first_step, first_saved = self._step, self._saved
            self._saved = fingerprints(self._state)
            is_overlapping = first.is_alive()
            second = self._second()
            trainer.update(0, self._method.guard)
            first.finish()
            if second is not None:
                second.finish()
        finally:
            trainer.close()
        found = {"is_overlapping": int(is_overlapping), "is_declined": int(second is None)}
        if second is not None:
            found["second_wrong"] = self._wrong()
        self._step, self._saved = first_step, first_saved
        return found | {"first_wrong": self._wrong()}

    def _second(self) -> Watch | None:
        try:
            return self._begin()
        except Declined:
            return None

    def close(self) -> None:
        self._method.close()

    def _prepare(self, saves: bool) -> None:
        if saves:
            self._method.clear()
        self._state.advance()
        if saves:
            self._saved = fingerprints(self._state)
        gc.collect()
        os.sync()

    def _begin(self) -> Watch:
        self._step = (self._step // STRIDE + 1) * STRIDE
        return Watch(self._method, self._step)

    def _count_updates(self, trainer: Trainer, least: int) -> int:
        """How many updates a window needs: those until a save is durable, and a quarter more."""
        self._prepare(saves=True)
        watch, count, start = self._begin(), 0, time.perf_counter()
        while watch.is_alive() and time.perf_counter() - start < LONGEST_SECONDS:
            self._train(trainer, count)
            count += 1
        watch.finish()
        return max(least, math.ceil(SLACK * count) + 1)

    def _train(self, trainer: Trainer, number: int) -> Update:
        """One update of a window with a save, and the work before it."""
        trainer.compute(self._method.between)
        update = trainer.update(number, self._method.guard)
        self._method.passed(self._step + number + 1)
        return update

    def _with(self, trainer: Trainer, count: int) -> Window:
        self._prepare(saves=True)
        start = time.perf_counter()
        watch = self._begin()
        updates = [self._train(trainer, number) for number in range(count)]
        wall = time.perf_counter() - start
        watch.finish()
        return Window(updates, wall, watch.call_seconds, watch.done_seconds, watch.durable_seconds)

    def _without(self, trainer: Trainer, count: int) -> Window:
        self._prepare(saves=False)
        updates = []
        busy, start = others_seconds(), time.perf_counter()
        for number in range(count):
            trainer.compute(nothing)
            updates.append(trainer.update(number, contextlib.nullcontext))
        wall = time.perf_counter() - start
        return Window(updates, wall, others=(others_seconds() - busy) / wall)

    def _wrong(self) -> int:
        """Load the last save into the zeroed state; returns how many tensors differ from what they were at its call."""
        self._state.clear()
        self._method.load_step(self._step)
        found = fingerprints(self._state)
        return sum(found[name] != saved for name, saved in self._saved.items())


def nothing() -> None:
    """What a trainer does for a library that is not there."""


def others_seconds() -> float:
    """Processor seconds that were not idle and not this process's, since the start of the machine."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice - time.process_time()


def fingerprints(state: TrainingState) -> dict[str, int]:
    return {name: xxhash.xxh3_64_intdigest(memoryview(tensor.numpy().reshape(-1))) for name, tensor in state.tensors.items()}


def compared(having: list[Window], lacking: list[Window]) -> Samples:
    """What saves cost, a value for each pair of windows; seconds.

    The usual time of the first update is that of first updates without a save: they change the same tensors. `late` is 1 where
    a save became durable only after its window, so that not all of its cost is in there.
    """
    usual = median(window.updates[0].took for window in lacking)
    passing = median(window.waited for window in lacking)
    samples: Samples = {
        "call": [window.call for window in having],
        "barrier": [window.waited - passing for window in having],
        "extra": [window.updates[0].took - usual for window in having],
        "lost": [window.wall - other.wall for window, other in zip(having, lacking, strict=True)],
        "done": [window.done for window in having],
        "durable": [window.durable for window in having],
        "wall": [window.wall for window in lacking],
        "others": [window.others for window in lacking],
        "late": [float(window.durable > window.wall) for window in having],
    }
    parts = zip(samples["call"], samples["barrier"], samples["extra"], strict=True)
    samples["blocked"] = [sum(values) for values in parts]
    return samples


def main(channel: Connection, method: type[Overlapping], size: str, segment: Segment, directory: Path, log: Path) -> None:
    """Serve `method` until the driver closes the channel. The library's own output goes to `log`."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)

    def make() -> Session:
        state = TrainingState(SIZES[size], PrivateSegment.like(segment) if method.forks else segment)
        state.fill()
        directory.mkdir(parents=True)
        return Session(method(state, directory), state)

    serve(channel, make)
    # Not by returning: threads and processes that a library has left must not keep this one alive.
    os._exit(0)
