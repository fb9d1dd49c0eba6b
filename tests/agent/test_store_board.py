"""The board in a store: what one process posts there all see, one of those who decide is first, and nothing of it stays."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.errors import BoardGone
from holdfast.run.agreement import Decisions
from holdfast.run.store_board import StoreBoard, board_folder, remove_older
from holdfast.store.local import LocalStore


def boards(directory: Path, count: int, attempt: int = 1) -> list[StoreBoard]:
    """As many members of one board, each with a store of its own, as processes have."""
    return [StoreBoard(LocalStore(directory / "run"), board_folder(attempt), count) for _ in range(count)]


def test_what_one_posts_another_reads_whatever_the_key_is(tmp_path: Path) -> None:
    here, there = boards(tmp_path, 2)
    keys = ["save of step 5 to a run/1/begin/0", "ä" * 300, "", "../../escape"]
    for number, key in enumerate(keys):
        assert not there.wait([key], 0.0)
        here.post(key, b"%d" % number)
    assert there.wait(keys, 0.0)
    assert there.read(keys) == [b"0", b"1", b"2", b"3"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_key_that_is_posted_again_has_its_last_value_at_every_instant(tmp_path: Path) -> None:
    here, there = boards(tmp_path, 2)
    here.post("now", b"0")
    is_over = threading.Event()

    def watch() -> list[int]:
        seen = []
        while not is_over.is_set():
            assert there.wait(["now"], 0.0)
            seen.append(int(there.read(["now"])[0]))
        return seen

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(watch)
        for number in range(200):
            here.post("now", b"%d" % number)
        is_over.set()
        assert seen.result(20) == sorted(seen.result())
    assert there.read(["now"]) == [b"199"]
    assert len(list((tmp_path / "run" / board_folder(1)).iterdir())) == 1


def test_of_those_who_decide_at_once_one_is_first_for_all(tmp_path: Path) -> None:
    members = boards(tmp_path, 8)
    with ThreadPoolExecutor(8) as pool:
        for key in ("a", "b", "c"):
            found = list(pool.map(lambda board, key=key: board.decide(key, b"%d" % members.index(board)), members))
            assert len(set(found)) == 1
            assert members[0].read([key]) == [found[0]]


def test_a_swap_takes_the_value_that_stands_and_no_other(tmp_path: Path) -> None:
    here, there = boards(tmp_path, 2)
    assert here.swap("k", b"", b"1") == b"1"
    assert there.swap("k", b"", b"2") == b"1"
    assert there.swap("k", b"1", b"2") == b"2"
    assert here.swap("k", b"1", b"3") == b"2"


def test_members_that_number_calls_agree_on_each_of_them(tmp_path: Path) -> None:
    members = [Decisions(board, "save") for board in boards(tmp_path, 4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: [members[number].decide(call, (call + number) % 2) for call in range(20)], range(4)))
    assert found[0] == found[1] == found[2] == found[3]


def test_what_is_dropped_is_gone_for_all(tmp_path: Path) -> None:
    here, there = boards(tmp_path, 2)
    here.post("a", b"1")
    here.post("b", b"2")
    here.drop(["a", "never there"])
    assert not there.wait(["a"], 0.0)
    assert there.wait(["b"], 0.0)


def test_boards_of_earlier_attempts_are_removed_and_who_still_talks_there_is_told(tmp_path: Path) -> None:
    [old], [new] = boards(tmp_path, 1, attempt=1), boards(tmp_path, 1, attempt=2)
    old.post("a", b"1")
    new.post("a", b"2")
    remove_older(LocalStore(tmp_path / "run"), 2)
    assert [path.name for path in (tmp_path / "run" / "agents").iterdir()] == ["a0002"]
    with pytest.raises(BoardGone, match="a newer attempt has begun"):
        old.post("b", b"3")
    with pytest.raises(BoardGone, match="a newer attempt has begun"):
        old.wait(["a"], 0.0)
    assert new.read(["a"]) == [b"2"]
