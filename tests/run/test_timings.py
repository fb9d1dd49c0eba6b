"""Records of where the time of saves went: what is kept comes back, the oldest go, and damage hurts nobody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import NoSpace, Run, Unavailable
from holdfast.format.records import seal
from holdfast.run import timings
from holdfast.run.status import LEVELS, ErrorStatus, RankStatus, SaveStatus, Status
from holdfast.run.timings import Phase, RankPhases, SaveTimes, keep_times, times_of, unaccounted
from holdfast.store.locate import open_store
from holdfast.store.memory import MemoryStore
from holdfast.testing.faults import Fault, Faulty

from .world import prune, read, save

BEGAN = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has kept no record yet."""
    monkeypatch.setattr(timings, "_kept", {})


def times(step: int, attempt: int = 1, *phases: Phase, seconds: float = 10.0, **fields: Any) -> SaveTimes:
    ranks = (RankPhases(0, "node-a", phases),)
    return SaveTimes(step=step, attempt=attempt, began=BEGAN, ended=BEGAN + seconds, ranks=ranks, **fields)


def sealed(**fields: Any) -> bytes:
    """A record with fields as no honest writer has them."""

    class Odd(timings.Record, frozen=True, kw_only=True):
        step: Any = 1
        attempt: Any = 1
        began: Any = BEGAN
        ended: Any = BEGAN + 1
        ranks: Any = ()
        raw_bytes: Any = 0

    return seal(Odd(**fields))


# --- keeping and reading ----------------------------------------------------------------------------------------------


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    record = times(
        7, 3, Phase("capture", BEGAN, 1.5, 4096), Phase("barrier", BEGAN, 0.25, lane="trainer"),
        outcome="failed", reason="no room for <b>step</b> 7", raw_bytes=10**12, new_bytes=5, stored_ratio=0.7,
    )  # fmt: skip
    store = open_store(tmp_path)
    keep_times(store, record)
    assert times_of(store) == [record]
    assert times_of(open_store(tmp_path), attempt=2) == []


def test_the_files_are_small_and_open_json(tmp_path: Path) -> None:
    keep_times(open_store(tmp_path), times(7, 3, Phase("write", BEGAN, 2.5, 99)))
    (path,) = (tmp_path / "timings").iterdir()
    assert path.name.startswith("0000000007-a0003-")
    assert json.loads(path.read_text())["ranks"][0]["phases"] == [["write", BEGAN, 2.5, 99, ""]]


def test_a_run_without_records_has_none() -> None:
    assert times_of(MemoryStore()) == []


def test_they_are_read_by_attempt_then_step_and_the_newest_alone_when_asked() -> None:
    store = MemoryStore()
    for step, attempt in ((300, 1), (100, 2), (200, 1), (100, 1)):
        keep_times(store, times(step, attempt))
    assert [(t.attempt, t.step) for t in times_of(store)] == [(1, 100), (1, 200), (1, 300), (2, 100)]
    assert [(t.attempt, t.step) for t in times_of(store, newest=2)] == [(1, 300), (2, 100)]
    assert [t.step for t in times_of(store, attempt=1, newest=2)] == [200, 300]
    assert times_of(store, newest=0) == []


def test_two_records_of_one_step_are_both_kept() -> None:
    store = MemoryStore()
    keep_times(store, times(5, outcome="failed"))
    keep_times(store, times(5))
    assert sorted(t.outcome for t in times_of(store)) == ["committed", "failed"]


def test_the_oldest_go_and_the_directory_is_seldom_listed() -> None:
    store, listed = MemoryStore(), []
    list_names = store.list
    store.list = lambda path: listed.append(path) or list_names(path)  # type: ignore[method-assign]
    for step in range(1, 302):
        keep_times(store, times(step), most=50)
    assert len(listed) == 4
    assert [t.step for t in times_of(store)] == list(range(252, 302))


def test_after_a_rollback_the_old_line_goes_first() -> None:
    """The steps of the new attempt are smaller, but it is newer."""
    store = MemoryStore()
    for step in range(100, 110):
        keep_times(store, times(step, 1))
    for step in range(5):
        timings._kept.clear()
        keep_times(store, times(step, 2), most=10)
    assert [(t.attempt, t.step) for t in times_of(store)] == [(1, s) for s in range(105, 110)] + [(2, s) for s in range(5)]


def test_many_short_processes_leave_no_more_than_a_long_one() -> None:
    store = MemoryStore()
    for step in range(30):
        timings._kept.clear()  # each of them begins anew
        keep_times(store, times(step), most=10)
    assert len(times_of(store)) == 10


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_damaged_records_and_strangers_are_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in (1, 2, 3):
        keep_times(store, times(step))
    one, two, _ = sorted((tmp_path / "timings").iterdir())
    one.write_bytes(b"")
    two.write_bytes(two.read_bytes().replace(b"committed", b"Committed"))
    (tmp_path / "timings" / "notes.txt").write_text("mine")
    (tmp_path / "timings" / "0000000009-a0001-00ff.json").mkdir()
    assert [t.step for t in times_of(store)] == [3]


@pytest.mark.parametrize(
    "odd",
    [
        {"began": -1.0}, {"ended": 1e300}, {"began": "yesterday"}, {"step": -4}, {"step": 10**30}, {"raw_bytes": -1},
        {"raw_bytes": 2**63}, {"ranks": [{"rank": -2}]}, {"ranks": [{"rank": 0, "phases": [["write", BEGAN, -1.0]]}]},
        {"ranks": [{"rank": 0, "phases": [["write", BEGAN, 1e12]]}]}, {"ranks": [{"rank": 0, "phases": [["write"]]}]},
        {"ranks": [{"rank": 0, "phases": [[1, BEGAN, 1.0]]}]}, {"ended": None}, {"format": 2}, {"required_features": ["x"]},
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_true_is_left_out(odd: dict[str, Any]) -> None:
    store = MemoryStore()
    try:
        data = sealed(**odd)
    except OverflowError:
        pytest.skip("not even an encoder takes it")
    store.create("timings/0000000001-a0001-00ff.json", data)
    assert times_of(store) == []


def test_a_store_that_fails_says_so_and_the_steps_are_as_they_were() -> None:
    store = MemoryStore()
    save(store, (100, 1))
    for kind in (Unavailable, NoSpace):
        broken = Faulty(store, Fault("create", "timings/*", error=kind))
        with pytest.raises(kind):
            keep_times(broken, times(100))
    assert (times_of(store), read(store, "latest")) == ([], 1)


def test_a_run_that_was_taken_away_is_unavailable(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    keep_times(store, times(1))
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(Unavailable, match="not there any more"):
        keep_times(store, times(1))


def test_they_are_no_part_of_the_history() -> None:
    """Steps come, go and are found as without them; pruning steps leaves their times, from which one learns."""
    store = MemoryStore()
    session = save(store, (100, 1), (200, 2))
    for step in (100, 200):
        keep_times(store, times(step, session.attempt))
    assert prune(store) == [100]
    assert [s.step for s in Run(store).steps()] == [200]
    assert [t.step for t in times_of(store)] == [100, 200]


# --- what the phases do not account for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "share"),
    [
        ([], 1.0),
        ([(0, 10)], 0.0),
        ([(0, 4), (4, 6)], 0.0),
        ([(0, 4), (6, 4)], 0.2),
        ([(6, 4), (0, 4), (1, 2)], 0.2),
        ([(0, 5), (2, 5)], 0.3),
        ([(-5, 10), (9, 100)], 0.4),
        ([(-5, 2), (20, 2)], 1.0),
    ],
)
def test_the_share_without_a_phase(phases: list[tuple[float, float]], share: float) -> None:
    record = times(1, 1, *(Phase("x", BEGAN + start, seconds) for start, seconds in phases))
    assert unaccounted(record) == pytest.approx(share)


def test_what_runs_beside_the_save_accounts_for_nothing() -> None:
    record = times(1, 1, Phase("capture", BEGAN, 5), Phase("barrier", BEGAN, 10, lane=timings.TRAINER))
    assert unaccounted(record) == pytest.approx(0.5)


def test_the_phases_of_all_ranks_count_together() -> None:
    ranks = (RankPhases(0, "a", (Phase("capture", BEGAN, 4),)), RankPhases(-1, "a", (Phase("write", BEGAN + 3, 7),)))
    assert unaccounted(SaveTimes(step=1, attempt=1, began=BEGAN, ended=BEGAN + 10, ranks=ranks)) == 0


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_a_save_that_took_no_time_has_nothing_to_account_for(seconds: float) -> None:
    record = times(1, seconds=seconds)
    assert (record.seconds, unaccounted(record)) == (0, 0)


# --- the status -------------------------------------------------------------------------------------------------------


def test_a_status_travels_as_json() -> None:
    saves = tuple(SaveStatus(step, level, 1, 2, BEGAN) for step, level in enumerate(LEVELS))
    status = Status(
        pid=1, run="runs/gpt", ranks=(RankStatus(0, 2, False, 3, 0.5),), saves=saves, committed_step=3,
        phase_seconds={"write": 2.5}, errors=(ErrorStatus(BEGAN, "no room"),),
    )  # fmt: skip
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status


def test_a_status_of_another_version_is_understood() -> None:
    data = msgspec.json.encode({"pid": 7, "a_later_idea": [1]})
    assert msgspec.json.decode(data, type=Status) == Status(pid=7)
