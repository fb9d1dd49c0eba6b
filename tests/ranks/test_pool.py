"""Pools of ranks: what they return, what they raise, what they survive, and that nothing of them stays."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from .errors import RankDied, RankError, RanksFailed, RankTimeout
from .pools import TESTS, Pool, close_all, pool


def add_up(x: float, scale: float = 1.0) -> tuple[int, float]:
    total = torch.tensor(x * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), float(total) * scale


def who() -> tuple[int, str, str, int]:
    return os.getpid(), os.getcwd(), os.environ["RANK"], torch.get_num_threads()


def roll() -> tuple[float, float, str | None, float]:
    seen = random.random(), float(torch.rand(())), os.environ.get("LEFT"), float(torch.ones(()).element_size())
    os.environ["LEFT"] = "behind"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    return seen


def setting() -> str | None:
    return os.environ.get("HOLDFAST_LEFT")


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like it")
    return "fine"


def fail_then_wait() -> None:
    fail_on(1)
    dist.barrier()


class Odd(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")


def fail_oddly() -> None:
    raise Odd(1, 2)


def kill_myself(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def sleep_on(rank: int, seconds: float) -> int:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return dist.get_rank()


def speak() -> None:
    print("said aloud")


def use_the_store() -> bytes:
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    store.set("alive", "yes")
    return bytes(store.get("alive"))


def tensors(name: str) -> Any:
    return {name: torch.arange(6).view(2, 3)[:, 1]}


def are_gone(pids: list[int], seconds: float = 10) -> bool:
    """Whether no such process is left; those of a detached parent are reaped by init, a moment later."""
    end = time.monotonic() + seconds
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_ranks_meet_in_one_world_and_results_come_by_rank(world: int) -> None:
    wanted = 2.0 * world * (world + 1) / 2
    assert pool(world).run(add_up, 2.0) == [(rank, wanted) for rank in range(world)]
    assert pool(world).run(add_up, 2.0, scale=2.0) == [(rank, 2 * wanted) for rank in range(world)]


def test_a_world_is_made_once_and_each_run_begins_in_the_same_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = pool(2).run(who)
    rolls = [pool(2).run(roll) for _ in range(2)]
    assert rolls[0] == rolls[1]
    assert rolls[0][0] == rolls[0][1]
    assert pool(2).run(who) == first
    assert [(cwd, rank, threads) for _, cwd, rank, threads in first] == [(str(tmp_path), str(r), 1) for r in range(2)]


def test_ranks_have_the_settings_of_who_asks_and_not_those_of_who_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    close_all()
    monkeypatch.setenv("HOLDFAST_LEFT", "at the start")
    assert pool(1).run(setting) == ["at the start"]
    monkeypatch.delenv("HOLDFAST_LEFT")
    assert pool(1).run(setting) == [None]


def test_tensors_come_back_by_value() -> None:
    assert all(result["x"].tolist() == [1, 4] for result in pool(2).run(tensors, "x"))


def test_an_exception_is_one_error_that_names_ranks_and_shows_their_tracebacks() -> None:
    with pytest.raises(RanksFailed, match=r"failed on rank 1 of 2") as caught:
        pool(2).run(fail_on, 1)
    assert isinstance(caught.value.errors[1], ValueError)
    assert "in fail_on" in str(caught.value)
    assert pool(2).run(add_up, 1.0)[0] == (0, 3.0)


def test_with_catch_exceptions_are_results_and_the_pool_goes_on() -> None:
    before = pool(2)
    good, bad = before.run(fail_on, 1, catch=True)
    assert good == "fine"
    assert isinstance(bad, ValueError)
    assert pool(2) is before


def test_an_exception_that_cannot_be_pickled_is_told_in_words() -> None:
    errors = pool(2).run(fail_oddly, catch=True)
    assert [(type(error), str(error)) for error in errors] == [(RankError, "Odd: odd")] * 2


def test_ranks_that_wait_for_one_that_failed_do_not_hold_up_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranks.pools.GRACE_SECONDS", 0.5)
    with pytest.raises(RanksFailed) as caught:
        pool(3).run(fail_then_wait)
    assert {rank: type(error) for rank, error in caught.value.errors.items()} == {0: RankTimeout, 1: ValueError, 2: RankTimeout}


def test_a_killed_rank_is_a_result_and_the_next_run_has_a_new_pool() -> None:
    before = pool(2)
    died, alive = before.run(kill_myself, 0, catch=True)
    assert isinstance(died, RankDied)
    assert alive == 1
    assert pool(2) is not before
    assert pool(2).run(add_up, 1.0) == [(0, 3.0), (1, 3.0)]


def test_the_test_kills_a_rank_in_the_middle_of_its_run() -> None:
    started = pool(2).start(sleep_on, 1, 30)
    started.kill(1)
    alive, died = started.results(timeout=20, catch=True)
    assert alive == 0
    assert isinstance(died, RankDied)


def test_the_store_of_a_world_outlives_rank_0() -> None:
    assert pool(2).run(use_the_store, catch=True)[1] == b"yes"


def test_a_run_out_of_time_says_which_ranks_were_still_running_and_where() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)failed on rank 1 of 2.*still running after 0\.\d s.*in sleep_on") as caught:
        pool(2).run(sleep_on, 1, 30, timeout=0.5)
    assert isinstance(caught.value.errors[1], RankTimeout)


def test_what_ranks_print_is_printed_by_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    pool(2).run(speak)
    assert capsys.readouterr().out == "rank 0: said aloud\nrank 1: said aloud\n"


def test_a_fresh_pool_replaces_the_one_before_which_is_gone() -> None:
    before = pool(2)
    after = pool(2, fresh=True)
    assert not set(before.pids) & set(after.pids)
    assert are_gone(before.pids)


def test_a_pool_takes_one_run_at_a_time() -> None:
    started = pool(2).start(sleep_on, 0, 0.2)
    with pytest.raises(RuntimeError, match="busy with"):
        pool(2).run(add_up, 1.0)
    assert started.results() == [0, 1]


def test_everything_is_gone_after_the_end_and_can_be_had_again() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    pids = [pid for world in (2, 3) for pid in pool(world).pids]
    servers = {psutil.Process(pid).ppid() for pid in pids}
    close_all()
    assert are_gone([*pids, *servers])
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert pool(2).run(add_up, 1.0) == [(0, 3.0), (1, 3.0)]


def test_ranks_die_with_the_test_process_even_if_it_is_killed() -> None:
    script = "import os, signal; from ranks import pool; print(*pool(2).pids, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(TESTS)}, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL
    assert len(pids) == 2
    assert are_gone(pids)


def test_a_pool_at_its_end_refuses_work() -> None:
    made = Pool(1)
    made.close()
    with pytest.raises(RuntimeError, match="at its end"):
        made.run(add_up, 1.0)
