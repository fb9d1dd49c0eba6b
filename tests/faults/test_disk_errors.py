"""Disks that fail at any call: a clear error, the old checkpoint intact, nothing left of the new one, and the next save works."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Checkpointer, Every, HoldfastError, Unavailable
from holdfast.errors import NoSpace
from holdfast.store import posix

from .refuse import assert_same, live_state
from .wreck import change, make_state

BIG = 3000
"""Elements of the largest tensor: these saves are small, so that each of their system calls can fail in turn."""
ERRORS = {errno.EIO: "look at the kernel's log", errno.ENOSPC: "free space or quota", errno.EDQUOT: "free space or quota"}


class Failing:
    """Counts the calls of one function of the store, and makes the k-th of them (and, if it `stays`, all after it) fail."""

    def __init__(self, name: str, k: int | None, code: int = errno.EIO, stays: bool = False) -> None:
        self.name, self.k, self.code, self.stays, self.calls = name, k, code, stays, 0
        self.inner = getattr(posix, name)

    def __call__(self, *args: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        if self.k is not None and (number == self.k or (self.stays and number > self.k)):
            if self.name == "close_fd":  # Linux closes the descriptor, whatever close(2) says
                self.inner(*args)
            raise OSError(self.code, os.strerror(self.code))
        return self.inner(*args)


@contextlib.contextmanager
def failing(name: str, k: int | None, code: int = errno.EIO, stays: bool = False) -> Iterator[Failing]:
    fault = Failing(name, k, code, stays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posix, name, fault)
        yield fault


def outcome(work: Callable[[], Any]) -> Unavailable | None:
    """How a save failed, or None."""
    try:
        work()
    except Unavailable as error:
        return error
    return None


class Runs:
    """Copies of a run of one step, and the state after it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, 0
        self.state = make_state(BIG)
        holdfast.save(str(folder / "origin"), self.state, 1)
        self.first = holdfast.load(str(folder / "origin"))
        change(self.state)

    def copy(self) -> Path:
        self.made += 1
        return Path(shutil.copytree(self.folder / "origin", self.folder / f"run{self.made}"))

    def calls(self, name: str) -> int:
        """How often a save of a new process calls a function of the store."""
        with failing(name, None) as counted:
            holdfast.save(str(self.copy()), self.state, 2)
        return counted.calls


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def leftovers(run: Path) -> list[str]:
    """What a failed save may not leave: directories of other steps, temporary files, intents."""
    found = [str(p.relative_to(run)) for p in (run / "steps").iterdir() if not p.name.startswith("0000000001-")]
    found += [str(p.relative_to(run)) for p in run.rglob(".tmp-*")]
    return found + [str(p.relative_to(run)) for p in run.glob("intents/*")]


def works_again(run: Path, runs: Runs, step: int = 2) -> None:
    holdfast.save(str(run), runs.state, step)
    found = holdfast.load(str(run))
    live = live_state(BIG)
    holdfast.restore(str(run), live)
    assert_same(found["model"], runs.state["model"])
    assert_same(found["progress"], runs.state["progress"])
    assert [name for name in leftovers(run) if not name.startswith("steps/")] == []


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("name", ["pwrite", "fsync", "link", "allocate", "truncate", "open_fd", "mkdir"])
def test_a_save_whose_nth_call_fails_leaves_no_trace(name: str, code: int, runs: Runs) -> None:
    refusals = 0
    for k in range(runs.calls(name)):
        run = runs.copy()
        with failing(name, k, code) as fault:
            error = outcome(lambda run=run: holdfast.save(str(run), runs.state, 2))
        assert fault.calls > k
        if error is None:  # it was not needed, or done otherwise
            assert_same(holdfast.load(str(run))["model"], runs.state["model"])
            continue
        refusals += 1
        message = str(error)
        assert str(run) in message, f"call {k}: {message}"
        assert os.strerror(code) in message, f"call {k}: {message}"
        assert ERRORS[code] in message, f"call {k}: {message}"
        assert isinstance(error, NoSpace) == (code != errno.EIO), f"call {k}: {error!r}"
        assert_same(holdfast.load(f"{run}@1"), runs.first)
        if old_or_new(run, runs):  # the commit is there, and nobody knows whether it would survive a power cut
            assert name in ("fsync", "open_fd")  # of the directory that names the commit
            assert "does not exist" not in message
            works_again(run, runs, 3)
            continue
        assert leftovers(run) == [], f"call {k}"
        works_again(run, runs)
    assert refusals


@pytest.mark.parametrize("name", ["pwrite", "fsync", "link"])
def test_a_disk_that_fails_from_the_nth_call_on_harms_nothing_committed(name: str, runs: Runs) -> None:
    for k in range(runs.calls(name)):
        run = runs.copy()
        with failing(name, k, errno.EIO, stays=True):
            with pytest.raises(Unavailable, match=re.escape(str(run))):
                holdfast.save(str(run), runs.state, 2)
            assert_same(holdfast.load(f"{run}@1"), runs.first)
            old_or_new(run, runs)
        old_or_new(run, runs)
        works_again(run, runs, 3)  # a commit of unknown outcome keeps its directory, and its number


def old_or_new(run: Path, runs: Runs) -> bool:
    """A commit whose answer was lost may be there, whole; nothing else may be. Whether it is there."""
    found = holdfast.load(str(run))
    is_new = found["progress"]["epoch"] != runs.first["progress"]["epoch"]
    if is_new:
        assert_same(found["model"], runs.state["model"])
    else:
        assert_same(found, runs.first)
    return is_new


@pytest.mark.parametrize("name", ["unlink", "rmdir", "rename", "close_fd"])
def test_a_save_whose_tidying_fails_is_committed_or_refused(name: str, runs: Runs) -> None:
    """What cannot be removed may stay, but an error means that the step does not exist, and success that it is whole."""
    for k in range(runs.calls(name)):
        run = runs.copy()
        with failing(name, k):
            try:
                holdfast.save(str(run), runs.state, 2)
                is_saved = True
            except HoldfastError:
                is_saved = False
        steps = [s.step for s in holdfast.Run(str(run)).steps()]
        if is_saved or name != "close_fd":  # closing the directory may be where its sync is refused
            assert steps == ([1, 2] if is_saved else [1]), f"call {k}"
        assert_same(holdfast.load(f"{run}@1"), runs.first)
        holdfast.save(str(run), runs.state, 3)
        assert_same(holdfast.load(str(run))["model"], runs.state["model"])


def test_a_commit_is_never_there_without_its_files(runs: Runs) -> None:
    """Whatever is taken back: a process that dies in between must not leave a committed step without its data."""
    for name in ("fsync", "link", "pwrite"):
        for k in range(runs.calls(name)):
            run, seen = runs.copy(), []
            with failing(name, k), pytest.MonkeyPatch.context() as patch:
                inner = posix.unlink

                def unlink(path: str, inner: Any = inner, run: Path = run, seen: list[Path] = seen) -> None:
                    inner(path)
                    seen.extend(
                        p
                        for p in run.glob("steps/*/commit.json")
                        if len(list(p.parent.iterdir())) < 3 and len(list(run.glob("steps/*"))) > 1
                    )

                patch.setattr(posix, "unlink", unlink)
                outcome(lambda run=run: holdfast.save(str(run), runs.state, 2))
            for commit in seen:
                assert "0000000002" not in str(commit), f"call {k} of {name}: {commit} without its files"


# --- short and odd writes ---------------------------------------------------------------------------------------------


def test_writes_that_take_a_part_are_continued(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = posix.pwrite

    def short(fd: int, data: Any, offset: int) -> int:
        half = len(data) // 2
        part = half - half % 4096 if half >= 4096 else max(1, half) if len(data) % 4096 else len(data)
        return inner(fd, data[:part], offset)

    monkeypatch.setattr(posix, "pwrite", short)
    works_again(runs.copy(), runs)


def test_writes_that_take_odd_numbers_of_bytes_are_continued(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a disk does that is nearly full: the part of a block that was taken is written again."""
    inner = posix.pwrite
    seen: set[int] = set()

    def odd(fd: int, data: Any, offset: int) -> int:
        if offset in seen or len(data) <= 4096:
            return inner(fd, data, offset)
        seen.add(offset)
        inner(fd, data, offset)
        return len(data) - 1000

    monkeypatch.setattr(posix, "pwrite", odd)
    works_again(runs.copy(), runs)
    assert seen


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.copy()
    with monkeypatch.context() as patch:
        patch.setattr(posix, "pwrite", lambda fd, data, offset: 0)
        with pytest.raises(Unavailable, match=re.escape(str(run))):
            holdfast.save(str(run), runs.state, 2)
    works_again(run, runs)


def test_a_filesystem_without_allocation_directory_syncs_or_direct_writes_is_used(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, write = posix.fsync, posix.pwrite

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        inner(fd)

    def pwrite(fd: int, data: Any, offset: int) -> int:
        import fcntl

        if posix.DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & posix.DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data, offset)

    monkeypatch.setattr(posix, "fsync", fsync)
    monkeypatch.setattr(posix, "pwrite", pwrite)
    monkeypatch.setattr(posix, "allocate", lambda fd, nbytes: False)
    works_again(runs.copy(), runs)


# --- reading ----------------------------------------------------------------------------------------------------------


def failing_reads(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", preadv)


def test_a_file_that_cannot_be_read_is_named_and_marks_what_was_being_filled(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run, live = runs.copy(), live_state(BIG)
    with monkeypatch.context() as patch:
        failing_reads(patch, errno.EIO)
        with pytest.raises(Unavailable, match=rf"{re.escape(str(run))}/steps/.*n0000-00.*kernel's log"):
            holdfast.load(str(run))
        before = live.digest()
        with pytest.raises(Unavailable):
            holdfast.restore(str(run), live, stage=True)
        assert live.digest() == before
        assert live.touched is None
        with pytest.raises(Unavailable):
            holdfast.restore(str(run), live)
        assert live.touched
    holdfast.restore(str(run), live)
    assert live.touched is None


def test_a_disk_that_does_not_answer_is_no_damage_and_no_reason_to_fall_back(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs.copy()
    holdfast.save(str(run), runs.state, 2)
    with monkeypatch.context() as patch, Checkpointer(str(run), live_state(BIG)) as checkpointer:
        failing_reads(patch, errno.EIO)
        with pytest.raises(Unavailable):
            checkpointer.resume()
    assert len(list((run / "attempts").iterdir())) == 2


def test_reads_that_give_a_part_are_continued(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = os.preadv

    def short(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        first = memoryview(buffers[0]).cast("B")
        return inner(fd, [first[: max(1, len(first) // 3)]], offset)

    run = runs.copy()
    monkeypatch.setattr(os, "preadv", short)
    assert_same(holdfast.load(str(run)), runs.first)


# --- what training sees -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_training_goes_on_and_the_next_step_is_saved(code: int, tmp_path: Path) -> None:
    state = make_state(BIG)
    with Checkpointer(str(tmp_path / "run"), state, save=Every(steps=1)) as checkpointer:
        assert checkpointer.resume() == 0
        assert checkpointer.step(1) is not None
        with failing("fsync", 0, code, stays=True), pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            assert checkpointer.step(2) is None
        handle = checkpointer.step(3)
        assert handle is not None
        assert handle.step == 3
    assert [s.step for s in holdfast.Run(str(tmp_path / "run")).steps()] == [1, 3]


def test_training_stops_if_it_was_asked_to(tmp_path: Path) -> None:
    with Checkpointer(str(tmp_path / "run"), make_state(BIG), save=Every(steps=1), on_failure="raise") as checkpointer:
        checkpointer.resume()
        with failing("fsync", 0, errno.ENOSPC, stays=True), pytest.raises(NoSpace):
            checkpointer.step(1)
        assert checkpointer.save().step == 1


def every_call(function: Callable[[], Any], name: str) -> int:
    with failing(name, None) as counted:
        function()
    return counted.calls


@pytest.mark.parametrize("name", ["unlink", "rename", "fsync", "rmdir", "link"])
def test_pruning_that_fails_at_any_call_harms_no_step_that_is_kept(name: str, runs: Runs) -> None:
    origin = runs.copy()
    for step in (2, 3, 4):
        change(runs.state)
        holdfast.save(str(origin), runs.state, step)
    expected = {step: holdfast.load(f"{origin}@{step}") for step in (1, 2, 3, 4)}
    counted = Path(shutil.copytree(origin, runs.folder / "counted"))
    calls = every_call(lambda: holdfast.Run(str(counted)).prune(holdfast.Keep(last=2), recycle=True), name)
    for k in range(calls):
        run = Path(shutil.copytree(origin, runs.folder / f"pruned{k}"))
        with failing(name, k), contextlib.suppress(HoldfastError):
            holdfast.Run(str(run)).prune(holdfast.Keep(last=2), recycle=True)
        steps = [s.step for s in holdfast.Run(str(run)).steps()]
        assert set(steps) >= {3, 4}
        for step in steps:
            assert_same(holdfast.load(f"{run}@{step}"), expected[step])
        holdfast.Run(str(run)).prune(holdfast.Keep(last=2))
        assert [s.step for s in holdfast.Run(str(run)).steps()] == [3, 4]
        assert len(list((run / "steps").iterdir())) == len(list((counted / "steps").iterdir()))
