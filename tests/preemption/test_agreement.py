"""All ranks get the same answer at the same call: in every order of small cases, and on the boards that there are."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Refused
from holdfast.errors import BoardGone
from holdfast.ranks import TorchBoard
from holdfast.run.agreement import Decisions, Stop, StopRegister, _horizon
from holdfast.run.team import Team

from .model import Ending, Program, Replayed, endings

CALLS = 3
NEVER = CALLS + 1


def asking(wishes_from: int, ahead: int) -> Program:
    """A rank that makes its calls, and wishes to stop from one of them on; gives its answers."""

    def program(board: Replayed) -> list[bool]:
        register = StopRegister(board, "job")
        wish = Stop(0, "SIGTERM")
        return [register.ask(n, wish if n >= wishes_from else None, ahead) is not None for n in range(1, CALLS + 1)]

    return program


def deciding(rank: int) -> Program:
    """A rank that wants another value than all others at each call."""

    def program(board: Replayed) -> list[int]:
        decisions = Decisions(board, "due")
        return [decisions.decide(number, 10 * rank + number) for number in (0, 3, 4, 9)]

    return program


def judge_stop(ending: Ending, wishes: tuple[int, ...], ahead: int) -> list[str]:
    wrong = []
    first = ending.results[0]
    if any(answers != first for answers in ending.results):
        wrong.append(f"different answers: {ending.results}")
    if first != sorted(first):
        wrong.append(f"a yes was taken back: {first}")
    stop = _horizon(ending.board["stop/job"]).stop
    wanted = [w for w in wishes if w < NEVER]
    if (stop is not None) != bool(wanted):
        wrong.append(f"wished at {wanted}, and the stop is {stop}")
    if stop is not None and stop.call < min(wanted):
        wrong.append(f"stop at {stop.call}, before anybody wished it")
    if stop is not None and stop.call > CALLS + ahead + 1:
        wrong.append(f"stop at {stop.call}, later than needed")
    quiet = [n for n, w in zip(ending.changes, wishes, strict=True) if w == NEVER]
    if any(n > CALLS for n in quiet):
        wrong.append(f"more than one round trip a call: {quiet}")
    return wrong


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_every_order_all_ranks_stop_at_the_same_call(ranks: int, ahead: int) -> None:
    count = 0
    for wishes in itertools.combinations_with_replacement(range(1, NEVER + 1), ranks):
        for ending in endings([asking(w, ahead) for w in wishes]):
            count += 1
            assert judge_stop(ending, wishes, ahead) == [], (wishes, ending)
    assert count > 20


def test_ranks_that_clear_calls_ahead_by_different_numbers_agree_too() -> None:
    for wishes in itertools.product((1, 2, NEVER), repeat=3):
        for ending in endings([asking(w, ahead) for w, ahead in zip(wishes, (0, 1, 3), strict=True)]):
            assert all(answers == ending.results[0] for answers in ending.results), (wishes, ending)


def test_in_every_order_all_ranks_have_the_same_decisions_with_one_round_trip_each() -> None:
    found = set()
    for ending in endings([deciding(rank) for rank in range(3)]):
        assert all(values == ending.results[0] for values in ending.results), ending
        assert all(n <= 4 for n in ending.changes), ending
        found.add(tuple(ending.results[0]))
    assert len(found) == 3**4, "any rank may be the first at any call"


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_ranks_of_any_pace_agree_over_a_real_store(seed: int) -> None:
    """Four ranks in threads, each as fast as chance has it, wish to stop at some call or never."""
    draw = random.Random(seed)
    store, calls = dist.HashStore(), 12
    wishes = [draw.choice([None, draw.randint(1, calls)]) for _ in range(4)]
    pauses = [[draw.choice([0.0, 0.0, 1e-5, 2e-4]) for _ in range(calls)] for _ in range(4)]
    aheads = [[draw.choice([0, 0, 1, 4]) for _ in range(calls)] for _ in range(4)]

    def rank(number: int) -> list[Any]:
        team = Team((0, 1, 2, 3), number, TorchBoard(store, "job/", 4))
        register = StopRegister(team.board, "job")
        answers: list[Any] = []
        for call in range(1, calls + 1):
            time.sleep(pauses[number][call - 1])
            wish = wishes[number]
            wished = Stop(0, f"rank {number}") if wish is not None and call >= wish else None
            stop = register.ask(call, wished, aheads[number][call - 1])
            answers.append((None if stop is None else stop.reason, team.decide("step", call, number)))
        return answers

    told = in_threads(rank)
    assert told == [told[0]] * 4


def in_threads(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What `work(rank)` gives for each rank, all at a time."""
    results: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(rank: int) -> None:
        start.wait()
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- the boards ---------------------------------------------------------------------------------------------------------

STORES = ["hash", "file", "tcp", "tcp without libuv", "prefix"]


@pytest.fixture(params=STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Opens the same store, once for each rank, as ranks in their own processes would."""
    shared: Any = dist.HashStore()
    if request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), 4)
    elif request.param.startswith("tcp"):
        server = dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=request.param == "tcp")
        yield lambda: dist.TCPStore("127.0.0.1", server.port, 1, False, use_libuv=request.param == "tcp")
    elif request.param == "prefix":
        yield lambda: dist.PrefixStore("job", shared)
    else:
        yield lambda: shared


def test_the_first_rank_to_come_decides_for_all(opened: Callable[[], Any]) -> None:
    boards = [TorchBoard(opened(), "b/", 4) for _ in range(4)]
    for round_number in range(20):
        mine = [b"\x00\xffrank %d" % rank for rank in range(4)]
        heard = in_threads(lambda rank, n=round_number, mine=mine: boards[rank].decide(f"register/{n}", mine[rank]))  # type: ignore[misc]
        assert heard == [heard[0]] * 4
        assert heard[0] in mine
        assert boards[0].read([f"register/{round_number}"]) == [heard[0]]


def test_a_swap_takes_place_only_upon_the_value_that_was_expected(opened: Callable[[], Any]) -> None:
    board, other = TorchBoard(opened(), "b/", 2), TorchBoard(opened(), "b/", 2)
    assert board.swap("k", b"", b"\x92one\x00") == b"\x92one\x00"
    assert other.swap("k", b"", b"two") == b"\x92one\x00"
    assert other.swap("k", b"one", b"two") == b"\x92one\x00"
    assert other.swap("k", b"\x92one\x00", b"two") == b"two"
    assert board.read(["k"]) == [b"two"]


def test_every_change_of_many_ranks_is_made_once(opened: Callable[[], Any]) -> None:
    boards = [TorchBoard(opened(), "b/", 4) for _ in range(4)]

    def add(rank: int) -> list[int]:
        decisions = Decisions(boards[rank], "count")
        return [decisions.decide(number, rank) for number in range(50)]

    told = in_threads(add)
    assert told == [told[0]] * 4


def test_many_calls_leave_one_key() -> None:
    store = dist.HashStore()
    teams = [Team((0, 1), rank, TorchBoard(store, "b/", 2)) for rank in range(2)]
    registers = [StopRegister(team.board, "job") for team in teams]
    for number in range(1, 5001):
        assert [register.ask(number, None) for register in registers] == [None, None]
        values = [team.decide("due", number, number % 7 == rank) for rank, team in enumerate(teams)]
        assert values == [number % 7 == 0] * 2
    assert store.num_keys() == 2
    assert len(teams[0].board.read(["decided/due"])[0]) < 500, "nor does the value grow with the calls"


def test_a_rank_far_behind_hears_what_was_decided_long_ago_without_a_round_trip() -> None:
    store = dist.HashStore()
    fast, slow = (Team((0, 1), rank, TorchBoard(store, "b/", 2)) for rank in range(2))
    decided = [fast.decide("due", number, number % 100 == 0) for number in range(1000)]
    assert slow.decide("due", 0, 0) == 1
    slow.board.swap = None  # type: ignore[method-assign, assignment]
    assert [slow.decide("due", number, 0) for number in range(1000)] == decided


def test_a_rank_that_is_behind_what_the_others_remember_is_told_so() -> None:
    store = dist.HashStore()
    fast, slow = (Team((0, 1), rank, TorchBoard(store, "b/", 2)) for rank in range(2))
    for number in range(1000):
        fast.decide("due", number, number % 2)
    with pytest.raises(Refused, match="due 5: the other ranks are at 999"):
        slow.decide("due", 5, 1)


def test_no_answer_is_made_up_when_the_board_is_gone() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, 1, True)
    team = Team((0, 1), 1, TorchBoard(dist.TCPStore("127.0.0.1", server.port, 1, False), "b/", 2))
    assert team.decide("due", 1, 1) == 1
    server = None
    with pytest.raises(BoardGone, match="does not answer"):
        team.decide("due", 2, 1)
    with pytest.raises(BoardGone, match="does not answer"):
        StopRegister(team.board, "job").ask(1, None)


def test_a_register_that_was_lost_is_an_error_and_not_a_loop() -> None:
    store = dist.HashStore()
    board = TorchBoard(store, "b/", 2)
    decisions = Decisions(board, "due")
    decisions.decide(1, 1)
    board.drop(["decided/due"])
    with pytest.raises(BoardGone, match="has lost decided/due"):
        decisions.decide(2, 1)
