"""What only the local store has to get right: direct I/O that is refused, short writes, locks, recycling, full disks."""

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
ROOMY = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


def failing(code: int, when: Callable[..., bool] = lambda *args: True, then: Callable[..., Any] = posix.pwrite) -> Callable[..., Any]:
    """A system call that fails with `code` when asked to, and else is what it was."""

    def call(*args: Any) -> Any:
        if when(*args):
            raise OSError(code, os.strerror(code))
        return then(*args)

    return call


def is_direct(fd: int, *args: Any) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & posix.DIRECT)


def pool(store: LocalStore) -> list[Path]:
    """The files that wait to be written over."""
    folder = Path(store.root) / ".recycle"
    return sorted(folder.iterdir()) if folder.exists() else []


def inode(store: LocalStore, path: str) -> int:
    return (Path(store.root) / path).stat().st_ino


def retired(store: LocalStore, path: str = "old", content: bytes = CONTENT) -> int:
    """Write a file on new blocks and retire it; returns its inode."""
    write_file(store, path, content, recycle=False)
    number = inode(store, path)
    store.retire(path, ROOMY)
    return number


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
    together = threading.Barrier(2)
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

    until_switched = threading.Event()
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


# --- locks ------------------------------------------------------------------------------------------------------------


def test_a_file_with_a_reader_is_removed_instead_of_retired(store: LocalStore) -> None:
    write_file(store, "file", CONTENT)
    reader = store.open("file")
    assert store.retire("file", ROOMY) == len(CONTENT)
    assert pool(store) == []
    write_file(store, "next", bytes(len(CONTENT)))
    target = bytearray(len(CONTENT))
    reader.read_into(0, [memoryview(target)])
    reader.close()
    assert target == CONTENT


def test_readers_share_their_lock(store: LocalStore) -> None:
    write_file(store, "file", CONTENT)
    readers = [store.open("file") for _ in range(3)]
    assert not store.is_unused("file")
    for reader in readers:
        reader.close()
    assert store.is_unused("file")


def test_a_retired_file_that_somebody_still_reads_is_not_written_over(store: LocalStore) -> None:
    number = retired(store)
    fd = os.open(pool(store)[0], os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        write_file(store, "new", bytes(len(CONTENT)))
        assert inode(store, "new") != number
        assert os.pread(fd, len(CONTENT), 0) == CONTENT
    finally:
        os.close(fd)
    write_file(store, "newer", CONTENT)
    assert inode(store, "newer") == number


def test_a_file_that_is_being_written_cannot_be_opened(store: LocalStore) -> None:
    retired(store)
    writer = store.write("file", len(CONTENT))
    with pytest.raises(FileNotFoundError):
        store.open("file")
    writer.abort()


def test_a_file_that_was_replaced_while_it_was_being_opened_is_gone(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(store, "file", CONTENT)
    lock = local._lock

    def slow(fd: int, kind: int) -> bool:
        if kind == fcntl.LOCK_SH:
            monkeypatch.setattr(local, "_lock", lock)
            store.retire("file", ROOMY)
            write_file(store, "file", bytes(len(CONTENT)), recycle=False)
        return lock(fd, kind)

    monkeypatch.setattr(local, "_lock", slow)
    with pytest.raises(FileNotFoundError):
        store.open("file")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_filesystem_without_locks_still_works(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(local.fcntl, "flock", failing(code))
    write_file(store, "file", CONTENT)
    assert read_range(store, "file", 0, 10) == (10, [CONTENT[:10]])


# --- recycling --------------------------------------------------------------------------------------------------------


def test_a_retired_file_is_written_over(store: LocalStore) -> None:
    number = retired(store)
    write_file(store, "new", b"\7" * BLOCK)
    assert inode(store, "new") == number
    assert store.read("new") == b"\7" * BLOCK
    assert pool(store) == []


def test_a_file_with_a_second_link_is_never_written_over(store: LocalStore) -> None:
    write_file(store, "file", CONTENT)
    os.link(os.path.join(store.root, "file"), os.path.join(store.root, "backup"))
    assert store.retire("file", ROOMY) == len(CONTENT)
    assert pool(store) == []
    number = retired(store)
    os.link(pool(store)[0], os.path.join(store.root, "backup-2"))
    write_file(store, "new", bytes(BLOCK))
    assert inode(store, "new") != number
    assert store.read("backup") == store.read("backup-2") == CONTENT


def test_a_save_that_is_told_not_to_recycle_takes_new_blocks(store: LocalStore) -> None:
    number = retired(store)
    write_file(store, "new", CONTENT, recycle=False)
    assert inode(store, "new") != number
    assert len(pool(store)) == 1


def test_the_retired_file_of_the_nearest_size_is_taken(store: LocalStore) -> None:
    small, large = retired(store, "small", CONTENT[:BLOCK]), retired(store, "large")
    write_file(store, "one", b"one")
    write_file(store, "two", CONTENT)
    assert (inode(store, "one"), inode(store, "two")) == (small, large)


def test_two_writers_never_take_the_same_retired_file(store: LocalStore) -> None:
    for number in range(4):
        retired(store, f"old-{number}")
    writers = [LocalStore(store.root) for _ in range(8)]
    gate = threading.Barrier(8)

    def write(number: int) -> None:
        gate.wait()
        write_file(writers[number], f"new-{number}", bytes([number]) * 5000)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read(f"new-{n}") for n in range(8)] == [bytes([n]) * 5000 for n in range(8)]
    assert len({inode(store, f"new-{n}") for n in range(8)}) == 8


def test_the_pool_never_holds_more_than_it_may(store: LocalStore) -> None:
    chance = random.Random(3)
    bound = 5 * BLOCK
    for number in range(40):
        write_file(store, f"file-{number}", bytes(chance.randrange(3 * BLOCK)), recycle=chance.random() < 0.3)
        size = store.size(f"file-{number}")
        held = len(pool(store))
        assert store.retire(f"file-{number}", bound) == (0 if len(pool(store)) > held else size)
        assert sum(path.stat().st_size for path in pool(store)) <= bound


def test_a_sweep_brings_the_pool_down_to_its_bound(store: LocalStore) -> None:
    for number in range(4):
        retired(store, f"file-{number}", bytes(BLOCK))
    assert store.sweep(keep_bytes=2 * BLOCK) == 2 * BLOCK
    assert len(pool(store)) == 2
    assert store.sweep() == 2 * BLOCK
    assert pool(store) == []


def test_a_sweep_takes_what_dead_writers_left_and_not_what_is_under_way(store: LocalStore) -> None:
    store.create("attempts/0001.json", b"")
    stale, fresh = (Path(store.root) / "attempts" / f".tmp-1-{name}" for name in ("stale", "fresh"))
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (1, 1))
    assert store.sweep() == 4
    assert (stale.exists(), fresh.exists()) == (False, True)


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
