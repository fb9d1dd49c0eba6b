"""Files that are written over: only retired ones, that nobody reads and no second link names; and what keeps them so, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
from pathlib import Path

import pytest

from holdfast.store import local
from holdfast.store.base import BLOCK
from holdfast.store.local import LocalStore
from holdfast.testing.conformance import read_range, write_file

CONTENT = random.Random(1).randbytes(40 * BLOCK + 99)
ROOMY = 1 << 30


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "root")


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

    def no_locks(fd: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(local.fcntl, "flock", no_locks)
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
