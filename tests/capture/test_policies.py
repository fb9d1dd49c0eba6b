"""What users set: memory, what happens when it is full, failures, how much may be lost, how it ends."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import bit_differences

import holdfast
from holdfast.agent.client import status_of
from holdfast.run.timings import times_of, unaccounted
from holdfast.store.local import LocalStore
from holdfast.testing.faults import Fault, Faulty

from .jobs import Job, stored
from .stores import Gated

pytestmark = pytest.mark.usefixtures("in_background")
EACH = holdfast.Every(steps=1)


def steps_of(run: Path) -> list[int]:
    return [step.step for step in holdfast.Run(run).steps()]


def test_a_handle_goes_from_begun_to_durable(tmp_path: Path) -> None:
    job, store = Job(), Gated(LocalStore(tmp_path / "run"))
    with holdfast.Checkpointer(store, job.state, save=EACH) as ckpt:
        ckpt.resume()
        store.gate.clear()
        job.train()
        handle = ckpt.step(1)
        assert handle is not None
        handle.wait("captured", 10)
        assert not handle.is_over
        with pytest.raises(holdfast.Deadline, match=r"step 1 was not durable within 0\.1 s; it is captured"):
            handle.wait("durable", 0.1)
        with pytest.raises(holdfast.HoldfastError, match="remote is not available"):
            handle.wait("remote")
        store.gate.set()
        assert handle.wait("durable", 10).level == "durable"
        assert handle.error is None


def test_a_store_that_blocks_holds_up_no_step(tmp_path: Path) -> None:
    """The saves that there is no memory for are left out; when the store answers again, saving goes on."""
    job, store = Job(), Gated(LocalStore(tmp_path / "run"))
    with holdfast.Checkpointer(store, job.state, save=EACH) as ckpt:
        ckpt.resume()
        job.train()
        first = ckpt.step(1)
        assert first is not None
        first.wait("durable", 20)
        store.gate.clear()
        left_out = 0
        for step in range(2, 30):
            job.train()
            left_out += ckpt.step(step) is None
        assert store.waiting.is_set()
        assert left_out >= 20
        store.gate.set()
        ckpt.save().wait("durable", 30)
    assert steps_of(tmp_path / "run")[-1] == 29
    known = job.copy()
    assert bit_differences(stored(tmp_path / "run", 29), known) == []


def test_a_store_that_blocks_beyond_the_deadline_is_an_error_of_a_later_call(tmp_path: Path) -> None:
    job, store = Job(), Gated(LocalStore(tmp_path / "run"))
    ckpt = holdfast.Checkpointer(store, job.state, save=holdfast.Every(steps=5), deadline=0.5)
    ckpt.resume()
    store.gate.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(1, 16):
            job.train()
            ckpt.step(step)
            time.sleep(0.08)
        store.gate.set()
        ckpt.close()
    assert "step 5 is not durable after 1 s" in str(told[0].message)


def test_every_third_write_fails_and_training_goes_on(tmp_path: Path) -> None:
    job = Job()
    fault = Fault("write_at", "*", nth=3, times=None, every=3)
    store = Faulty(LocalStore(tmp_path / "run"), fault)
    known, handles = {}, {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with holdfast.Checkpointer(store, job.state, save=EACH, on_full="wait", keep=holdfast.Keep(last=None)) as ckpt:
            ckpt.resume()
            for step in range(1, 21):
                job.train()
                handles[step] = ckpt.step(step)
                known[step] = job.copy()
            store.faults.clear()
            with contextlib.suppress(holdfast.Unavailable):  # what was begun before may fail yet
                ckpt.save().wait("durable", 30)
            assert ckpt.save().wait("durable", 30).step == 20
    failed = [step for step, handle in handles.items() if handle is not None and handle.error is not None]
    assert fault.fired > 3
    assert failed
    assert len([one for one in told if "injected" in str(one.message)]) >= len(failed) - 1
    there = steps_of(tmp_path / "run")
    assert set(there) >= set(known) - set(failed)
    for step in there:
        assert bit_differences(stored(tmp_path / "run", step), known[step]) == []


def test_on_failure_raise_raises_at_the_next_call(tmp_path: Path) -> None:
    job = Job()
    store = Faulty(LocalStore(tmp_path / "run"), Fault("finish", "*", times=None))

    def train() -> None:
        with holdfast.Checkpointer(store, job.state, save=EACH, on_failure="raise") as ckpt:
            ckpt.resume()
            for step in range(1, 200):
                job.train()
                ckpt.step(step)
                time.sleep(0.01)

    with pytest.raises(holdfast.Unavailable, match="injected"):
        train()
    assert steps_of(tmp_path / "run") == []


def test_a_newer_attempt_stops_the_older_one_at_a_later_call(tmp_path: Path) -> None:
    job = Job()

    def train() -> None:
        with holdfast.Checkpointer(tmp_path / "run", job.state, save=EACH) as ckpt:
            ckpt.resume()
            job.train()
            ckpt.step(1).wait("durable", 20)  # type: ignore[union-attr]
            holdfast.Run(tmp_path / "run").rollback(1)
            for step in range(2, 400):
                job.train()
                ckpt.step(step)
                time.sleep(0.01)

    with pytest.raises(holdfast.Superseded):
        train()


def test_memory_that_holds_no_version_is_refused_with_what_it_would_cost(tmp_path: Path) -> None:
    job = Job()
    ckpt = holdfast.Checkpointer(tmp_path / "run", job.state, memory="1MB")
    with pytest.raises(holdfast.Refused, match=r'memory=.1MB. does not hold it.*at 1 GB/s.*on_full="wait"'):
        ckpt.resume()


def test_memory_that_holds_no_version_may_be_waited_for(tmp_path: Path) -> None:
    job, known = Job(), {}
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, memory="1MB", on_full="wait", save=EACH, keep=holdfast.Keep(last=None)
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 4):
            job.train()
            handle = ckpt.step(step)
            assert handle is not None
            assert handle.level == "durable"
            known[step] = job.copy()
    for step, wanted in known.items():
        assert bit_differences(stored(tmp_path / "run", step), wanted) == []


@pytest.mark.parametrize(("versions", "memory"), [(1, 7_000_000), (2, 12_000_000), (3, 30_000_000)])
def test_memory_is_kept_to(tmp_path: Path, versions: int, memory: int) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, memory=memory, save=EACH) as ckpt:
        ckpt.resume()
        for step in range(1, 31):
            job.train()
            ckpt.step(step)
        ckpt.save().wait("durable", 30)
        status = status_of(str(tmp_path / "run"))
        assert status is not None
        assert status.arena_bytes <= memory
        nbytes = sum(t.numel() * t.element_size() for t in job.net.parameters()) * 3
        assert versions * nbytes * 0.95 < status.arena_bytes
        assert status.arena_bytes < (versions + 1) * nbytes
    known = job.copy()
    assert bit_differences(stored(tmp_path / "run", 30), known) == []


def test_coalesce_makes_room_for_what_is_newer(tmp_path: Path) -> None:
    job, store = Job(), Gated(LocalStore(tmp_path / "run"))
    with holdfast.Checkpointer(store, job.state, save=EACH, on_full="coalesce") as ckpt:
        ckpt.resume()
        job.train()
        ckpt.step(1).wait("durable", 20)  # type: ignore[union-attr]
        store.gate.clear()
        handles = {}
        for step in range(2, 12):
            job.train()
            handles[step] = ckpt.step(step)
            time.sleep(0.05)
        begun = {step: handle for step, handle in handles.items() if handle is not None}
        assert len(begun) > 3
        store.gate.set()
        last = begun[max(begun)]
        last.wait("durable", 30)
        dropped = [step for step, handle in begun.items() if handle.error is not None]
        assert dropped
        assert all("took its place" in str(begun[step].error) for step in dropped)
    assert set(steps_of(tmp_path / "run")) <= {1, 2, 11, *(set(begun) - set(dropped))}


def test_lose_at_most_says_when_the_last_durable_step_is_too_old(tmp_path: Path) -> None:
    job, store = Job(), Gated(LocalStore(tmp_path / "run"))
    ckpt = holdfast.Checkpointer(store, job.state, save=EACH, lose_at_most=1.0)
    ckpt.resume()
    for step in range(1, 20):
        job.train()
        ckpt.step(step)
        time.sleep(0.1)
    store.gate.clear()

    def train() -> None:
        for step in range(20, 60):
            job.train()
            ckpt.step(step)
            time.sleep(0.1)

    with pytest.raises(holdfast.Overdue, match=r"the last durable state \(step \d+\) is \d s old, and lose_at_most is 1 s"):
        train()
    store.gate.set()
    ckpt.close()


def test_leaving_saves_the_last_step_and_an_exception_passes(tmp_path: Path) -> None:
    job = Job()

    def train() -> None:
        with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=3)) as ckpt:
            ckpt.resume()
            for step in range(1, 9):
                job.train()
                ckpt.step(step)
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        train()
    assert steps_of(tmp_path / "run") == [3, 6]
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=100)) as ckpt:
        for step in range(ckpt.resume() + 1, 12):
            job.train()
            ckpt.step(step)
    assert steps_of(tmp_path / "run")[-1] == 11


def test_a_pin_is_made_when_the_step_is_there(tmp_path: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=EACH, keep=holdfast.Keep(last=1)) as ckpt:
        ckpt.resume()
        for step in range(1, 8):
            job.train()
            ckpt.step(step)
            if step == 3:
                ckpt.save(pin="third")
        with pytest.raises(holdfast.Refused, match="third already names step 3"):
            ckpt.save(pin="third")
    end = time.monotonic() + 10
    while steps_of(tmp_path / "run") != [3, 7] and time.monotonic() < end:
        time.sleep(0.05)  # pruning follows what is durable
    assert steps_of(tmp_path / "run") == [3, 7]
    assert holdfast.Run(tmp_path / "run").find("third").step == 3


def test_a_part_of_the_state_is_saved_within_the_call(tmp_path: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=3), keep=holdfast.Keep(last=9)) as ckpt:
        ckpt.resume()
        for step in range(1, 5):
            job.train()
            ckpt.step(step)
        assert ckpt.save(select="model.*").level == "durable"
    with holdfast.open(tmp_path / "run") as checkpoint:
        assert checkpoint.step == 4


class Cache(holdfast.Provider):
    """A large tensor that only the optimizer's step changes; and one that changes at any time."""

    kind: ClassVar[str] = "stable"

    def __init__(self, fill: float) -> None:
        self.tensor = torch.full((300, 300), fill)

    def capture(self) -> Any:
        return {"cache": self.tensor, "size": len(self.tensor)}

    def restore(self, state: Any) -> None:
        self.tensor.copy_(state["cache"])


class Volatile(Cache):
    kind: ClassVar[str] = "volatile"


@pytest.mark.parametrize("kind", [Cache, Volatile])
def test_a_provider_is_captured_and_restored(tmp_path: Path, kind: type[Cache]) -> None:
    job, cache = Job(), kind(0.0)
    state = holdfast.State(model=job.net, optimizer=job.optimizer, cache=cache)
    with holdfast.Checkpointer(
        tmp_path / "run", state, save=EACH, keep=holdfast.Keep(last=None), on_full="wait", agent=False
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 11):
            job.train()
            cache.tensor.fill_(step)
            ckpt.step(step)
            if kind is Volatile:
                cache.tensor.fill_(-1)
    assert cache.nbytes() == 300 * 300 * 4
    for step in range(1, 11):
        other = kind(-1.0)
        fresh = Job(seed=3)
        fresh.train()
        holdfast.restore(tmp_path / "run", holdfast.State(model=fresh.net, optimizer=fresh.optimizer, cache=other), step=step)
        assert torch.equal(other.tensor, torch.full((300, 300), float(step)))


@pytest.mark.parametrize("agent", [True, False])
def test_times_are_kept_and_add_up(tmp_path: Path, agent: bool) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=2), agent=agent) as ckpt:
        ckpt.resume()
        for step in range(1, 31):
            job.train()
            ckpt.step(step)
            time.sleep(0.02)
    end = time.monotonic() + 10
    while (found := times_of(LocalStore(tmp_path / "run")))[-1].step < 30 and time.monotonic() < end:
        time.sleep(0.05)  # the agent keeps the last record after it has said that the step is durable
    assert {record.step for record in found} >= set(range(4, 31, 2)) - {r.step for r in found if r.outcome == "skipped"}
    for record in found:
        if record.outcome == "committed":
            assert unaccounted(record) < 0.05
            assert {"capture", "step", "barrier", "write", "fsync", "commit"} <= {p.name for r in record.ranks for p in r.phases}


def test_everything_goes_back_to_where_it_was(tmp_path: Path) -> None:
    """Descriptors, threads and mappings after a Checkpointer has ended are those from before."""
    job = Job()

    def look() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:holdfast-arena")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), maps

    def life(first: int) -> None:
        with holdfast.Checkpointer(tmp_path / "run", job.state, save=EACH) as ckpt:
            ckpt.resume()
            for step in range(first, first + 4):
                job.train()
                ckpt.step(step)

    life(1)
    gc.collect()  # what the tests before have left in tracebacks
    end = time.monotonic() + 10
    before = look()
    for number in range(1, 4):
        life(1 + 4 * number)
    while look() > before and time.monotonic() < end:  # the thread that waits for the agent's end
        time.sleep(0.05)
    after = look()
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] == before[2] == 0


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("coding", ["zstd", "planes", "adaptive", {"optimizer.*": "planes", "*": "raw"}])
def test_what_is_coded_on_the_way_comes_back_as_it_was(tmp_path: Path, agent: bool, coding: Any) -> None:
    job, known = Job(), {}
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=EACH, coding=coding, agent=agent, on_full="wait", keep=holdfast.Keep(last=None)
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 5):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
    for step, wanted in known.items():
        assert bit_differences(stored(tmp_path / "run", step), wanted) == []
