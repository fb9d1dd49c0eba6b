"""What only the local store has to get right: direct I/O that is refused, short writes, full disks, order of fsyncs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import NoSpace, Unavailable
from holdfast.store import local, posix
from holdfast.store.base import BLOCK
from holdfast.store.local import LocalStore
from holdfast.testing.conformance import aligned, read_range, write_file

CONTENT = random.Random(1).randbytes(40 * BLOCK + 99)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def failing(
    code: int, when: Callable[..., bool] = lambda *args: True, then: Callable[..., Any] = posix.pwrite
) -> Callable[..., Any]:
    """A system call that fails with `code` when asked to, and else is what it was."""

    def call(*args: Any) -> Any:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return then(*args)

    return call


def is_direct(fd: int, *args: Any) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & posix.DIRECT)


# --- direct I/O -------------------------------------------------------------------------------------------------------


def test_a_filesystem_that_refuses_the_direct_flag_is_written_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl
    refused = []

    def refusing(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_SETFL and argument & posix.DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(fd, command, argument)

    monkeypatch.setattr(local.fcntl, "fcntl", refusing)
    write_file(store, "file", CONTENT)
    assert refused
    assert store.read("file") == CONTENT


def test_a_filesystem_that_takes_the_flag_but_not_the_write_is_written_through_the_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "pwrite", failing(errno.EINVAL, is_direct, posix.pwrite))
    write_file(store, "file", CONTENT)
    assert store.read("file") == CONTENT


def test_threads_that_find_at_once_that_direct_writes_are_refused_all_go_on(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, until_switched = threading.Barrier(2), threading.Event()
    write = posix.pwrite

    def refusing(fd: int, data: Any, offset: int) -> int:
        if is_direct(fd):
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(5)
            if offset:
                until_switched.wait(5)
            raise OSError(errno.EINVAL, "not direct")
        until_switched.set()
        return write(fd, data, offset)

    monkeypatch.setattr(posix, "pwrite", refusing)
    writer = store.write("file", 2 * BLOCK)
    blocks = aligned(CONTENT[: 2 * BLOCK])
    errors: list[BaseException] = []

    def one(start: int) -> None:
        try:
            writer.write(start, blocks[start : start + BLOCK])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(start,)) for start in (0, BLOCK)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    writer.finish(2 * BLOCK)
    assert store.read("file") == CONTENT[: 2 * BLOCK]


def test_an_error_that_is_not_about_direct_writes_is_not_hidden_by_trying_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = store.write("file", BLOCK)
    monkeypatch.setattr(posix, "pwrite", failing(errno.EIO))
    with pytest.raises(Unavailable, match=r"look at the kernel's log"):
        writer.write(0, aligned(b"x"))
    writer.abort()
    assert store.list("") == []


# --- short writes and reads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [BLOCK, 3 * BLOCK, 3 * BLOCK + 17])
def test_a_short_write_is_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    write = posix.pwrite
    monkeypatch.setattr(posix, "pwrite", lambda fd, data, offset: write(fd, data[:most], offset))
    write_file(store, "file", CONTENT)
    store.create("record", CONTENT)
    assert store.read("file") == store.read("record") == CONTENT


def test_a_write_through_the_cache_may_be_shorter_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path / "root", direct=False)
    write = posix.pwrite
    monkeypatch.setattr(posix, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
    write_file(store, "file", CONTENT)
    assert store.read("file") == CONTENT


def test_a_short_read_is_continued(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("file", CONTENT)
    read = os.preadv
    monkeypatch.setattr(local.os, "preadv", lambda fd, targets, offset: read(fd, [targets[0][:1000]], offset))
    got, buffers = read_range(store, "file", 10, 3000, 0, 5000)
    assert (got, b"".join(buffers)) == (8000, CONTENT[10:8010])


# --- create-once ------------------------------------------------------------------------------------------------------


def test_a_link_that_was_made_and_whose_answer_was_lost_is_ours(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = posix.link

    def made_twice(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "retransmitted", target)

    monkeypatch.setattr(posix, "link", made_twice)
    store.create("file", b"ours")
    assert store.read("file") == b"ours"
    assert os.listdir(store.root) == ["file"]


def test_a_create_that_fails_leaves_no_temporary_file(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("folder/first", b"")
    monkeypatch.setattr(posix, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(NoSpace, match="nothing committed was harmed"):
        store.create("folder/file", b"content")
    assert os.listdir(os.path.join(store.root, "folder")) == ["first"]


def test_a_file_that_does_not_fit_is_refused_before_its_first_byte(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "allocate", failing(errno.ENOSPC))
    with pytest.raises(NoSpace):
        store.write("file", BLOCK)
    assert os.listdir(store.root) == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.EACCES, "permissions"), (errno.EROFS, "read-only"), (errno.EMFILE, "ulimit"), (errno.EIO, "kernel")],
)
def test_an_error_of_the_system_says_what_to_do(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    monkeypatch.setattr(posix, "fsync", failing(code))
    with pytest.raises(Unavailable, match=advice):
        store.create("file", b"content")


def test_a_part_of_the_path_that_is_a_file_is_named(store: LocalStore) -> None:
    store.create("file", b"")
    with pytest.raises(Unavailable, match="a part of the path is a file"):
        store.create("file/below", b"")


# --- durability -------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """(call, path) of what changes the disk, in order."""
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real_open, real_sync, real_link = posix.open_fd, posix.fsync, posix.link

    def open_fd(path: str, flags: int, mode: int = 0o644) -> int:
        fd = real_open(path, flags, mode)
        names[fd] = path
        return fd

    monkeypatch.setattr(posix, "open_fd", open_fd)
    monkeypatch.setattr(posix, "fsync", lambda fd: (log.append(("fsync", names[fd])), real_sync(fd))[1])
    monkeypatch.setattr(posix, "link", lambda a, b: (log.append(("link", b)), real_link(a, b))[1])
    return log


def test_a_record_is_on_the_disk_before_its_name_and_its_name_before_the_return(
    store: LocalStore, calls: list[tuple[str, str]], tmp_path: Path
) -> None:
    store.create("steps/1/commit.json", b"record")
    folder = f"{store.root}/steps/1"
    linked = calls.index(("link", f"{folder}/commit.json"))
    assert calls[linked - 1][0] == "fsync"
    assert os.path.basename(calls[linked - 1][1]).startswith(".tmp-")
    assert calls[linked + 1 :] == [("fsync", folder)]
    above = [path for call, path in calls[:linked] if call == "fsync"]
    assert [p for p in above if ".tmp-" not in p] == [str(tmp_path), store.root, f"{store.root}/steps"]


def test_a_record_without_sync_costs_no_fsync_once_its_directory_is_there(
    store: LocalStore, calls: list[tuple[str, str]]
) -> None:
    store.create("pins/one.json", b"record", sync=False)
    calls.clear()
    store.create("pins/two.json", b"record", sync=False)
    assert [call for call, _ in calls] == ["link"]
