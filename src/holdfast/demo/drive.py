"""Starts training processes, kills them with SIGKILL, and starts them again.

A kill is aimed at an instant: one kind falls anywhere in training, the other waits until the directory of a new step
exists without its commit record, which is the inside of a save. Where a kill really fell is read from the run
afterwards, when the process is dead and nothing moves.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import holdfast
from holdfast.demo.job import Job
from holdfast.demo.journal import Reader, Story
from holdfast.errors import HoldfastError

Say = Callable[[str], None]

LOOK_SECONDS = 0.0005
"""Between two looks for a save in progress: one takes some tens of milliseconds."""

LAST_LINES = 50
"""Of a log, when training fails: torchrun's own account comes after what its ranks said."""


class TrainingFailed(HoldfastError):
    """A training process ended by itself, and not well. The end of its standard error is in the message."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train and how often to kill it."""

    steps: int
    kills: int
    every: int
    """Steps between saves."""
    seed: int


@dataclass(frozen=True, slots=True)
class Aim:
    """When to kill."""

    after_step: int
    inside_save: bool
    """Wait for a save in progress."""
    delay_seconds: float
    """From then to the kill."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Where a kill fell."""

    step: int
    """The last step that was done."""
    time: float
    """Seconds since the epoch."""
    cut_save: int | None
    """The step whose save was in progress: its directory was there, its commit record was not."""
    committed: int
    """The newest committed step at that time; 0 where there was none."""

    @property
    def place(self) -> str:
        return "while training" if self.cut_save is None else f"inside the save of step {self.cut_save}"


@dataclass(frozen=True, slots=True)
class Storm:
    """An interrupted run, from its first start to its end."""

    story: Story
    kills: list[Kill]


def aims(plan: Plan) -> list[Aim]:
    """Spread the kills over the run, every other one inside a save."""
    dice = random.Random(plan.seed)
    span = 0.9 * plan.steps / max(plan.kills, 1)
    return [
        Aim(
            after_step=int((number + dice.uniform(0.2, 0.9)) * span),
            inside_save=number % 2 == 0,
            delay_seconds=dice.uniform(0, 0.012 if number % 2 == 0 else 0.2),
        )
        for number in range(plan.kills)
    ]


def run_both(plan: Plan, work: Path, say: Say, progress: Say) -> tuple[Story, Storm]:
    """Train from the first step to the last in one process that saves nothing, and the same in a storm beside it.

    Raises:
        TrainingFailed: a process ended by itself before the last step.
    """
    journal = work / "uninterrupted.journal"
    with Trainer(_command(plan, journal), plan, journal, None, progress) as alone:
        storm = run_storm(plan, work / "killed.journal", work / "run", say, progress)
        return alone.finish(), storm


def run_storm(plan: Plan, journal: Path, run: Path, say: Say, progress: Say) -> Storm:
    """Train the same with checkpoints, through as many kills as are planned.

    There are fewer kills than planned when training ended before the last of them.

    Raises:
        TrainingFailed: a process ended by itself before the last step.
    """
    kills: list[Kill] = []
    waiting = aims(plan)
    while True:
        with Trainer([*_command(plan, journal), f"--run={run}"], plan, journal, run, progress) as trainer:
            began = trainer.begin()
            if kills:
                say(f"resumed at step {began}: {kills[-1].step - began} steps lost, to be done again")
            else:
                say(f"started at step {began}, saving every {plan.every} steps")
            kill = trainer.kill(waiting.pop(0)) if waiting else None
            if kill is None:
                return Storm(trainer.finish(), kills)
        kills.append(kill)
        say(f"killed at step {kill.step}, {kill.place}; step {kill.committed} is the newest committed")


def _command(plan: Plan, journal: Path) -> list[str]:
    command = [sys.executable, "-m", "holdfast.demo.train", f"--journal={journal}"]
    return [*command, f"--steps={plan.steps}", f"--every={plan.every}", f"--seed={plan.seed}"]


class Trainer:
    """A training, of one process or of several. Leaving the context kills it if it still runs.

    Args:
        command: what to run. plan: what it was told to do. journal: where it writes. run: where it saves, if it does.
    """

    def __init__(self, command: Sequence[str], plan: Plan, journal: Path, run: Path | None, progress: Say) -> None:
        self._plan = plan
        self._run = run
        self._progress = progress
        self._reader = Reader(journal)
        self._earlier_starts = len(self._reader.read().starts)
        self._earlier_saves = set(_saves(run))
        self._log = journal.with_suffix(".stderr")
        self._job = Job(command, self._log)

    @property
    def story(self) -> Story:
        """All that is in its journal, as of the last look."""
        return self._reader.story

    def begin(self) -> int:
        """Wait for the first step; the step it began at."""
        self._look_until(lambda story: len(story.starts) > self._earlier_starts)
        if len(self._reader.story.starts) == self._earlier_starts:
            raise self._failure()
        self._job.find()
        return self._reader.story.starts[-1][0]

    def kill(self, aim: Aim) -> Kill | None:
        """Send SIGKILL at the aim; None if the process ended before that."""
        self._look_until(lambda story: story.step >= aim.after_step)
        if aim.inside_save:
            patience = self._reader.story.step + 3 * self._plan.every
            self._look_until(lambda story: self._save_in_progress() or story.step >= patience, LOOK_SECONDS)
        time.sleep(aim.delay_seconds)
        if self._job.exit_code() is not None:
            return None
        self._job.kill()
        return Kill(self._reader.read().step, time.time(), self._save_in_progress(), _newest_committed(self._run))

    def finish(self) -> Story:
        """Wait for the end of training.

        Raises:
            TrainingFailed: there is no end in its journal.
        """
        self._look_until(lambda story: False)
        if self._job.wait() != 0 or self._reader.read().digest is None:
            raise self._failure()
        return self._reader.story

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._job.kill()

    def _look_until(self, seen: Callable[[Story], object], pause_seconds: float = 0.01) -> None:
        """Return when the journal shows it, or when the process has ended."""
        while not seen(self._reader.read()) and self._job.exit_code() is None:
            self._progress(f"step {self._reader.story.step} of {self._plan.steps}")
            time.sleep(pause_seconds)
        self._reader.read()

    def _save_in_progress(self) -> int | None:
        """The step of a directory that this process made, without a commit record and newer than all that it committed.

        An older one without a record is not a save: it is being pruned.
        """
        mine = {path: step for path, step in _saves(self._run).items() if path not in self._earlier_saves}
        newest = max((step for path, step in mine.items() if (path / "commit.json").exists()), default=0)
        return next((step for path, step in mine.items() if step > newest), None)

    def _failure(self) -> TrainingFailed:
        last_words = "\n".join(self._log.read_text().splitlines()[-LAST_LINES:])
        return TrainingFailed(f"a training process ended by itself with {self._job.exit_code()}:\n{last_words}")


def _saves(run: Path | None) -> dict[Path, int]:
    """The step directories, and the step that each is named for."""
    if run is None or not (run / "steps").is_dir():
        return {}
    named = ((path, path.name.partition("-")[0]) for path in (run / "steps").iterdir())
    return {path: int(step) for path, step in named if step.isdigit()}


def _newest_committed(run: Path | None) -> int:
    latest = holdfast.Run(run).latest() if run is not None else None
    return latest.step if latest is not None else 0
