"""The driver: asks the methods in turn, round by round, and keeps every value.

Each method lives in a process of its own, so that one library's threads and allocations do not disturb another's, and
only one works at a time. Within a round the order is shuffled, so that what drifts in the machine hits all alike.

Processes stay from round to round: what a library keeps between saves (threads, buffers, plans) is then as in a long
training run. The exception are methods that keep a copy of the whole state: beside the others it would lower the
kernel's limit for dirty pages, which are a share of the free memory, and slow every buffered writer. They are started
anew for each turn and make one unmeasured save and load before the measured ones, as all do in their first turn.
"""

import gc
import multiprocessing
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench import measure
from bench.channel import Failed, hear
from bench.disk import Disk
from bench.methods import Method
from bench.state import SIZES, Segment, TrainingState
from bench.worker import main as work

DISK = "disk"


@dataclass(frozen=True)
class Plan:
    """What to run."""

    methods: Mapping[str, type[Method]]
    rounds: int
    size: str
    directory: Path
    """Where checkpoints go; on the disk that is measured."""
    seed: int = 20
    timeout_seconds: float = 600.0

    @property
    def has_room(self) -> bool:
        """The state is so small that all processes may stay to the end; the memory found then means little."""
        return self.size == "small"


@dataclass
class Result:
    """What one method gave."""

    key: str
    title: str
    is_ours: bool = False
    values: dict[str, list[float]] = field(default_factory=dict)
    """All values by column, a value a round, in the order of the rounds; seconds and bytes."""
    failure: str | None = None

    def add(self, values: dict[str, float]) -> None:
        for column, value in values.items():
            self.values.setdefault(column, []).append(value)


class Worker:
    """A method's process, seen from the driver."""

    def __init__(self, key: str, plan: Plan, segment: Segment, digest: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._channel, theirs = spawn.Pipe()
        self._timeout_seconds = plan.timeout_seconds
        self._process = spawn.Process(
            target=work,
            args=(theirs, plan.methods[key], plan.size, segment, digest, plan.directory / key, plan.directory / f"{key}.log"),
        )
        self._process.start()
        theirs.close()
        self._is_ready = False

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Until the library is imported; raises `Failed` if it cannot be."""
        if not self._is_ready:
            hear(self._channel, "import", self._timeout_seconds)
            self._is_ready = True

    def ask(self, command: str, **options: bool) -> dict[str, float]:
        self.wait_until_ready()
        self._channel.send((command, options))
        values: dict[str, float] = hear(self._channel, command, self._timeout_seconds)
        return values

    def warm_up(self) -> None:
        """The unmeasured first call of each kind."""
        self.ask("save")
        self.ask("load", cold=False)
        self.ask("load_one", cold=False)

    def end(self) -> None:
        self._channel.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


class Driver:
    """Holds the processes, and the results as they grow."""

    def __init__(self, plan: Plan, segment: Segment, report: Callable[[str], None]) -> None:
        self.results = {key: Result(key, method.title, method.package == "holdfast") for key, method in plan.methods.items()}
        self.disk = Result(DISK, "the disk alone")
        self._plan = plan
        self._segment = segment
        self._report = report
        self._digest = self.fill()
        self._workers: dict[str, Worker] = {}
        self._disk = Disk(plan.directory / DISK, segment.nbytes)

    def run(self) -> None:
        """All rounds, then the repetition for memory. What fails is noted in its result and not asked again."""
        try:
            staying = [key for key in self._plan.methods if not self._starts_anew(key)]
            for key in staying:
                self._start(key)
            for key in staying:
                self._guarded(key, self._workers[key].wait_until_ready)
            self._guarded(DISK, self._disk.warm_up)
            order = random.Random(self._plan.seed)
            for number in range(1, self._plan.rounds + 1):
                turns = [DISK, *self._plan.methods]
                order.shuffle(turns)
                for key in turns:
                    self._report(f"round {number} of {self._plan.rounds}: {key}")
                    self._guarded(key, lambda key=key: self._turn(key))  # type: ignore[misc]
            if not self._plan.has_room:
                self._end_all()
            for key in self._plan.methods:
                self._report(f"memory: {key}")
                self._guarded(key, lambda key=key: self._memory(key))  # type: ignore[misc]
        finally:
            self._end_all()
            self._disk.close()

    def fill(self) -> str:
        """Give the shared state its values, and return their digest. A method that failed may have left it half loaded.

        The mapping goes at once: the driver must not count among those who share the memory.
        """
        state = TrainingState(SIZES[self._plan.size], self._segment)
        state.fill()
        digest = state.digest()
        del state
        gc.collect()
        return digest

    def _start(self, key: str) -> Worker:
        self._workers[key] = Worker(key, self._plan, self._segment, self._digest)
        return self._workers[key]

    def _starts_anew(self, key: str) -> bool:
        return self._plan.methods[key].holds_a_copy and not self._plan.has_room

    def _result(self, key: str) -> Result:
        return self.disk if key == DISK else self.results[key]

    def _guarded(self, key: str, part: Callable[[], None]) -> None:
        result = self._result(key)
        if result.failure is not None:
            return
        try:
            part()
        except (Failed, OSError) as error:
            result.failure = str(error).replace(f"{self._plan.directory}/", "")
            self._report(f"{key} is out: {result.failure}")
            self._end(key)
            measure.remove(self._plan.directory / key)
            self.fill()

    def _turn(self, key: str) -> None:
        if key == DISK:
            self.disk.add(self._disk.turn())
            return
        result = self.results[key]
        worker = self._workers.get(key)
        is_first = not result.values
        if worker is None:
            worker = self._start(key)
            is_first = True
        if is_first:
            worker.warm_up()
        result.add(worker.ask("save"))
        result.add(self._loads(worker))
        worker.ask("discard")
        if self._starts_anew(key):
            self._end(key)

    def _loads(self, worker: Worker) -> dict[str, float]:
        """A warm load is one that follows another load; so is the reading of one tensor."""
        can_be_cold = measure.can_drop_caches()
        values = {}
        for command in ("load", "load_one"):
            before = worker.ask(command, cold=can_be_cold)
            values |= worker.ask(command, cold=False)
            if can_be_cold:
                values |= before
        return values

    def _memory(self, key: str) -> None:
        """In a process of its own, alone: shared pages are then counted whole, and readings slow nothing timed."""
        measure.remove(self._plan.directory / key)
        worker = self._workers.get(key) or self._start(key)
        worker.wait_until_ready()
        at_start_bytes = measure.tree_memory(worker.pid)
        worker.warm_up()
        with measure.PeakMemory(worker.pid) as saving:
            worker.ask("save")
        with measure.PeakMemory(worker.pid) as loading:
            worker.ask("load", cold=False)
        self.results[key].add(
            {
                "save_extra_bytes": saving.extra_bytes,
                "load_extra_bytes": loading.extra_bytes,
                "kept_bytes": max(0, saving.before_bytes - at_start_bytes),
            }
        )
        self._end(key)
        measure.remove(self._plan.directory / key)

    def _end(self, key: str) -> None:
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.end()

    def _end_all(self) -> None:
        for key in list(self._workers):
            self._end(key)


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
