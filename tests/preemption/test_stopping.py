"""One job's stop, as several ranks of one process see it: who is told what, and what it costs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Preemption
from holdfast.preemption import stopping as stopping_module
from holdfast.preemption.stopping import Stopping
from holdfast.ranks import TorchBoard
from holdfast.run.team import Team


class Counting(TorchBoard):
    """Counts its round trips."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "job/", 2)
        self.count = 0

    def _call(self, operation: str, *arguments: Any) -> Any:
        self.count += 1
        return super()._call(operation, *arguments)


def ranks(store: Any, *preemptions: Preemption) -> list[Stopping]:
    members = tuple(range(len(preemptions)))
    return [Stopping(one, Team(members, rank, Counting(store)), "run") for rank, one in enumerate(preemptions)]


QUIET = Preemption(signals=())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(stopping_module.time, "monotonic", lambda: now[0])
    return now


def test_what_one_rank_knows_of_the_end_all_know(tmp_path: Path) -> None:
    first, second = ranks(dist.HashStore(), QUIET, Preemption(signals=(), deadline=time.time() + 50, window="1m"))
    assert [first.should_stop(), second.should_stop()] == [False, False], "the first rank has cleared the call"
    assert first.seconds_left() is None
    assert [first.should_stop(), second.should_stop()] == [True, True]
    assert first.reason == second.reason
    assert "on rank 1" in first.reason
    left = first.seconds_left()
    assert left is not None
    assert 40 < left <= 50
    assert first.within(600.0) <= 50
    assert first.within(5.0) == 5.0


def test_after_the_stop_there_is_no_round_trip() -> None:
    team = ranks(dist.HashStore(), Preemption(signals=(), deadline=1e9), QUIET)
    assert [one.should_stop() for one in team] == [True, True]
    boards: list[Any] = [one._team.board for one in team if one._team is not None]
    before = [board.count for board in boards]
    assert [one.should_stop() for one in team for _ in range(100)] == [True] * 200
    assert [board.count for board in boards] == before


def round_trips(clock: list[float], gaps: list[float]) -> list[int]:
    """Of the rank that is first at each call, with so many seconds between its calls."""
    (first,) = ranks(dist.HashStore(), QUIET)
    assert first._team is not None
    board: Any = first._team.board
    counts = []
    for gap in gaps:
        clock[0] += gap
        before = board.count
        assert not first.should_stop()
        counts.append(board.count - before)
    return counts


def test_slow_calls_cost_one_round_trip_each_and_a_stop_is_never_later_than_the_next(clock: list[float]) -> None:
    assert round_trips(clock, [1.0] * 50) == [1] * 50


def test_fast_calls_share_a_round_trip_but_never_more_than_17(clock: list[float]) -> None:
    counts = round_trips(clock, [0.0001] * 1000)
    assert max(counts) == 1
    assert sum(counts) <= 8 + 1000 // 17 + 1
    assert max(len(run) for run in "".join(map(str, counts)).split("1")) == 16


def test_calls_that_become_slow_are_cleared_ahead_no_more(clock: list[float]) -> None:
    counts = round_trips(clock, [0.001] * 60 + [5.0] * 17 + [0.001] * 30)
    assert counts[76] == 1, "what was cleared before ends after 16 calls"
    assert counts[77:84] == [1] * 7, "a slow call among the last ones may come again"
    assert counts[-16:].count(1) <= 2


def test_the_first_to_ask_decides_whether_a_save_begins_and_gives_the_words() -> None:
    team = ranks(dist.HashStore(), Preemption(signals=(), deadline=time.time() + 20), QUIET, QUIET)
    assert [one.should_stop() for one in team] == [True] * 3
    team[0].note_save(100.0)
    team[1].note_save(200.0)
    said = [one.refusal(7, 6, int) for one in (team[1], team[0], team[2])]
    assert said == [said[0]] * 3
    assert "about 200.0 s" in said[0]
    assert [one.refusal(8, None, int) for one in team] == [""] * 3


def test_nothing_is_refused_before_the_stop() -> None:
    (one,) = ranks(dist.HashStore(), Preemption(signals=(), deadline=time.time() + 1000))
    one.note_save(900.0)
    assert one.refusal(7, 6, int) == ""
    assert one.should_stop(), "but the stop comes early enough for such a save"


# --- a process alone ----------------------------------------------------------------------------------------------------


def train(directory: Path, stop: Callable[[], None], **keywords: Any) -> int:
    """Steps until told to stop in the third; the last one."""
    held = {"w": torch.zeros(3)}
    with holdfast.Checkpointer(directory, held, save=holdfast.Every(steps=100), **keywords) as ckpt:
        for step in range(ckpt.resume() + 1, 10):
            held["w"].fill_(step)
            ckpt.step(step)
            if step == 3:
                stop()
            if ckpt.should_stop():
                break
    return step


def test_a_signal_ends_the_loop_and_the_last_step_is_saved(tmp_path: Path) -> None:
    assert train(tmp_path, lambda: signal.raise_signal(signal.SIGTERM)) == 3
    assert [one.step for one in holdfast.Run(tmp_path).steps()] == [3]
    assert torch.equal(holdfast.load(tmp_path)["w"], torch.full((3,), 3.0))


@pytest.mark.parametrize("off", [None, False])
def test_with_preemption_off_signals_do_what_they_did(tmp_path: Path, off: bool | None) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    assert train(tmp_path, lambda: signal.raise_signal(signal.SIGTERM), preemption=off) == 9
    assert heard == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_checkpointer_that_is_never_asked_leaves_the_signals_alone(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, {"x": 1}) as ckpt:
        ckpt.step(1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not ckpt.should_stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_in_the_loop_puts_the_handlers_back_too(tmp_path: Path) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, fail)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_save_that_would_be_killed_leaves_the_last_good_step(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, {"x": 1}) as ckpt:
        ckpt.step(1)
        ckpt.save()
        ckpt._stopping.note_save(3600.0)
        ckpt.step(2)
        assert not ckpt.should_stop()
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.should_stop()
        with pytest.raises(holdfast.Refused, match=r"step 2 of .*about 3600.0 s.*Step 1 is the last good one"):
            ckpt.save()
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            ckpt.close()
    assert [one.step for one in holdfast.Run(tmp_path).steps()] == [1]


@pytest.mark.parametrize("background", [False, True])
def test_a_state_that_has_grown_since_the_last_save_is_thought_to_take_longer(
    tmp_path: Path, background: bool, request: pytest.FixtureRequest
) -> None:
    """As AdamW's does in its first step: what took half of the time that is left takes twice of it at four times the size."""
    if background:
        request.getfixturevalue("in_background")
    state = {"x": {"first": torch.zeros(10_000)}}
    with holdfast.Checkpointer(tmp_path / "run", state, preemption=Preemption(window="40s")) as ckpt:
        ckpt.step(1)
        ckpt.save().wait("durable", 30)
        assert not ckpt.should_stop()
        assert ckpt._stopping._past[-1].nbytes == 40_000, "what was saved was counted"
        ckpt._stopping.note_save(20.0, 40_000)
        state["x"]["others"] = torch.zeros(30_000)
        ckpt.step(2)
        signal.raise_signal(signal.SIGUSR1)
        assert ckpt.should_stop()
        with pytest.raises(holdfast.Refused, match=r"step 2 of .*about 80.0 s.*Step 1 is the last good one"):
            ckpt.save()
        del state["x"]["others"]
        assert ckpt.save().wait("durable", 30).step == 2


def test_a_job_without_any_commit_tries_all_the_same(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, {"x": 1}, preemption=Preemption(deadline=time.time() + 20)) as ckpt:
        ckpt._stopping.note_save(3600.0)
        ckpt.step(1)
        assert ckpt.should_stop()
    assert [one.step for one in holdfast.Run(tmp_path).steps()] == [1]
