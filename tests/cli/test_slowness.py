"""What the records of saves add up to: wall time by phase, the slowest rank, since when it is slow."""

from __future__ import annotations

import random

import pytest

from holdfast.cli.amounts import duration, one_line
from holdfast.cli.saves import UNACCOUNTED, Save, saves_of, summarise
from holdfast.cli.slowness import change, heat, slowest
from holdfast.run.timings import Phase, RankPhases, SaveTimes, unaccounted

from .times import BEGAN, GB, INTERVAL, save_times


def of_phases(*phases: tuple[str, float, float], seconds: float = 10.0) -> Save:
    """A save with one rank for each (name, begin, seconds)."""
    ranks = tuple(RankPhases(n, "", (Phase(name, BEGAN + at, took),)) for n, (name, at, took) in enumerate(phases))
    return Save(SaveTimes(step=1, attempt=1, began=BEGAN, ended=BEGAN + seconds, ranks=ranks))


# --- a save's own seconds ---------------------------------------------------------------------------------------------


def test_phases_one_after_the_other_keep_their_seconds() -> None:
    save = of_phases(("commit", 8, 2), ("capture", 0, 3), ("write", 3, 5))
    assert save.own_seconds == pytest.approx({"capture": 3, "write": 5, "commit": 2})
    assert list(save.own_seconds) == ["capture", "write", "commit"]


def test_what_happens_at_once_is_divided_and_nothing_counts_twice() -> None:
    save = of_phases(("capture", 0, 4), ("capture", 0, 6), ("write", 4, 4), ("write", 20, 4), ("code", -3, 4))
    own = save.own_seconds
    assert own["capture"] == pytest.approx(1 * 2 / 3 + 3 + 2 * 1 / 2)
    assert own["write"] == pytest.approx(2 * 1 / 2 + 2)
    assert own[UNACCOUNTED] == pytest.approx(2)
    assert sum(own.values()) == pytest.approx(10)


def test_whatever_the_phases_they_add_up_to_the_wall_time() -> None:
    chance = random.Random(7)
    for _ in range(300):
        phases = [
            (chance.choice("abc"), chance.uniform(-5, 12), chance.choice([0, 1, 3, 20])) for _ in range(chance.randrange(9))
        ]
        save = of_phases(*phases, seconds=chance.choice([0.0, 0.5, 10.0]))
        assert sum(save.own_seconds.values()) == pytest.approx(save.seconds, abs=1e-5)
        assert save.unaccounted == pytest.approx(unaccounted(save.record), abs=1e-5)


def test_training_is_held_up_for_as_long_as_the_rank_that_is_held_up_most() -> None:
    assert Save(save_times(1, ranks=4)).blocked_seconds == pytest.approx(0.04)
    assert Save(save_times(1, ranks=0)).blocked_seconds == 0


# --- records of several nodes -----------------------------------------------------------------------------------------


def test_records_that_several_nodes_keep_of_one_save_are_one_save() -> None:
    first, second = save_times(1, ranks=2), save_times(1, ranks=2, node="node-b", write=3.0)
    (save,) = saves_of([second, first])
    assert (len(save.record.ranks), save.record.new_bytes, save.record.raw_bytes) == (6, 2 * GB, 2 * GB)
    assert save.seconds == pytest.approx(max(first.seconds, second.seconds))
    assert save.record.stored_ratio == pytest.approx(0.5)


def test_a_save_that_failed_on_one_node_has_failed() -> None:
    (save,) = saves_of([save_times(1), save_times(1, node="node-b", outcome="failed", reason="no room")])
    assert (save.is_committed, save.is_failed, save.record.reason) == (False, True, "no room")


def test_a_step_that_was_tried_again_is_two_saves() -> None:
    again = save_times(1, began=BEGAN + 1000, ended=BEGAN + 1002)
    assert [s.is_committed for s in saves_of([again, save_times(1, outcome="failed")])] == [False, True]


def test_saves_come_in_the_order_in_which_they_began() -> None:
    """After a rollback the steps are smaller, and later."""
    later = save_times(9, step=50, attempt=2)
    assert [s.step for s in saves_of([later, save_times(2), save_times(1)])] == [100, 200, 50]


# --- sums -------------------------------------------------------------------------------------------------------------


def test_the_sums_are_of_committed_saves() -> None:
    records = [save_times(n, write=float(n)) for n in (1, 2, 3, 5)]
    records += [save_times(4, outcome="failed", new_bytes=7), save_times(6, outcome="skipped"), save_times(7, outcome="lost")]
    found = summarise(saves_of(records))
    assert (found.committed, found.skipped, found.failed) == (4, 1, 2)
    assert (found.median_seconds, found.worst_seconds) == pytest.approx((2.5 + 0.75, 5.75))
    assert (found.worst_step, found.new_bytes) == (500, 4 * GB)
    assert (found.interval_seconds, found.worst_interval_seconds) == (INTERVAL, 2 * INTERVAL)
    assert found.bytes_per_second == pytest.approx(4 * GB / (11 + 4 * 0.75))
    assert found.unaccounted == pytest.approx(0, abs=1e-6)


def test_without_saves_there_is_nothing_to_sum() -> None:
    found = summarise([])
    assert (found.committed, found.median_seconds, found.interval_seconds, found.bytes_per_second) == (0, None, None, None)


def test_the_time_between_two_attempts_is_no_interval() -> None:
    found = summarise(saves_of([save_times(1), save_times(2), save_times(900, attempt=2), save_times(901, attempt=2)]))
    assert found.worst_interval_seconds == INTERVAL


# --- the slowest rank -------------------------------------------------------------------------------------------------


def test_the_slowest_rank_is_named_with_its_phase() -> None:
    found = slowest(heat([Save(save_times(n)) for n in range(1, 6)]))
    assert found is not None
    assert (found.row.rank, found.row.node, found.phase, found.row.slowest_in, found.saves) == (
        2,
        "node-a",
        ("capture", ""),
        5,
        5,
    )
    assert found.phase_ratio == pytest.approx(3)
    assert found.stands_out
    assert "rank 2 (node-a)" in found.words()


def test_a_rank_that_waits_for_others_is_not_the_slow_one() -> None:
    """All ranks are busy until the slowest is done, if waiting counts."""
    found = heat([Save(save_times(1))])
    assert found.ranks[0].medians["wait", ""] == pytest.approx(0.4)
    assert [row.rank for row in sorted(found.ranks, key=lambda row: row.busy_seconds)][-1] == 2


def test_one_bad_save_does_not_make_a_rank_the_slowest() -> None:
    saves = [Save(save_times(n, slow_rank=3 if n == 4 else 2)) for n in range(1, 8)]
    found = slowest(heat(saves))
    assert found is not None
    assert (found.row.rank, found.row.slowest_in, found.saves) == (2, 6, 7)


def test_the_agent_is_no_rank_and_the_last_row() -> None:
    found = heat([Save(save_times(1))])
    assert [row.name for row in found.rows] == [*(f"rank {n} (node-a)" for n in range(4)), "agent (node-a)"]
    assert [column[0] for column in found.columns] == ["capture", "barrier", "wait", "write", "fsync", "commit"]


def test_a_rank_that_is_recorded_in_parts_has_them_all() -> None:
    parts = [RankPhases(0, "", (Phase("write", BEGAN, seconds),)) for seconds in (1.0, 2.0)]
    (row,) = heat([Save(SaveTimes(step=1, attempt=1, began=BEGAN, ended=BEGAN + 3, ranks=tuple(parts)))]).rows
    assert (row.medians, row.busy_seconds) == ({("write", ""): 3.0}, 3.0)


@pytest.mark.parametrize("ranks", [0, 1])
def test_of_fewer_than_two_ranks_none_is_the_slowest(ranks: int) -> None:
    assert slowest(heat([Save(save_times(1, ranks=ranks))])) is None
    assert slowest(heat([])) is None


def test_of_equal_ranks_none_is_the_slowest() -> None:
    ranks = tuple(RankPhases(n, "", (Phase("capture", BEGAN, 1.0),)) for n in range(3))
    assert slowest(heat([Save(save_times(1, ranks=0))])) is None
    assert slowest(heat([Save(SaveTimes(step=1, attempt=1, began=BEGAN, ended=BEGAN + 1, ranks=ranks))])) is None


# --- since when -------------------------------------------------------------------------------------------------------


def history(*writes: float, noise: float = 0.05) -> list[Save]:
    chance = random.Random(3)
    return [Save(save_times(n + 1, write=w * chance.uniform(1 - noise, 1 + noise))) for n, w in enumerate(writes)]


@pytest.mark.parametrize(("before", "after"), [(30, 30), (100, 5), (5, 100), (3, 3)])
def test_the_save_since_which_it_is_slow_is_found(before: int, after: int) -> None:
    found = change(history(*[1.0] * before, *[3.0] * after))
    assert found is not None
    assert (found.step, found.at, found.is_slower) == (100 * (before + 1), BEGAN + (before + 1) * INTERVAL, True)
    assert found.phase == "write"
    assert (found.phase_before, found.phase_after) == pytest.approx((1.0, 3.0), rel=0.06)


def test_that_it_became_faster_is_found_too() -> None:
    found = change(history(*[4.0] * 10, *[1.0] * 10))
    assert found is not None
    assert (found.step, found.is_slower) == (1100, False)


@pytest.mark.parametrize("at", [0, 7, 15])
def test_a_single_slow_save_neither_makes_a_change_nor_hides_one(at: int) -> None:
    writes = [1.0] * 20
    writes[at] = 500.0
    assert change(history(*writes)) is None
    found = change(history(*writes, *[3.0] * 20))
    assert found is not None
    assert found.step == 2100


@pytest.mark.parametrize("count", [0, 1, 2, 5, 50])
def test_where_nothing_changes_no_change_is_found(count: int) -> None:
    assert change(history(*[1.0] * count)) is None
    assert change(history(*[1.0] * count, noise=0.0)) is None
    assert change(history(*[1.0] * count, noise=0.6)) is None


# --- amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (1e-6, "0.001 ms"), (0.0032, "3.2 ms"), (1, "1 s"), (12.34, "12.3 s"), (99.9, "99.9 s"), (100, "1 min 40 s"),
        (120, "2 min"), (5999, "99 min 59 s"), (6000, "1 h 40 min"), (86400, "24 h"), (400000, "4 d 15 h"), (1e9, "11574 d 2 h"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_line_moves_no_cursor() -> None:
    assert one_line("a\x1b[2Jb\r\nc\x00 \u2028d") == "a [2Jb c d"
