"""Disks that are really full, limits that are really reached, directories that really may not be written."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import HoldfastError, Keep, Unavailable
from holdfast.errors import NoSpace
from holdfast.store import posix

from .refuse import assert_same
from .wreck import change, make_state

IS_ROOT = os.geteuid() == 0
MIB = 1 << 20
NOBODY = 65534


# --- a small filesystem -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tmpfs(at: Path, options: str) -> Iterator[Path]:
    if not IS_ROOT:
        pytest.skip("only root can mount a filesystem")
    at.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def parts_of(run: Path) -> set[str]:
    return (
        {p.name for p in (run / "steps").iterdir()}
        | {str(p) for p in run.rglob(".tmp-*")}
        | {str(p) for p in run.glob("intents/*")}
    )


def fill_up(run: Path, state: dict[str, Any]) -> tuple[int, NoSpace]:
    """Save steps that share nothing until one does not fit; returns the last that did."""
    import torch

    for step in range(1, 100):
        with torch.no_grad():
            state["model"].big.add_(1)
        change(state)
        before = parts_of(run) if step > 1 else set()
        try:
            holdfast.save(str(run), state, step)
        except NoSpace as error:
            assert parts_of(run) == before
            return step - 1, error
    raise AssertionError("it never became full")


def test_a_full_disk_is_said_so_and_space_makes_it_work_again(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        run, state = disk / "run", make_state()
        last, error = fill_up(run, state)
        assert last >= 2
        assert str(run) in str(error)
        assert "free space or quota" in str(error)
        assert error.exit_code == 8
        for step in range(1, last + 1):
            holdfast.load(f"{run}@{step}")
        with holdfast.open(str(run)) as checkpoint:
            assert checkpoint.step == last
            assert not checkpoint.verify()
        holdfast.Run(str(run)).prune(Keep(last=1))
        holdfast.save(str(run), state, last + 1)
        assert_same(holdfast.load(str(run))["model"], state["model"])


def test_a_disk_that_has_no_room_for_a_name_is_said_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64m,nr_inodes=24") as disk:
        run, state = disk / "run", make_state(100)
        last, error = fill_up(run, state)
        assert last >= 1
        assert str(run) in str(error)
        assert holdfast.Run(str(run)).latest().step == last  # type: ignore[union-attr]
        holdfast.load(str(run))


def test_every_size_of_a_too_small_disk_leaves_a_run_or_nothing(tmp_path: Path) -> None:
    state = make_state(100)
    sizes = range(8, 96, 8)
    outcomes = []
    for kib in sizes:
        with tmpfs(tmp_path / f"disk{kib}", f"size={kib}k") as disk:
            try:
                holdfast.save(str(disk / "run"), state, 1)
                outcomes.append(True)
                assert_same(holdfast.load(str(disk / "run"))["model"], state["model"])
            except NoSpace as error:
                outcomes.append(False)
                assert str(disk / "run") in str(error)
                with pytest.raises(HoldfastError):
                    holdfast.load(str(disk / "run"))
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {True, False}


def test_a_disk_mounted_read_only_is_said_so_and_can_be_read(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=16m") as disk:
        run, state = disk / "run", make_state(100)
        holdfast.save(str(run), state, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(Unavailable, match=rf"{re.escape(str(run))}.*read-only"):
            holdfast.save(str(run), state, 2)
        assert_same(holdfast.load(str(run))["model"], state["model"])
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        holdfast.save(str(run), state, 2)
        assert holdfast.Run(str(run)).latest().step == 2  # type: ignore[union-attr]


# --- limits -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limit(which: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


def test_a_file_larger_than_the_limit_is_said_so(tmp_path: Path) -> None:
    run, state = tmp_path / "run", make_state()
    holdfast.save(str(run), make_state(100), 1)
    before = parts_of(run)
    with limit(resource.RLIMIT_FSIZE, MIB), pytest.raises(NoSpace, match=rf"{re.escape(str(run))}.*File too large"):
        holdfast.save(str(run), state, 2)
    assert parts_of(run) == before
    assert holdfast.load(str(run))["progress"]["epoch"] == 3
    holdfast.save(str(run), state, 2)
    assert_same(holdfast.load(str(run))["model"], state["model"])


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_a_device_that_is_full_is_said_so(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write to /dev/full fails as on a full disk, and only then: nothing was reserved before."""
    run, state = tmp_path / "run", make_state(100)
    holdfast.save(str(run), state, 1)
    first, before = holdfast.load(str(run)), parts_of(run)
    change(state)
    inner = posix.open_fd

    def open_fd(path: str, flags: int, mode: int = 0o644) -> int:
        is_new = bool(flags & os.O_CREAT) and (path.endswith(suffix) or (suffix == "json" and ".tmp-" in path))
        return inner("/dev/full", os.O_RDWR) if is_new else inner(path, flags, mode)

    with monkeypatch.context() as patch:
        patch.setattr(posix, "open_fd", open_fd)
        patch.setattr(posix, "allocate", lambda fd, nbytes: False)
        with pytest.raises(NoSpace, match=re.escape(str(run))):
            holdfast.save(str(run), state, 2)
    assert parts_of(run) == before
    assert_same(holdfast.load(str(run)), first)
    holdfast.save(str(run), state, 2)


def test_too_many_open_files_is_said_so(tmp_path: Path) -> None:
    run, state = tmp_path / "run", make_state(100)
    holdfast.save(str(run), state, 1)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    with limit(resource.RLIMIT_NOFILE, used), contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            while True:
                stack.enter_context(open(os.devnull))
        for work in (lambda: holdfast.load(str(run)), lambda: holdfast.save(str(run), state, 2)):
            with pytest.raises(Unavailable, match=rf"{re.escape(str(run))}.*ulimit -n"):
                work()
    holdfast.load(str(run))
    holdfast.save(str(run), state, 2)


# --- where nothing can be written -------------------------------------------------------------------------------------


def test_missing_directories_are_made(tmp_path: Path) -> None:
    holdfast.save(str(tmp_path / "a" / "b" / "c" / "run"), make_state(10), 1)
    holdfast.load(str(tmp_path / "a" / "b" / "c" / "run"))


@pytest.mark.parametrize("below", ["run", "run/deep", ""])
def test_a_file_in_the_way_is_said_so(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    path = str(tmp_path / "file" / below) if below else str(tmp_path / "file")
    with pytest.raises(Unavailable, match=rf"{re.escape(str(tmp_path / 'file'))}.*part of the path is a file"):
        holdfast.save(path, make_state(10), 1)
    with pytest.raises(HoldfastError, match=re.escape(str(tmp_path / "file"))):
        holdfast.load(path)
    assert (tmp_path / "file").read_text() == "hello"


def test_a_link_to_nowhere_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone" / "far")
    with pytest.raises(HoldfastError, match=re.escape(str(tmp_path / "run"))):
        holdfast.save(str(tmp_path / "run"), make_state(10), 1)


def test_a_name_that_is_too_long_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="too long"):
        holdfast.save(str(tmp_path / ("x" * 300)), make_state(10), 1)
    with pytest.raises(HoldfastError):
        holdfast.load(str(tmp_path / ("x" * 300)))


def test_a_path_with_a_null_is_an_error_of_ours(tmp_path: Path) -> None:
    for work in (lambda: holdfast.save(f"{tmp_path}/a\x00b", make_state(10), 1), lambda: holdfast.load(f"{tmp_path}/a\x00b")):
        with pytest.raises(HoldfastError):
            work()


def as_nobody(work: Callable[[], Any]) -> str:
    """What `work` raises or returns, in words, in a child that may do what everybody may."""
    if not IS_ROOT:
        return outcome(work)
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(sender, outcome(work).encode())
        finally:
            os._exit(0)
    os.close(sender)
    is_ready = bool(select.select([receiver], [], [], 60)[0])
    text = os.read(receiver, 1 << 16).decode() if is_ready else ""
    os.close(receiver)
    if not is_ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert is_ready, "it hangs"
    return text


def outcome(work: Callable[[], Any]) -> str:
    try:
        return f"done: {work()!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture
def opened() -> Iterator[Path]:
    """A run that everybody may read, and only its owner write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    for step in (1, 2):  # the second save and this load have imported all that the child needs
        holdfast.save(str(folder / "run"), {"a": {"x": step}}, step)
        holdfast.load(str(folder / "run"))
    directories = [p for p in (folder / "run", *(folder / "run").rglob("*")) if p.is_dir()]
    for directory in directories:
        directory.chmod(0o555)
    yield folder / "run"
    for directory in directories:
        directory.chmod(0o755)
    shutil.rmtree(folder)


def test_who_may_only_read_can_load(opened: Path) -> None:
    assert as_nobody(lambda: holdfast.load(str(opened))) == "done: {'a': {'x': 2}}"
    assert as_nobody(lambda: [s.step for s in holdfast.Run(str(opened)).steps()]) == "done: [1, 2]"


def test_who_may_not_write_is_told_where_and_why(opened: Path) -> None:
    for work in (
        lambda: holdfast.save(str(opened), {"a": {"x": 3}}, 3),
        lambda: holdfast.Run(str(opened)).pin(1, "mine"),
        lambda: holdfast.Run(str(opened)).prune(Keep(last=1)),
        lambda: holdfast.Run(str(opened)).rollback(1),
        lambda: holdfast.save(str(opened / "new"), {"a": {"x": 1}}, 1),
    ):
        said = as_nobody(work)
        assert said.startswith("Unavailable"), said
        assert str(opened) in said
        assert "check the permissions" in said
    assert [s.step for s in holdfast.Run(str(opened)).steps()] == [1, 2]


@pytest.mark.parametrize("kind", ["index-*", "commit.json"])
def test_who_may_not_read_is_told_where_and_why(kind: str, opened: Path) -> None:
    path = max(opened.rglob(kind))
    path.chmod(0)
    said = as_nobody(lambda: holdfast.load(str(opened)))
    path.chmod(0o644)
    assert said.startswith("Unavailable"), said
    assert str(path) in said
    assert "check the permissions" in said
