"""The model of the disk itself: toy programs whose crash states are known from the rules of POSIX and of journals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.store import posix

from .disk import SECTOR, Crash, crashes, crashes_after_kill, crashes_without
from .recorder import Create, Fsync, Mark, Recorder, Recording, functions_of


def record(root: Path, program: Callable[[Path], None]) -> Recording:
    with Recorder(root, posix, package=Path(__file__).parent) as recorder:
        program(root)
    return recorder.recording


def create(path: Path, data: bytes, *, synced: bool) -> None:
    fd = posix.open_fd(str(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    if data:
        posix.pwrite(fd, data, 0)
    if synced:
        posix.fsync(fd)
    posix.close_fd(fd)


def overwrite(path: Path, data: bytes, offset: int = 0) -> None:
    fd = posix.open_fd(str(path), os.O_WRONLY)
    posix.pwrite(fd, data, offset)
    posix.close_fd(fd)


def sync_directory(path: Path) -> None:
    fd = posix.open_fd(str(path), os.O_RDONLY | os.O_DIRECTORY)
    posix.fsync(fd)
    posix.close_fd(fd)


def files_of(crash: Crash, directory: Path) -> dict[str, bytes]:
    """The state as the files that a program would find."""
    crash.state.materialize(directory)
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()
    return found


def after(recording: Recording, tmp_path: Path, label: str = "done") -> list[dict[str, bytes]]:
    """All states that a crash at or after the mark may leave."""
    start = next(i for i, o in enumerate(recording.operations) if isinstance(o, Mark) and o.label == label)
    return [files_of(crash, tmp_path / "rebuilt") for crash in crashes(recording) if crash.prefix > start]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.mark.parametrize("file_synced", [True, False])
@pytest.mark.parametrize("directory_synced", [True, False])
def test_a_replaced_file_is_safe_only_with_both_fsyncs(
    root: Path, tmp_path: Path, file_synced: bool, directory_synced: bool
) -> None:
    (root / "f").write_bytes(b"old")
    with Recorder(root, posix) as recorder:
        create(root / "f.tmp", b"new" * 3000, synced=file_synced)
        posix.rename(str(root / "f.tmp"), str(root / "f"))
        if directory_synced:
            sync_directory(root)
        recorder.announce("done")
    contents = {state.get("f") for state in after(recorder.recording, tmp_path)}
    assert None not in contents, "a name was lost that nobody removed"
    assert (contents == {b"new" * 3000}) == (file_synced and directory_synced)
    if directory_synced and not file_synced:
        assert {b"", b"n"} <= contents, "the new file may be empty or torn"
    if file_synced and not directory_synced:
        assert contents == {b"old", b"new" * 3000}


def test_before_the_fsyncs_a_replaced_file_is_old_or_new_at_every_instant(root: Path, tmp_path: Path) -> None:
    (root / "f").write_bytes(b"old")

    def program(root: Path) -> None:
        create(root / "f.tmp", b"new", synced=True)
        posix.rename(str(root / "f.tmp"), str(root / "f"))
        sync_directory(root)

    states = [files_of(crash, tmp_path / "rebuilt") for crash in crashes(record(root, program))]
    assert {state["f"] for state in states} == {b"old", b"new"}


def test_a_file_that_is_fsynced_has_no_name_before_its_directory_is(root: Path, tmp_path: Path) -> None:
    with Recorder(root, posix) as recorder:
        create(root / "f", b"data", synced=True)
        recorder.announce("written")
        sync_directory(root)
        recorder.announce("named")
    assert {} in after(recorder.recording, tmp_path, "written")
    assert after(recorder.recording, tmp_path, "named") == [{"f": b"data"}]


def test_every_directory_on_the_path_has_to_be_fsynced(root: Path, tmp_path: Path) -> None:
    with Recorder(root, posix) as recorder:
        posix.mkdir(str(root / "a"))
        posix.mkdir(str(root / "a" / "b"))
        create(root / "a" / "b" / "f", b"data", synced=True)
        sync_directory(root / "a" / "b")
        sync_directory(root / "a")
        recorder.announce("two of three")
        sync_directory(root)
        recorder.announce("done")
    assert {} in after(recorder.recording, tmp_path, "two of three")
    assert after(recorder.recording, tmp_path, "done") == [{"a/b/f": b"data"}]


def test_a_link_may_be_durable_while_the_bytes_are_not(root: Path, tmp_path: Path) -> None:
    with Recorder(root, posix) as recorder:
        create(root / "tmp", b"record", synced=False)
        posix.link(str(root / "tmp"), str(root / "record"))
        sync_directory(root)
        posix.unlink(str(root / "tmp"))
        recorder.announce("done")
    states = after(recorder.recording, tmp_path)
    assert {state["record"] for state in states} >= {b"", b"record", b"r"}
    assert any("tmp" in state for state in states), "the removal of the first name is not durable"
    assert any("tmp" not in state for state in states)


def test_a_file_written_in_place_may_hold_any_mixture_of_sectors(root: Path, tmp_path: Path) -> None:
    (root / "f").write_bytes(b"o" * 4 * SECTOR)

    with Recorder(root, posix) as recorder:
        overwrite(root / "f", b"n" * 4 * SECTOR)
        recorder.announce("written")
        for part in range(4):
            overwrite(root / "f", b"N" * SECTOR, part * SECTOR)
        posix.truncate(fd := posix.open_fd(str(root / "f"), os.O_WRONLY), SECTOR)
        posix.close_fd(fd)
    states = crashes(recorder.recording, subsets=200)
    found = {files_of(crash, tmp_path / "rebuilt")["f"][::SECTOR] for crash in states}
    assert {b"oooo", b"nnnn", b"NNNN", b"oNoN", b"NooN", b"nNnn", b"N", b"o", b"n"} <= found
    assert b"onnn" in found, "the beginning of a torn write may be what is missing"


def test_an_fsync_makes_the_overwritten_bytes_and_the_size_certain(root: Path, tmp_path: Path) -> None:
    (root / "f").write_bytes(b"old, and longer")
    with Recorder(root, posix) as recorder:
        fd = posix.open_fd(str(root / "f"), os.O_WRONLY)
        posix.allocate(fd, 20)
        posix.pwrite(fd, b"new", 0)
        posix.truncate(fd, 3)
        posix.fsync(fd)
        posix.close_fd(fd)
        recorder.announce("done")
    assert after(recorder.recording, tmp_path) == [{"f": b"new"}]


def test_an_fsync_covers_only_what_was_complete_when_it_began(root: Path, tmp_path: Path) -> None:
    with Recorder(root, posix) as recorder:
        create(root / "f", b"", synced=True)
        sync_directory(root)
        fd = posix.open_fd(str(root / "f"), os.O_WRONLY)
        began = len(recorder.recording.operations)
        posix.pwrite(fd, b"late", 0)
        posix.fsync(fd)
        recorder.announce("done")
        posix.close_fd(fd)
    last = recorder.recording.operations[-2]
    assert isinstance(last, Fsync)
    recorder.recording.operations[-2] = Fsync(last.path, last.inode, began, last.stack)
    assert {state["f"] for state in after(recorder.recording, tmp_path)} >= {b"", b"late"}


def move_between_directories(root: Path, recorder: Recorder, *, sync_new: bool, sync_old: bool) -> None:
    posix.rename(str(root / "a" / "f"), str(root / "b" / "f"))
    if sync_new:
        sync_directory(root / "b")
    if sync_old:
        sync_directory(root / "a")
    recorder.announce("done")


@pytest.mark.parametrize(
    ("sync_new", "sync_old", "possible"),
    [
        (False, False, {"a", "b", "ab"}),
        (True, False, {"b", "ab"}),
        (False, True, {"a", "b", "ab"}),
        (True, True, {"b"}),
    ],
)
def test_a_move_between_directories_never_loses_both_names(
    root: Path, tmp_path: Path, sync_new: bool, sync_old: bool, possible: set[str]
) -> None:
    for name in "ab":
        (root / name).mkdir()
    (root / "a" / "f").write_bytes(b"data")
    with Recorder(root, posix) as recorder:
        move_between_directories(root, recorder, sync_new=sync_new, sync_old=sync_old)
    states = after(recorder.recording, tmp_path)
    assert {"".join(sorted(path[0] for path in state)) for state in states} == possible


def test_two_names_of_one_file_are_hard_links_in_the_rebuilt_tree(root: Path, tmp_path: Path) -> None:
    with Recorder(root, posix) as recorder:
        create(root / "f", b"data", synced=True)
        posix.link(str(root / "f"), str(root / "g"))
        sync_directory(root)
        recorder.announce("done")
    *_, last = crashes(recorder.recording)
    last.state.materialize(tmp_path / "rebuilt")
    assert os.stat(tmp_path / "rebuilt" / "f").st_nlink == 2


def test_a_removed_directory_takes_along_what_was_removed_from_it(root: Path, tmp_path: Path) -> None:
    (root / "a").mkdir()
    (root / "b").mkdir()
    (root / "a" / "f").write_bytes(b"data")

    with Recorder(root, posix) as recorder:
        posix.rename(str(root / "a" / "f"), str(root / "b" / "f"))
        posix.rmdir(str(root / "a"))
        recorder.announce("removed")
        sync_directory(root)
        recorder.announce("done")
    assert all(state in ({"a/f": b"data"}, {"b/f": b"data"}, {"a/f": b"data", "b/f": b"data"})
               for state in after(recorder.recording, tmp_path, "removed"))  # fmt: skip
    assert after(recorder.recording, tmp_path, "done") == [{"b/f": b"data"}]


def test_leaving_out_an_fsync_shows_the_loss_it_prevents(root: Path, tmp_path: Path) -> None:
    def program(root: Path) -> None:
        create(root / "f.tmp", b"new", synced=True)
        posix.rename(str(root / "f.tmp"), str(root / "f"))
        sync_directory(root)

    (root / "f").write_bytes(b"old")
    recording = record(root, program)
    sites = {o.stack[0].split()[1] for o in recording.operations if isinstance(o, Fsync)}
    assert sites == {"create", "sync_directory"}
    lost = crashes_without(recording, lambda fsync: fsync.stack[0].endswith(" create"))
    assert b"" in [files_of(crash, tmp_path / "rebuilt")["f"] for crash in lost]
    assert [*crashes_without(recording, lambda fsync: False)] == []


def test_what_a_killed_process_left_is_not_durable_for_the_next(root: Path, tmp_path: Path) -> None:
    def program(root: Path) -> None:
        posix.link(str(root / "old"), str(root / "new"))
        killed.append(len(recorder.recording.operations))
        posix.unlink(str(root / "old"))
        sync_directory(root / "elsewhere")

    (root / "old").write_bytes(b"data")
    (root / "elsewhere").mkdir()
    killed: list[int] = []
    with Recorder(root, posix) as recorder:
        program(root)
    states = [files_of(crash, tmp_path / "rebuilt") for crash in crashes_after_kill(recorder.recording, killed[0])]
    assert {} in states, "the second process removed the one name that was durable"


def test_all_subsets_are_tried_where_few_changes_are_not_durable(root: Path, tmp_path: Path) -> None:
    def program(root: Path) -> None:
        for name in "abc":
            create(root / name, b"x", synced=False)

    recording = record(root, program)
    states = [files_of(crash, tmp_path / "rebuilt") for crash in crashes(recording)]
    found = {tuple(sorted(state.items())) for state in states if b"\0" not in state.values()}
    assert len(found) == 3**3, "each of the three files is absent, empty or whole"


def test_a_number_that_the_kernel_gives_again_is_another_inode(root: Path) -> None:
    def program(root: Path) -> None:
        for data in (b"first", b"second"):
            create(root / "f", data, synced=True)
            posix.unlink(str(root / "f"))

    inodes = [o.inode for o in record(root, program).operations if isinstance(o, Create)]
    assert len(set(inodes)) == 2


def test_what_goes_around_the_recorded_functions_is_named(root: Path) -> None:
    def program(root: Path) -> None:
        (root / "secret").write_bytes(b"")
        overwrite(root / "secret", b"x")

    assert record(root, program).strangers == [str(root / "secret")]


def test_the_recorder_stands_in_for_every_function_of_the_module() -> None:
    assert functions_of(posix) == sorted(Recorder.WRAPPED)
