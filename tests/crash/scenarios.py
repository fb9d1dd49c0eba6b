"""Scenarios: what a program does with runs, recorded call by call; each is a short use of the public interface.

A scenario sets the stage without being recorded, and then does what the crash is to interrupt. Recording is done by a
process of its own (`python -m ...scenarios TARGET`), for one that has crashed is gone, and the library asks for that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import holdfast
from holdfast.api import state_contents
from holdfast.format.codec import ZSTD, Codec, planes
from holdfast.run.coder import Work
from holdfast.run.contents import TensorItem
from holdfast.run.session import session_of
from holdfast.state import State
from holdfast.store import posix
from holdfast.store.locate import open_store

from .recorder import Recorder, Recording
from .truth import Facts, Version, Window, an_optimizer, between, contents

RUN = "run"


class Stage:
    """Runs below one root, and what has been announced of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.facts: dict[str, Facts] = {}
        self.recorder: Recorder | None = None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """What is done inside may be interrupted by a crash."""
        with Recorder(self.root, posix) as self.recorder:
            self._announce("begin", {})
            yield

    @contextlib.contextmanager
    def _doing(self, label: str, run: str, after: Facts) -> Iterator[None]:
        before = self.facts.get(run, Facts())
        self.facts.setdefault(run, before)
        self._announce(label, {run: between(before, after)})
        yield
        self.facts[run] = after
        self._announce(f"{label}: done", {})

    def _announce(self, label: str, under_way: dict[str, Window]) -> None:
        if self.recorder is not None:
            settled = {run: between(facts, facts) for run, facts in self.facts.items()}
            self.recorder.announce(label, settled | under_way)

    def open(self, run: str = RUN) -> holdfast.Run:
        return holdfast.Run(self.root / run)

    def save(self, step: int, content: int, run: str = RUN, *, optimizer: bool = False) -> None:
        with self._doing(f"save {step}", run, self.facts.get(run, Facts()).saved(Version(step, content))):
            holdfast.save(self.root / run, contents(content) | (an_optimizer() if optimizer else {}), step)

    def save_coded(self, step: int, content: int, codec: Codec, run: str = RUN) -> None:
        """A save with every entry coded, however small."""
        with self._doing(f"save {step} coded", run, self.facts.get(run, Facts()).saved(Version(step, content))):
            made, kind = state_contents(State.of(contents(content)), None)
            session = session_of(open_store(self.root / run), {}, step)
            session.save(made, step, kind=kind, coding=EveryEntry(codec))

    def step(self, checkpointer: holdfast.Checkpointer, state: dict[str, Any], step: int, content: int) -> None:
        """A step of a training job that saves each step and keeps one."""
        state.update(contents(content))
        with self._doing(f"step {step}", RUN, self.facts[RUN].saved(Version(step, content)).pruned(1)):
            checkpointer.step(step)

    def prune(self, last: int, run: str = RUN, *, recycle: bool = False, weights: int | None = None) -> None:
        with self._doing(f"prune to {last}", run, self.facts[run].pruned(last)):
            self.open(run).prune(holdfast.Keep(last=last, weights=weights), recycle=recycle)

    def rollback(self, step: int, run: str = RUN) -> None:
        with self._doing(f"rollback to {step}", run, self.facts[run].rolled_back(step)):
            self.open(run).rollback(step)

    def pin(self, step: int, name: str, run: str = RUN) -> None:
        with self._doing(f"pin {step}", run, self.facts[run].pinned(name, step)):
            self.open(run).pin(step, name)

    def unpin(self, name: str, run: str = RUN) -> None:
        with self._doing(f"unpin {name}", run, self.facts[run].unpinned(name)):
            self.open(run).unpin(name)

    def note(self, step: int, name: str, value: float, run: str = RUN) -> None:
        with self._doing(f"note on {step}", run, self.facts[run].noted(step, name, value)):
            self.open(run).note(step, {name: value})

    def copy(self, step: int, target: str, run: str = RUN) -> None:
        version = next(v for v in self.facts[run].lineage if v.step == step)
        with self._doing(f"copy {step}", target, self.facts.get(target, Facts()).saved(version)):
            self.open(run).copy(step, self.root / target)

    def save_that_fails(self, step: int, content: int, after_bytes: int, run: str = RUN) -> None:
        """A save that finds the disk full once it has written `after_bytes`."""
        with self._doing(f"save {step}, which fails", run, self.facts.get(run, Facts())), full_disk(after_bytes):
            try:
                holdfast.save(self.root / run, contents(content), step)
            except holdfast.HoldfastError:
                return
            raise AssertionError("the disk was full and the save did not fail")

    def save_whose_commit_fails(self, step: int, content: int, times: int, run: str = RUN) -> None:
        """A save whose commit record got its name, but the fsync of that name failed: it may be there or not.

        The fsyncs after it fail as well, until so many have failed.
        """
        after = self.facts[run].saved(Version(step, content))
        self._announce(f"save {step}, whose commit fails", {run: between(self.facts[run], after)})
        with failing_fsync("commit.json", times):
            try:
                holdfast.save(self.root / run, contents(content), step)
            except holdfast.HoldfastError:
                return
            raise AssertionError("an fsync failed and the save did not")


@contextlib.contextmanager
def failing_fsync(name: str, times: int) -> Iterator[None]:
    """Once a file has got this name, the next `times` fsyncs fail with EIO."""
    real_link, real_fsync, left = posix.link, posix.fsync, 0

    def link(source: str, target: str) -> None:
        nonlocal left
        real_link(source, target)
        left = times if os.path.basename(target) == name else left

    def fsync(fd: int) -> None:
        nonlocal left
        if left:
            left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(fd)

    posix.link, posix.fsync = link, fsync
    try:
        yield
    finally:
        posix.link, posix.fsync = real_link, real_fsync


class EveryEntry:
    """Gives every entry the same codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def choose(self, items: Sequence[TensorItem], roles: Mapping[str, str], is_for_ever: bool) -> list[Codec]:
        return [self._codec] * len(items)

    def learn(self, work: Work) -> None:
        pass

    def look(self, items: Sequence[TensorItem]) -> None:
        pass


@contextlib.contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Every write fails with ENOSPC once `after_bytes` were written."""
    left, real = after_bytes, posix.pwrite

    def pwrite(fd: int, data: memoryview | bytes, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    posix.pwrite = pwrite
    try:
        yield
    finally:
        posix.pwrite = real


# The scenarios. Contents of one hundred share half of their tensors.


def first_save_of_a_new_run(stage: Stage) -> None:
    with stage.recorded():
        stage.save(1, 101)


def save_after_another(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.save(2, 201)


def save_that_refers_to_unchanged_tensors(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.save(2, 102)


def save_coded_over_recycled_files(stage: Stage) -> None:
    """Shorter than what lies there, and with a header that is written last."""
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    stage.prune(1, recycle=True)
    with stage.recorded():
        stage.save_coded(4, 400, ZSTD)
        stage.save_coded(5, 401, planes(4))


def pin_a_coded_step(stage: Stage) -> None:
    stage.save_coded(1, 101, planes(4))
    stage.save_coded(2, 102, planes(4))
    with stage.recorded():
        stage.pin(1, "kept")
        stage.prune(1)


def prune_to_the_last(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    with stage.recorded():
        stage.prune(1)


def prune_steps_that_are_referred_to(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 + step)
    with stage.recorded():
        stage.prune(1)


def prune_and_recycle(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    with stage.recorded():
        stage.prune(1, recycle=True)


def save_over_recycled_files(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    stage.prune(1, recycle=True)
    with stage.recorded():
        stage.save(4, 400)


def prune_then_save_over_what_it_freed(stage: Stage) -> None:
    for step in (1, 2):
        stage.save(step, 100 * step)
    with stage.recorded():
        stage.prune(1, recycle=True)
        stage.save(3, 300)


def rollback_then_save(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 + step)
    with stage.recorded():
        stage.rollback(2)
        stage.save(3, 113)


def rollback_then_prune_the_abandoned(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    stage.rollback(1)
    stage.save(2, 250)
    with stage.recorded():
        stage.prune(1, recycle=True)
        stage.save(4, 400)


def pin_prune_unpin(stage: Stage) -> None:
    for step in (1, 2):
        stage.save(step, 100 * step)
    with stage.recorded():
        stage.pin(1, "release")
        stage.prune(1)
        stage.unpin("release")


def pin_a_step_that_refers_to_others(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 + step)
    with stage.recorded():
        stage.pin(2, "release")
        stage.prune(1)


def note_on_a_step(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.note(1, "loss", 0.5)


def copy_into_a_new_run(stage: Stage) -> None:
    for step in (1, 2):
        stage.save(step, 100 + step)
    with stage.recorded():
        stage.copy(2, "copy")


def copy_into_a_run_that_has_steps(stage: Stage) -> None:
    stage.save(2, 102)
    stage.save(1, 301, run="copy")
    with stage.recorded():
        stage.copy(2, "copy")


def save_that_fails_and_cleans_up(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.save_that_fails(2, 201, after_bytes=60_000)
        stage.save(2, 202)


def save_whose_commit_fails(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.save_whose_commit_fails(2, 201, times=1000)


def save_whose_commit_fails_once(stage: Stage) -> None:
    stage.save(1, 101)
    with stage.recorded():
        stage.save_whose_commit_fails(2, 201, times=1)


def checkpointer_that_saves_prunes_and_recycles(stage: Stage) -> None:
    stage.save(1, 100)
    state = contents(100)
    with holdfast.Checkpointer(
        stage.root / RUN, state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=1), on_failure="raise"
    ) as checkpointer:
        checkpointer.resume()
        stage.step(checkpointer, state, 2, 200)
        with stage.recorded():
            stage.step(checkpointer, state, 3, 300)
            stage.step(checkpointer, state, 4, 301)


def prune_to_weights(stage: Stage) -> None:
    for step in (1, 2):
        stage.save(step, 100 * step, optimizer=True)
    with stage.recorded():
        stage.prune(2, weights=1)
        stage.prune(1, recycle=True)


def hold_while_saving(stage: Stage) -> None:
    for step in (1, 2, 3):
        stage.save(step, 100 * step)
    with stage.recorded(), stage.open().hold(1):
        stage.save(4, 400)
        stage.note(4, "loss", 0.25)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    scenario.__name__: scenario
    for scenario in (
        first_save_of_a_new_run,
        save_after_another,
        save_that_refers_to_unchanged_tensors,
        save_coded_over_recycled_files,
        pin_a_coded_step,
        prune_to_the_last,
        prune_steps_that_are_referred_to,
        prune_and_recycle,
        save_over_recycled_files,
        prune_then_save_over_what_it_freed,
        rollback_then_save,
        rollback_then_prune_the_abandoned,
        pin_prune_unpin,
        pin_a_step_that_refers_to_others,
        note_on_a_step,
        copy_into_a_new_run,
        copy_into_a_run_that_has_steps,
        save_that_fails_and_cleans_up,
        save_whose_commit_fails,
        save_whose_commit_fails_once,
        hold_while_saving,
        checkpointer_that_saves_prunes_and_recycles,
        prune_to_weights,
    )
}


def record_all(directory: Path) -> dict[str, Recording]:
    """Play all scenarios in a process of its own, below `directory`; the recording of each.

    Its marks carry a dict of run name to the `Window` that holds from there on.
    """
    target = directory / "recordings.pickle"
    command = [sys.executable, "-m", f"{__package__}.scenarios", str(target)]
    environment = os.environ | {"PYTHONPATH": search_path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, f"recording failed:\n{done.stderr}"
    recorded: dict[str, Recording] = pickle.loads(target.read_bytes())
    return recorded


def search_path() -> str:
    """PYTHONPATH for a process that is to import this package and the library as this one does."""
    above = Path(__file__).resolve().parents[(__package__ or "").count(".") + 1]
    return os.pathsep.join([str(above), *filter(None, sys.path)])


def main() -> None:
    target = Path(sys.argv[1])
    recorded = {}
    for name, play in SCENARIOS.items():
        with tempfile.TemporaryDirectory(dir=target.parent) as root:
            stage = Stage(Path(root))
            play(stage)
            assert stage.recorder is not None
            recorded[name] = stage.recorder.recording
    target.write_bytes(pickle.dumps(recorded))


if __name__ == "__main__":
    main()
