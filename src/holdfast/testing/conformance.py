"""What every store must do: a suite to run against yours. Needs pytest.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

Each test gets a store that is empty. What only some stores can do is asked of those whose `capabilities` say so.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..store.base import BLOCK, Capabilities, Store

RACERS = 16
LARGE_BYTES = (6 << 20) + 1234
ODD_NAMES = ["with space", "naïve-🪸", "ends with dot.", "a@b%41", "quote'\"", "-starts-with-dash", "x" * 200]


def aligned(data: bytes) -> memoryview:
    """A copy of `data` in memory aligned as `Writer.write` asks, padded with zeros to whole blocks."""
    size = max(BLOCK, -(-len(data) // BLOCK) * BLOCK)
    block = mmap.mmap(-1, size)
    block[: len(data)] = data
    return memoryview(block)


def write_file(store: Store, path: str, data: bytes, recycle: bool = True) -> None:
    """Write a whole file as a save does: in aligned blocks, then cut to its length."""
    padded = aligned(data)
    writer = store.write(path, len(padded), recycle)
    for start in range(0, len(padded), 1 << 20):
        writer.write(start, padded[start : start + (1 << 20)])
    writer.finish(len(data))


def read_range(store: Store, path: str, offset: int, *sizes: int) -> tuple[int, list[bytes]]:
    """What one `read_into` of buffers of these sizes gives: how many bytes there were, and the buffers."""
    targets = [bytearray(size) for size in sizes]
    reader = store.open(path)
    try:
        return reader.read_into(offset, [memoryview(target) for target in targets]), [bytes(target) for target in targets]
    finally:
        reader.close()


def together(count: int, run: Callable[[int], object]) -> list[object]:
    """Call `run(0)` to `run(count - 1)` at once; returns results, and errors in the place of results."""
    gate = threading.Barrier(count)

    def one(number: int) -> object:
        gate.wait()
        try:
            return run(number)
        except Exception as error:  # an outcome like any other
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


class StoreSuite:
    """Every store passes this. Override the fixture `store`."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("override the fixture `store`")

    # create

    def test_it_says_what_it_can_do(self, store: Store) -> None:
        assert isinstance(store.capabilities, Capabilities)
        assert isinstance(store.url, str)

    def test_what_is_created_is_read_back(self, store: Store) -> None:
        store.create("a/b/c.json", b"content")
        assert store.read("a/b/c.json") == b"content"
        assert store.size("a/b/c.json") == 7

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        store.create("empty", b"")
        assert store.read("empty") == b""
        assert store.size("empty") == 0
        assert bytes(store.map("empty")) == b""
        assert read_range(store, "empty", 0, 4) == (0, [bytes(4)])

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_any_bytes_may_be_created(self, store: Store, kind: Callable[[bytes], object]) -> None:
        store.create("file", kind(b"some bytes"))
        assert store.read("file") == b"some bytes"

    def test_a_file_may_be_created_piece_by_piece(self, store: Store) -> None:
        def pieces() -> Iterator[object]:
            yield b"one "
            yield memoryview(bytearray(b"two "))
            yield memoryview(b"\1\0\2\0").cast("H")
            yield b""

        store.create("file", pieces())
        assert store.read("file") == b"one two \1\0\2\0"

    def test_a_file_without_sync_is_visible_at_once(self, store: Store) -> None:
        store.create("file", b"content", sync=False)
        assert store.read("file") == b"content"
        assert store.list("") == ["file"]

    def test_a_name_is_created_once(self, store: Store) -> None:
        store.create("file", b"first")
        with pytest.raises(FileExistsError):
            store.create("file", b"second")
        with pytest.raises(FileExistsError):
            store.create("file", b"first", sync=False)
        assert store.read("file") == b"first"

    def test_a_name_may_be_created_anew_after_it_was_deleted(self, store: Store) -> None:
        store.create("file", b"first")
        store.delete("file")
        store.create("file", b"second")
        assert store.read("file") == b"second"

    def test_of_sixteen_who_create_one_name_at_once_exactly_one_wins(self, store: Store) -> None:
        if not store.capabilities.is_create_once:
            pytest.skip("this store does not claim create-once")
        for turn in range(5):
            path = f"steps/{turn}/commit.json"
            outcomes = together(RACERS, lambda n, path=path: store.create(path, b"%d" % n * 1000))  # type: ignore[misc]
            winners = [n for n, outcome in enumerate(outcomes) if outcome is None]
            assert len(winners) == 1, outcomes
            assert all(isinstance(o, FileExistsError) for o in outcomes if o is not None), outcomes
            assert store.read(path) == b"%d" % winners[0] * 1000

    def test_a_file_whose_content_fails_to_come_does_not_exist(self, store: Store) -> None:
        def broken() -> Iterator[bytes]:
            yield b"half"
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            store.create("folder/file", broken())
        assert store.list("folder") == []
        store.create("folder/file", b"whole")
        assert store.read("folder/file") == b"whole"

    def test_nobody_sees_half_of_a_file_that_is_being_created(self, store: Store) -> None:
        def looking() -> Iterator[bytes]:
            yield b"half"
            assert store.list("folder") == []
            with pytest.raises(FileNotFoundError):
                store.read("folder/file")
            yield b"half"

        store.create("folder/file", looking())
        assert store.read("folder/file") == b"halfhalf"

    # read

    def test_what_is_missing_is_a_file_not_found(self, store: Store) -> None:
        store.create("folder/file", b"content")
        for path in ("missing", "folder/missing", "missing/file"):
            for look in (store.read, store.map, store.open, store.size):
                with pytest.raises(FileNotFoundError):
                    look(path)

    def test_any_range_is_read_exactly(self, store: Store) -> None:
        content = random.Random(1).randbytes(10_000)
        store.create("file", content)
        for offset, size in ((0, 10_000), (0, 1), (9_999, 1), (4095, 2), (4096, 4096), (123, 4567)):
            assert read_range(store, "file", offset, size) == (size, [content[offset : offset + size]])

    def test_one_read_fills_several_buffers(self, store: Store) -> None:
        content = random.Random(2).randbytes(10_000)
        store.create("file", content)
        sizes = [1, 0, 4096, 7, 1000]
        got, buffers = read_range(store, "file", 50, *sizes)
        assert (got, b"".join(buffers)) == (sum(sizes), content[50 : 50 + sum(sizes)])

    def test_one_read_fills_thousands_of_buffers(self, store: Store) -> None:
        content = random.Random(3).randbytes(9_000)
        store.create("file", content)
        got, buffers = read_range(store, "file", 0, *[3] * 3_000)
        assert (got, b"".join(buffers)) == (9_000, content)

    def test_a_read_beyond_the_end_says_how_much_there_was(self, store: Store) -> None:
        store.create("file", b"0123456789")
        assert read_range(store, "file", 8, 4, 4) == (2, [b"89\0\0", bytes(4)])
        assert read_range(store, "file", 10, 4) == (0, [bytes(4)])
        assert read_range(store, "file", 1 << 40, 4) == (0, [bytes(4)])

    def test_a_reader_knows_the_size_and_serves_several_threads(self, store: Store) -> None:
        content = random.Random(4).randbytes(64 * 1024)
        store.create("file", content)
        reader = store.open("file")

        def read(number: int) -> bytes:
            target = bytearray(4096)
            reader.read_into(number * 4096, [memoryview(target)])
            return bytes(target)

        try:
            assert reader.nbytes == len(content)
            assert together(16, read) == [content[n * 4096 : (n + 1) * 4096] for n in range(16)]
        finally:
            reader.close()

    def test_a_reader_may_be_closed_twice(self, store: Store) -> None:
        store.create("file", b"content")
        reader = store.open("file")
        reader.close()
        reader.close()

    def test_an_open_file_that_is_deleted_is_read_to_its_end(self, store: Store) -> None:
        store.create("file", b"content")
        reader = store.open("file")
        store.delete("file")
        target = bytearray(7)
        assert reader.read_into(0, [memoryview(target)]) == 7
        assert target == b"content"
        reader.close()

    def test_a_mapped_file_holds_its_bytes_after_it_is_deleted(self, store: Store) -> None:
        store.create("file", b"content")
        mapped = store.map("file")
        store.delete("file")
        assert bytes(mapped) == b"content"
        assert memoryview(mapped).readonly

    # write

    def test_a_file_is_written_in_blocks_and_cut_to_its_length(self, store: Store) -> None:
        content = random.Random(5).randbytes(3 * BLOCK + 17)
        write_file(store, "steps/1/n0000-00.safetensors", content)
        assert store.read("steps/1/n0000-00.safetensors") == content
        assert store.size("steps/1/n0000-00.safetensors") == len(content)
        assert store.list("steps/1") == ["n0000-00.safetensors"]

    def test_a_large_file_is_written_by_several_threads_in_any_order(self, store: Store) -> None:
        content = random.Random(6).randbytes(LARGE_BYTES)
        padded = aligned(content)
        starts = list(range(0, len(padded), 256 * 1024))
        random.Random(7).shuffle(starts)
        writer = store.write("large", len(padded))
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda start: writer.write(start, padded[start : start + 256 * 1024]), starts))
        writer.finish(len(content))
        assert store.read("large") == content
        assert bytes(store.map("large")) == content

    def test_the_header_may_be_written_last(self, store: Store) -> None:
        body, head = random.Random(8).randbytes(2 * BLOCK), random.Random(9).randbytes(BLOCK)
        writer = store.write("file", 3 * BLOCK)
        writer.write(BLOCK, aligned(body))
        writer.write(0, aligned(head))
        writer.finish(3 * BLOCK)
        assert store.read("file") == head + body

    def test_a_file_may_end_far_below_its_bound(self, store: Store) -> None:
        writer = store.write("file", 100 * BLOCK)
        writer.write(0, aligned(b"short"))
        writer.finish(5)
        assert store.read("file") == b"short"

    def test_a_name_that_is_taken_is_not_written_over(self, store: Store) -> None:
        store.create("file", b"first")
        for recycle in (False, True):
            with pytest.raises(FileExistsError):
                store.write("file", BLOCK, recycle)
        assert store.read("file") == b"first"

    def test_an_aborted_file_is_gone(self, store: Store) -> None:
        writer = store.write("folder/file", 2 * BLOCK)
        writer.write(0, aligned(b"half"))
        writer.abort()
        assert store.list("folder") == []
        with pytest.raises(FileNotFoundError):
            store.size("folder/file")

    def test_an_abort_never_raises(self, store: Store) -> None:
        writer = store.write("folder/file", BLOCK)
        store.delete("folder/file")
        writer.abort()
        writer.abort()

    # list

    def test_a_list_is_sorted_and_directories_end_in_a_slash(self, store: Store) -> None:
        for path in ("b", "a/2", "a/1", "a/x/deep", "c"):
            store.create(path, b"")
        assert store.list("") == ["a/", "b", "c"]
        assert store.list("a") == ["1", "2", "x/"]
        assert store.list("a/x") == ["deep"]

    def test_what_does_not_exist_lists_as_empty(self, store: Store) -> None:
        assert store.list("") == []
        assert store.list("missing") == []
        store.create("folder-2/file", b"")
        assert store.list("folder") == [], "a directory is not a prefix of names"

    def test_names_that_begin_with_a_dot_are_not_listed(self, store: Store) -> None:
        store.create("folder/.hidden", b"")
        store.create(".own/file", b"")
        store.create("folder/shown", b"")
        assert store.list("folder") == ["shown"]
        assert store.list("") == ["folder/"]

    def test_names_may_hold_spaces_and_any_letters(self, store: Store) -> None:
        for name in ODD_NAMES:
            store.create(f"odd/{name}", name.encode())
            write_file(store, f"{name}/data", name.encode())
        assert store.list("odd") == sorted(ODD_NAMES)
        for name in ODD_NAMES:
            assert store.read(f"odd/{name}") == store.read(f"{name}/data") == name.encode()

    # delete and retire

    def test_deleting_removes_one_file(self, store: Store) -> None:
        store.create("folder/one", b"1")
        store.create("folder/two", b"2")
        store.delete("folder/one")
        store.delete("folder/two", sync=True)
        assert store.list("folder") == []

    def test_deleting_what_is_missing_is_no_error(self, store: Store) -> None:
        store.delete("missing")
        store.delete("no/such/folder", sync=True)
        store.delete_dir("missing")
        assert store.retire("missing", 1 << 30) == 0

    def test_deleting_a_directory_removes_all_below_it_and_nothing_beside_it(self, store: Store) -> None:
        for path in ("steps/1/a", "steps/1/.hidden", "steps/1/deep/b", "steps/10/a", "steps/1-p1/a"):
            store.create(path, b"x")
        store.delete_dir("steps/1")
        assert store.list("steps") == ["1-p1/", "10/"]
        with pytest.raises(FileNotFoundError):
            store.size("steps/1/.hidden")

    def test_a_directory_that_was_deleted_may_be_filled_again(self, store: Store) -> None:
        store.create("steps/1/a", b"old")
        store.delete_dir("steps/1")
        store.create("steps/1/a", b"new")
        assert store.read("steps/1/a") == b"new"

    def test_a_retired_file_is_gone_from_its_name(self, store: Store) -> None:
        write_file(store, "file", bytes(BLOCK))
        freed = store.retire("file", 1 << 30)
        assert freed == 0 if store.capabilities.has_recycling else freed == BLOCK
        assert store.list("") == []

    def test_what_there_is_no_room_to_keep_is_freed(self, store: Store) -> None:
        write_file(store, "file", bytes(BLOCK))
        assert store.retire("file", 0) == BLOCK
        assert store.list("") == []

    def test_a_sweep_frees_what_was_retired_and_nothing_else(self, store: Store) -> None:
        for path in ("one", "two", "three"):
            write_file(store, path, bytes(BLOCK), recycle=False)
        freed = sum(store.retire(path, 1 << 30) for path in ("one", "two"))
        freed += store.sweep(BLOCK)
        assert freed == BLOCK if store.capabilities.has_recycling else freed == 2 * BLOCK
        assert freed + store.sweep() == 2 * BLOCK
        assert store.list("") == ["three"]

    def test_syncing_a_directory_changes_nothing_and_a_missing_one_is_no_error(self, store: Store) -> None:
        store.create("folder/file", b"content", sync=False)
        for path in ("folder", "missing", "no/such/folder"):
            store.sync(path)
        assert store.list("") == ["folder/"]

    def test_nothing_of_a_retired_file_shows_through_in_the_next(self, store: Store) -> None:
        write_file(store, "old", b"\xff" * (5 * BLOCK))
        store.retire("old", 1 << 30)
        write_file(store, "new", b"new")
        assert store.read("new") == b"new"
        assert store.size("new") == 3

    def test_a_name_that_is_taken_is_not_written_over_by_a_retired_file(self, store: Store) -> None:
        write_file(store, "old", b"\xff" * BLOCK)
        store.create("file", b"first")
        store.retire("old", 1 << 30)
        with pytest.raises(FileExistsError):
            store.write("file", BLOCK, recycle=True)
        assert store.read("file") == b"first"
