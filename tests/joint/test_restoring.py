"""Loads by several ranks: what one rank finds wrong is the error of all, and what it does to the state is done to all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch.distributed.tensor import DTensor, Partial

import holdfast
from holdfast.store.base import Reader
from holdfast.store.local import LocalStore
from holdfast.store.wrap import Wrapped

from .breaking import Broken, Fault, die, no_space, unavailable
from .outcomes import Outcome, judge_outcomes, meet, tried
from .states import held, mesh_of, numbers
from .stories import in_a_new_world

WORLD = 3
DEADLINE = 3.0
LONG = 20.0

Change = Callable[[dict[str, Any], int], None]
"""Makes the live state of a rank another one than was stored."""


class Lying(Wrapped):
    """A store that gives this rank other bytes than are there: of each file whose path ends so, the first one is wrong."""

    def __init__(self, path: Path, ending: str) -> None:
        super().__init__(LocalStore(path))
        self.ending = ending

    def open(self, path: str) -> Reader:
        reader = super().open(path)
        return LyingReader(reader) if self.ending and path.endswith(self.ending) else reader


class LyingReader:
    def __init__(self, inner: Reader) -> None:
        self._inner, self.nbytes = inner, inner.nbytes

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        done = self._inner.read_into(offset, targets)
        memoryview(targets[0]).cast("B")[0] ^= 1
        return done

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True)
class After:
    """What a rank has after a load that it tried."""

    outcome: Outcome
    touched: str | None
    is_unchanged: bool
    """Whether the state is in every bit what it was before."""
    fallbacks: tuple[str, ...] = ()
    waived: tuple[str, ...] = ()
    more: tuple[Outcome, ...] = ()


def save_steps(run: Path, last: int) -> None:
    rank = dist.get_rank()
    for step in range(1, last + 1):
        holdfast.save(run, held(step, rank), step, deadline=LONG)


def restored(state: holdfast.State, before: str, load: Callable[[], Any], more: Sequence[Callable[[], Any]] = ()) -> After:
    """Try a load, and then more calls; what the state is after the load."""
    ledgers: list[holdfast.Ledger] = []

    def call() -> Any:
        made = load()
        if isinstance(made, holdfast.Ledger):
            ledgers.append(made)
        return made

    outcome = tried(call)
    touched, is_unchanged = state.touched, state.digest() == before
    fallbacks = tuple(ledgers[0].fallbacks) if ledgers else ()
    waived = tuple(ledgers[0].waived) if ledgers else ()
    return After(outcome, touched, is_unchanged, fallbacks, waived, tuple(tried(one) for one in more))


def outcomes_of(found: Sequence[After]) -> list[Outcome]:
    return [one.outcome for one in found]


# --- corrupt bytes ----------------------------------------------------------------------------------------------------


def load_where_one_reads_wrong(run: Path, odd: int, ending: str, stage: bool, nodes: bool) -> After:
    """Rank `odd` reads wrong bytes of step 2. With `nodes`, each rank is a node of its own, and reads alone."""
    rank = dist.get_rank()
    if nodes:
        os.environ["HOLDFAST_NODE"] = f"node{rank}"
    save_steps(run, 2)
    state = holdfast.State(rng=False, **held(9, rank))
    before = state.digest()
    store = Lying(run, ending if rank == odd else "")

    def load_step_1() -> Any:
        store.ending = ""
        return holdfast.restore(store, state, step=1, deadline=LONG)

    return restored(
        state, before, lambda: holdfast.restore(store, state, step=2, stage=stage, deadline=LONG),
        [lambda: holdfast.save(run, state, 3, deadline=LONG), load_step_1, lambda: holdfast.save(run, state, 3, deadline=LONG)],
    )  # fmt: skip


@pytest.mark.parametrize("nodes", [False, True], ids=["one_node", "a_node_for_each"])
@pytest.mark.parametrize("odd", [0, 2])
def test_wrong_bytes_on_one_rank_touch_the_state_on_all_until_a_load_succeeds(tmp_path: Path, odd: int, nodes: bool) -> None:
    found = in_a_new_world(WORLD, load_where_one_reads_wrong, tmp_path, odd, ".safetensors", False, nodes)
    assert judge_outcomes(outcomes_of(found), LONG) == []
    assert {one.outcome.error for one in found} == {"Corrupt"}
    assert all("step 2" in str(one.touched) for one in found), "the state is touched on all ranks"
    refused, loaded, saved = zip(*(one.more for one in found), strict=True)
    assert {o.error for o in refused} == {"Refused"}
    assert all("not to be saved" in o.text for o in refused)
    assert [o.step for o in loaded] == [1] * WORLD
    assert [o.step for o in saved] == [3] * WORLD
    assert [step.step for step in holdfast.Run(tmp_path).steps()] == [1, 2, 3]


@pytest.mark.parametrize("nodes", [False, True], ids=["one_node", "a_node_for_each"])
def test_with_stage_wrong_bytes_on_one_rank_touch_nothing_anywhere(tmp_path: Path, nodes: bool) -> None:
    found = in_a_new_world(WORLD, load_where_one_reads_wrong, tmp_path, 1, ".safetensors", True, nodes)
    assert judge_outcomes(outcomes_of(found), LONG) == []
    assert {one.outcome.error for one in found} == {"Corrupt"}
    assert [one.touched for one in found] == [None] * WORLD
    assert all(one.is_unchanged for one in found)
    saved, loaded, later = zip(*(one.more for one in found), strict=True)
    assert [o.step for o in (*saved, *loaded)] == [3] * WORLD + [1] * WORLD, "what was not touched may be saved"
    assert {o.error for o in later} == {"Refused"}, "step 3 is there"


def damage(run: Path, step: int, tensor: str) -> str:
    """Flip a bit of a stored tensor; the path of its file in the run."""
    with holdfast.open(run, step=step) as checkpoint:
        wanted = checkpoint[tensor][:].numpy().tobytes()
    for path in sorted(run.glob("steps/*/n*.safetensors")):
        content = bytearray(path.read_bytes())
        if (at := content.find(wanted)) >= 0:
            content[at + 5] ^= 4
            path.write_bytes(content)
            return str(path.relative_to(run))
    raise AssertionError(f"{tensor} of step {step} is in no file")


def resume(run: Path, stage: bool) -> After:
    rank = dist.get_rank()
    state = holdfast.State(rng=False, **held(9, rank))
    before = state.digest()
    with holdfast.Checkpointer(run, state, save=holdfast.Every(steps=1), deadline=LONG, on_failure="raise") as ckpt:
        after = restored(state, before, lambda: ckpt.resume(stage=stage))
        ledger = ckpt.ledger
        is_step_1 = holdfast.State(rng=False, **held(1, rank)).digest() == state.digest()
        saved = tried(lambda: ckpt.step(5))
    fallbacks = tuple(ledger.fallbacks) if ledger else ()
    return After(after.outcome, after.touched, is_step_1, fallbacks, (), (saved,))


@pytest.mark.parametrize("stage", [False, True])
def test_resume_falls_back_on_all_ranks_to_the_same_step_and_says_why(tmp_path: Path, stage: bool) -> None:
    """Steps 2 and 3 are damaged in what rank 1, and rank 2, alone hold."""
    pool(WORLD).run(save_steps, tmp_path, 3)
    files = [damage(tmp_path, 2, "own.r1"), damage(tmp_path, 3, "own.r2")]
    found = pool(WORLD).run(resume, tmp_path, stage)
    assert judge_outcomes(outcomes_of(found), LONG) == []
    assert [one.outcome.step for one in found] == [1] * WORLD
    assert [one.touched for one in found] == [None] * WORLD
    assert all(one.is_unchanged for one in found), "the state is that of step 1"
    for one in found:
        assert len(one.fallbacks) == 2
        assert files[1] in one.fallbacks[0]
        assert files[0] in one.fallbacks[1]
    assert [one.more[0].step for one in found] == [5] * WORLD
    assert holdfast.Run(tmp_path).latest().step == 5  # type: ignore[union-attr]


def test_resume_is_corrupt_on_all_ranks_where_no_step_is_intact(tmp_path: Path) -> None:
    pool(WORLD).run(save_steps, tmp_path, 1)
    damage(tmp_path, 1, "own.r0")
    found = pool(WORLD).run(resume_only, tmp_path)
    assert {o.error for o in found} == {"Corrupt"}


def resume_only(run: Path) -> Outcome:
    with contextlib.suppress(holdfast.HoldfastError), holdfast.Checkpointer(run, held(9, dist.get_rank()), deadline=LONG) as ckpt:
        return tried(ckpt.resume)
    raise AssertionError


# --- differences ------------------------------------------------------------------------------------------------------


def another_shape(state: dict[str, Any], rank: int) -> None:
    state["own"][f"r{rank}"] = torch.zeros(3)


def another_type(state: dict[str, Any], rank: int) -> None:
    state["plain"]["same"] = state["plain"]["same"].to(torch.float64)


def one_more(state: dict[str, Any], rank: int) -> None:
    state["own"]["new"] = torch.zeros(3)


def one_less(state: dict[str, Any], rank: int) -> None:
    state["own"] = None  # an empty dict would take all that is stored


def load_where_one_differs(run: Path, odd: int, change: Change, waive: str) -> After:
    rank = dist.get_rank()
    save_steps(run, 1)
    live = held(9, rank)
    if rank == odd:
        change(live, rank)
    state = holdfast.State(rng=False, **live)
    return restored(state, state.digest(), lambda: holdfast.restore(run, state, waive=waive, deadline=LONG))


@pytest.mark.parametrize(
    ("change", "name"),
    [(another_shape, "own.r1"), (another_type, "plain.same"), (one_more, "own.new"), (one_less, "own.r1")],
)
def test_a_difference_on_one_rank_is_a_mismatch_on_all_and_nothing_is_touched(tmp_path: Path, change: Change, name: str) -> None:
    found = pool(WORLD).run(load_where_one_differs, tmp_path, 1, change, "")
    assert judge_outcomes(outcomes_of(found), LONG) == []
    assert {one.outcome.error for one in found} == {"Mismatch"}
    assert all(name in one.outcome.text for one in found)
    assert [one.touched for one in found] == [None] * WORLD
    assert all(one.is_unchanged for one in found)


def test_what_no_rank_takes_is_listed_by_all_if_it_is_waived(tmp_path: Path) -> None:
    found = pool(WORLD).run(load_where_one_differs, tmp_path, 1, one_less, "own.r1")
    assert [one.outcome.step for one in found] == [1] * WORLD
    assert [one.waived for one in found] == [("own.r1",)] * WORLD


def load_stages(run: Path, shift: int) -> list[str]:
    """Each rank holds names of its own, and loads those that another one has saved."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = {f"l{rank * 3 + i}": {"w": numbers(f"l{rank * 3 + i}", 1, 7, 3)} for i in range(3)}
    holdfast.save(run, {"model": layers, "stage": {"done": 5}}, 1, deadline=LONG)
    mine = (rank + shift) % world
    live: dict[str, Any] = {f"l{mine * 3 + i}": {"w": torch.zeros(7, 3)} for i in range(3)}
    ledger = holdfast.restore(run, {"model": live, "stage": {"done": 0}}, deadline=LONG)
    assert len(ledger.filled) == 4, ledger
    return [name for name, layer in live.items() if not torch.equal(layer["w"], numbers(name, 1, 7, 3))]


@pytest.mark.parametrize("shift", [0, 1])
def test_ranks_that_hold_other_names_load_their_own(tmp_path: Path, shift: int) -> None:
    assert pool(WORLD).run(load_stages, tmp_path, shift) == [[]] * WORLD


# --- ranks that fail --------------------------------------------------------------------------------------------------


def cannot_be_taken_apart(run: Path, odd: int) -> After:
    """The live state of one rank is refused before anything is compared."""
    rank = dist.get_rank()
    save_steps(run, 1)
    live = held(9, rank)
    state = holdfast.State(rng=False, **live)
    before = state.digest()
    if rank == odd:
        live["own"]["partial"] = DTensor.from_local(torch.zeros(3), mesh_of(*range(WORLD)), [Partial()], run_check=False)
        state = holdfast.State(rng=False, **live)
    outcome = tried(lambda: holdfast.restore(run, state, deadline=DEADLINE))
    return After(outcome, state.touched, rank == odd or state.digest() == before)


def test_a_state_that_one_rank_cannot_take_apart_is_the_error_of_all(tmp_path: Path) -> None:
    found = pool(WORLD).run(cannot_be_taken_apart, tmp_path, 1)
    assert judge_outcomes(outcomes_of(found), DEADLINE) == []
    assert {one.outcome.error for one in found} == {"Unsupported"}, [one.outcome for one in found]
    assert all("own.partial" in one.outcome.text for one in found)
    assert all(one.touched is None and one.is_unchanged for one in found)


def load_without(directory: Path, absent: int) -> list[Outcome]:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    run = directory / "run"
    save_steps(run, 1)
    state = held(9, rank)
    found = []
    if rank != absent:
        found.append(tried(lambda: holdfast.restore(run, state, deadline=DEADLINE)))
    meet(directory, "over", rank, everybody)
    if rank == absent:
        time.sleep(0.5)  # otherwise it would seem to come too late to the first
    return [*found, tried(lambda: holdfast.restore(run, state, deadline=DEADLINE))]


@pytest.mark.parametrize("absent", [0, 1], ids=["the_leader", "another_rank"])
def test_a_rank_that_does_not_come_to_a_load_is_named_and_the_next_load_succeeds(tmp_path: Path, absent: int) -> None:
    results = in_a_new_world(WORLD, load_without, tmp_path, absent)
    first = [found[0] for rank, found in enumerate(results) if rank != absent]
    assert judge_outcomes(first, DEADLINE) == []
    assert {o.error for o in first} == {"Deadline"}
    assert all(re.search(rf"waited \d\.\d s in '\w+' for rank {absent}\b", o.text) for o in first), first
    assert [found[-1].step for found in results] == [1] * WORLD, results


def load_where_one_dies(directory: Path, odd: int) -> After:
    rank, everybody = dist.get_rank(), range(dist.get_world_size())
    live = [r for r in everybody if r != odd]
    run = directory / "run"
    holdfast.save(run, held(1, rank, sharded=False), 1, deadline=LONG)
    state = holdfast.State(rng=False, **held(9, rank, sharded=False))
    before = state.digest()
    store = Broken(LocalStore(run), *([Fault(die, "read_into")] if rank == odd else []))
    again = lambda: holdfast.restore(run, state, waive="own.*", ranks=live, deadline=LONG)  # noqa: E731
    return restored(
        state, before, lambda: holdfast.restore(store, state, deadline=DEADLINE),
        [lambda: holdfast.save(run, state, 2, ranks=live, deadline=LONG), again],
    )  # fmt: skip


@pytest.mark.parametrize("odd", [0, 1], ids=["the_leader", "another_rank"])
def test_a_rank_that_is_killed_while_it_reads_is_named_and_the_others_load_without_it(tmp_path: Path, odd: int) -> None:
    results = in_a_new_world(WORLD, load_where_one_dies, tmp_path, odd, catch=True)
    found = [one for rank, one in enumerate(results) if rank != odd]
    assert all(isinstance(one, After) for one in found), found
    assert judge_outcomes(outcomes_of(found), DEADLINE) == []
    assert {one.outcome.error for one in found} <= {"Deadline", "Unavailable"}, "its end may be seen before the deadline"
    assert all(re.search(rf"rank {odd}\b", one.outcome.text) for one in found), found
    refused, loaded = zip(*(one.more for one in found), strict=True)
    assert {o.error for o in refused} == {"Refused"}, "the state may be half filled"
    assert [o.step for o in loaded] == [1] * (WORLD - 1)


def load_with_a_fault(run: Path, odd: int, number: int | None, do: Callable[[], None]) -> tuple[Outcome, int, bool]:
    """A load in which a call of the store of one rank fails; then another one. With the calls that this rank made."""
    rank = dist.get_rank()
    if number is None or not (run / "holdfast.json").exists():
        save_steps(run, 1)
    dist.barrier()
    state = holdfast.State(rng=False, **held(9, rank))
    store = Broken(LocalStore(run), *([Fault(do, nth=number)] if rank == odd and number is not None else []))
    outcome = tried(lambda: holdfast.restore(store, state, deadline=DEADLINE))
    count = len(store.calls)
    dist.barrier()
    holdfast.restore(run, state, deadline=LONG)
    return outcome, count, state.digest() == holdfast.State(rng=False, **held(1, rank)).digest()


@pytest.mark.parametrize("do", [unavailable, no_space])
@pytest.mark.parametrize("odd", [0, 1], ids=["the_leader", "another_rank"])
def test_storage_that_fails_one_rank_at_any_call_of_a_load_has_one_outcome(tmp_path: Path, odd: int, do: Any) -> None:
    calls = pool(WORLD).run(load_with_a_fault, tmp_path, odd, None, do)[odd][1]
    wrong: dict[str, Any] = {}
    failed = 0
    for number in range(calls):
        results = pool(WORLD).run(load_with_a_fault, tmp_path, odd, number, do)
        outcomes = [outcome for outcome, _, _ in results]
        failed += outcomes[0].is_error
        lines = judge_outcomes(outcomes, DEADLINE)
        lines += [o.text for o in outcomes if o.is_error and "injected" not in o.text]
        lines += [f"rank {rank} has another state" for rank, (_, _, is_right) in enumerate(results) if not is_right]
        if lines:
            wrong[f"call {number}"] = lines
    assert wrong == {}, json.dumps(wrong, indent=1)
    assert failed
