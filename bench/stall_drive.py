"""The driver of `bench.stall`: gives each method its turn in each round, and keeps every value.

Every method that does not stall keeps a copy of the state, so that each is in a process of its own, started anew for its turn and
alone; the order is shuffled in each round. In its turn a method makes its unmeasured first saves, then runs each loop, then
is measured for memory, and at last begins two saves that overlap.
"""

import contextlib
import gc
import multiprocessing
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench import measure
from bench.channel import Failed, hear
from bench.drive import Result
from bench.stall_methods import Overlapping
from bench.stall_worker import main as work
from bench.state import Segment


@dataclass(frozen=True)
class Plan:
    """What to run."""

    methods: Mapping[str, type[Overlapping]]
    loops: tuple[str, ...]
    rounds: int
    size: str
    seconds: float
    """Of each loop in each turn, about."""
    directory: Path
    seed: int = 20
    timeout_seconds: float = 600.0


@dataclass
class Measured(Result):
    """A result whose values are, for each round, the median of the saves in it; columns are `LOOP.COLUMN`."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    """Every value of every save by column, in the order of measuring."""
    overlap_failure: str | None = None
    """Why two overlapping saves could not be made and loaded; what was measured before stands."""

    def add_samples(self, loop: str, samples: dict[str, list[float]]) -> None:
        for column, values in samples.items():
            name = f"{loop}.{column}"
            self.values.setdefault(name, []).append(median(values))
            self.samples.setdefault(name, []).extend(values)

    def pooled(self, column: str) -> list[float]:
        """The samples of one column over all loops."""
        return [value for name, values in self.samples.items() if name.endswith(f".{column}") for value in values]


class Worker:
    """A method's process, seen from the driver."""

    def __init__(self, key: str, plan: Plan, segment: Segment) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._channel, theirs = spawn.Pipe()
        self._timeout_seconds = plan.timeout_seconds
        arguments = (theirs, plan.methods[key], plan.size, segment, plan.directory / key, plan.directory / f"{key}.log")
        self._process = spawn.Process(target=work, args=arguments)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        hear(self._channel, "start", self._timeout_seconds)

    def ask(self, command: str, **options: Any) -> Any:
        self._channel.send((command, options))
        return hear(self._channel, command, self._timeout_seconds)

    def end(self) -> None:
        """Ends it, and the processes that its library has left."""
        try:
            left = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            left = []
        self._channel.close()
        self._process.join(timeout=20)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Driver:
    """Holds the results as they grow."""

    def __init__(self, plan: Plan, segment: Segment, report: Callable[[str], None]) -> None:
        self.results = {key: Measured(key, method.title, method.package == "holdfast") for key, method in plan.methods.items()}
        self._plan, self._segment, self._report = plan, segment, report

    def run(self) -> None:
        """All rounds. What fails is noted in its result and not asked again."""
        order = random.Random(self._plan.seed)
        for number in range(1, self._plan.rounds + 1):
            turns = list(self._plan.methods)
            order.shuffle(turns)
            for key in turns:
                if self.results[key].failure is None:
                    self._report(f"round {number} of {self._plan.rounds}: {key}")
                    self._turn(key)

    def _turn(self, key: str) -> None:
        result = self.results[key]
        worker = Worker(key, self._plan, self._segment)
        try:
            self._measure(worker, result)
        except (Failed, OSError) as error:
            result.failure = self._reason(error)
            self._report(f"{key} is out: {result.failure}")
        finally:
            worker.end()
            measure.remove(self._plan.directory / key)

    def _measure(self, worker: Worker, result: Measured) -> None:
        worker.wait_until_ready()
        gc.collect()
        at_start_bytes = measure.tree_memory(worker.pid)
        worker.ask("warm_up")
        for loop in self._plan.loops:
            found = worker.ask("loop", name=loop, seconds=self._plan.seconds)
            result.add_samples(loop, found["samples"])
            counts = {column: found[column] for column in ("wrong", "updates", "stored_bytes")}
            result.add({f"{loop}.{column}": value for column, value in counts.items()})
            self._report(f"  {loop}: " + ", ".join(shown(loop, column, result) for column in ("blocked", "lost", "durable")))
        with measure.PeakMemory(worker.pid) as saving:
            worker.ask("save_once")
        kept = max(0, saving.before_bytes - at_start_bytes)
        result.add({"save_extra_bytes": saving.extra_bytes, "kept_bytes": kept})
        try:
            result.add({f"overlap.{column}": value for column, value in worker.ask("overlap").items()})
        except Failed as error:
            result.overlap_failure = self._reason(error)
            self._report(f"  {result.overlap_failure}")
            return
        worker.ask("close")

    def _reason(self, error: Exception) -> str:
        """Without the place on this machine."""
        return str(error).replace(f"{self._plan.directory}/", "")


def shown(loop: str, column: str, result: Measured) -> str:
    return f"{column} {result.values[f'{loop}.{column}'][-1]:.3f} s"
