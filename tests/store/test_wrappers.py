"""Each wrapper, around any store, is a store; and what each adds."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import NoSpace, Unavailable
from holdfast.run.history import History
from holdfast.run.prune import remove_steps
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.store.wrap import Limit, Retry, Trace, Wrapped
from holdfast.testing.clock import FakeClock
from holdfast.testing.conformance import StoreSuite, aligned, write_file
from holdfast.testing.faults import Fault, Faulty, Stepping

WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "trace": Trace,
    "retry": Retry,
    "limit": lambda inner: Limit(inner, 1e12),
    "faulty": Faulty,
    "stepping": lambda inner: Stepping(inner, lambda operation, path: None),
    "retry around every third call failing": lambda inner: retrying(
        Faulty(inner, Fault("[!cf]*", times=None, every=3)), tries=50
    ),
    "retry around lost answers of create": lambda inner: retrying(
        Faulty(inner, Fault("create", times=None, every=2, is_answer_lost=True))
    ),
}


def retrying(inner: Store, clock: FakeClock | None = None, tries: int = 4) -> Retry:
    """A Retry that does not really wait."""
    return Retry(inner, tries, sleep=(clock or FakeClock()).sleep)


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[[Store], Store]:
    return WRAPPERS[request.param]


class TestWrappedMemory(StoreSuite):
    @pytest.fixture
    def store(self, wrap: Callable[[Store], Store]) -> Store:
        return wrap(MemoryStore())


class TestWrappedLocal(StoreSuite):
    @pytest.fixture
    def store(self, wrap: Callable[[Store], Store], tmp_path: Path) -> Store:
        return wrap(LocalStore(tmp_path / "root"))


# --- retry ------------------------------------------------------------------------------------------------------------


def test_what_passes_is_tried_again_after_growing_pauses() -> None:
    clock = FakeClock()
    store = retrying(Faulty(MemoryStore(), Fault("list", times=3)), clock)
    assert store.list("") == []
    assert clock.slept == [0.1, 0.2, 0.4]


def test_what_does_not_pass_is_raised_after_the_last_try() -> None:
    faulty = Faulty(MemoryStore(), Fault("read", times=None))
    faulty.create("file", b"")
    with pytest.raises(Unavailable, match="injected"):
        retrying(faulty).read("file")
    assert len(faulty.fired) == 4


@pytest.mark.parametrize("error", [NoSpace, FileNotFoundError, FileExistsError, ZeroDivisionError])
def test_what_is_full_missing_or_taken_is_not_tried_again(error: type[Exception]) -> None:
    faulty = Faulty(MemoryStore(), Fault("create", times=None, error=error))
    with pytest.raises(error):
        retrying(faulty).create("file", b"")
    assert len(faulty.fired) == 1


def test_a_create_whose_answer_was_lost_is_a_success() -> None:
    inner = MemoryStore()
    store = retrying(Faulty(inner, Fault("create", is_answer_lost=True)))
    store.create("commit.json", iter([b"our ", b"record"]))
    assert inner.read("commit.json") == b"our record"


def test_a_create_that_lost_to_another_after_an_error_is_taken() -> None:
    inner = MemoryStore()
    faulty = Faulty(inner, Fault("create"))
    store = Retry(faulty, sleep=lambda seconds: inner.create("commit.json", b"theirs"))
    with pytest.raises(FileExistsError):
        store.create("commit.json", b"ours")
    assert inner.read("commit.json") == b"theirs"


def test_equal_bytes_that_were_there_before_the_first_try_are_taken() -> None:
    store = retrying(MemoryStore())
    store.create("file", b"same")
    with pytest.raises(FileExistsError):
        store.create("file", b"same")


def test_a_read_that_fails_while_a_lost_answer_is_looked_into_is_tried_again() -> None:
    inner = MemoryStore()
    store = retrying(Faulty(inner, Fault("create", is_answer_lost=True), Fault("read")))
    store.create("commit.json", b"ours")
    assert inner.read("commit.json") == b"ours"


def test_a_write_whose_answer_was_lost_may_be_begun_again() -> None:
    inner = MemoryStore()
    store = retrying(Faulty(inner, Fault("write", is_answer_lost=True)))
    write_file(store, "file", b"content")
    assert inner.read("file") == b"content"


def test_a_finish_that_failed_is_not_believed_the_second_time() -> None:
    """Linux reports a failed write-back once: an fsync after a failed one succeeds and says nothing (fsyncgate, 2018)."""
    store = retrying(Faulty(MemoryStore(), Fault("finish")))
    writer = store.write("file", 4096)
    writer.write(0, aligned(b"content"))
    with pytest.raises(Unavailable):
        writer.finish(7)


# --- trace ------------------------------------------------------------------------------------------------------------


def test_a_trace_counts_what_was_asked_and_what_failed() -> None:
    store = Trace(MemoryStore())
    write_file(store, "file", b"content")
    with pytest.raises(FileExistsError):
        store.create("file", b"")
    assert store.totals.log == [("write", "file", 0), ("write_at", "file", 4096), ("finish", "file", 0), ("create", "file", 0)]
    assert store.totals.calls == {"write": 1, "write_at": 1, "finish": 1, "create": 1}
    assert store.totals.nbytes["write_at"] == 4096


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_fault_hits_the_chosen_calls_only() -> None:
    store = Faulty(MemoryStore(), Fault("create", "steps/*", nth=2, times=2))
    outcomes = []
    for path in ("steps/1", "pins/1", "steps/2", "steps/3", "steps/4"):
        try:
            store.create(path, b"")
            outcomes.append("made")
        except Unavailable:
            outcomes.append("failed")
    assert outcomes == ["made", "made", "failed", "failed", "made"]
    assert store.fired == [("create", "steps/2"), ("create", "steps/3")]
    assert store.list("steps") == ["1", "4"]


def test_a_lost_answer_has_taken_effect() -> None:
    store = Faulty(MemoryStore(), Fault("create", is_answer_lost=True))
    with pytest.raises(Unavailable, match="answer lost"):
        store.create("file", b"content")
    assert store.read("file") == b"content"


def test_a_fault_may_hit_within_a_file_that_is_being_written() -> None:
    store = Faulty(MemoryStore(), Fault("write_at", error=NoSpace))
    writer = store.write("file", 4096)
    with pytest.raises(NoSpace):
        writer.write(0, aligned(b"content"))
    writer.abort()
    assert store.list("") == []


@pytest.mark.parametrize("wrapper", [Trace, Retry])
def test_pruning_through_a_wrapper_frees_retired_files(wrapper: Callable[[Store], Store], tmp_path: Path) -> None:
    inner = LocalStore(tmp_path)
    write_file(inner, "file", b"content")
    inner.retire("file", 1 << 20)
    remove_steps(History(wrapper(inner)), [], recycle_bytes=0)
    assert list((tmp_path / ".recycle").iterdir()) == []


# --- limit ------------------------------------------------------------------------------------------------------------


def written(store: Any, path: str, blocks: int) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    writer = store.write(path, blocks << 20)
    for number in range(blocks):
        writer.write(number << 20, memoryview(memory))
    writer.finish(blocks << 20)


def test_a_limited_store_takes_so_many_bytes_a_second_and_no_longer() -> None:
    clock = FakeClock()
    store = Limit(MemoryStore("limit"), 10 << 20, clock.sleep, clock.perf_counter)
    start = clock.now
    written(store, "a", 20)
    assert clock.now - start == pytest.approx(2.0)
    clock.now += 100  # what was not used is not saved up
    start = clock.now
    written(store, "b", 5)
    store.create("c", [bytes(5 << 20), bytes(10 << 20)])
    assert clock.now - start == pytest.approx(2.0)
    assert store.size("c") == 15 << 20
    assert len(store.read("a")) == 20 << 20
    assert clock.now - start == pytest.approx(2.0)


def test_a_store_that_is_slower_than_its_limit_is_not_slowed_down() -> None:
    clock = FakeClock()

    class Slow(Wrapped):
        def call(self, operation: str, path: str, run: Any, nbytes: int = 0) -> Any:
            clock.now += nbytes / (1 << 20)
            return run()

    start = clock.now
    written(Limit(Slow(MemoryStore("slow")), 10 << 20, clock.sleep, clock.perf_counter), "a", 7)
    assert clock.now - start == pytest.approx(7.0)
    assert not clock.slept
