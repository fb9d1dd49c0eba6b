"""What steps share and what is left of old ones: references, mostly dead files, ageing, self-contained steps, recycling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, Every, Keep, Run, State
from holdfast.format.records import StepRef
from holdfast.run.history import Step
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore

from .world import contents, damage, files, prune, read, save, steps_of

FIRST_FILE = "steps/0000000100-a0001/n0000-00.safetensors"


@pytest.fixture
def store() -> Store:
    """Steps 100, 200 and 300; their weights that never change lie in the file of step 100."""
    store = MemoryStore()
    save(store, (100, 1), (200, 2), (300, 3))
    return store


def files_of(store: Any, step: int | str) -> set[str]:
    """The data files that a step reads."""
    found = Run(store).find(step)
    with holdfast.open(store, step=found.step) as checkpoint:
        return {file.path for file in checkpoint.index.files()}


def is_self_contained(store: Any, step: int) -> bool:
    found = Run(store).find(step)
    return not found.commit.references and all(path.startswith(f"{found.path}/") for path in files_of(store, step))


# --- references -------------------------------------------------------------------------------------------------------


def test_what_did_not_change_is_not_written_again(store: Store) -> None:
    assert FIRST_FILE in files_of(store, 300)
    assert Run(store).find(300).commit.references == [StepRef(100, 1)]
    assert Run(store).find(300).commit.new_bytes < Run(store).find(100).commit.new_bytes


def test_a_file_lives_for_as_long_as_a_step_refers_to_it(store: Store) -> None:
    assert prune(store) == [100, 200]
    assert [path for path in files(store) if "0000000100" in path or "0000000200" in path] == [FIRST_FILE]
    assert read(store, 300) == 3
    save(store, (400, 4))
    prune(store)
    assert (FIRST_FILE in files(store), read(store)) == (True, 4)


def test_a_file_goes_with_the_last_step_that_refers_to_it(store: Store) -> None:
    session = save(store)
    session.save(contents(4), 400, refer=False)
    assert prune(store) == [100, 200, 300]
    assert {path.split("/")[1] for path in files(store) if path.startswith("steps/")} == {"0000000400-a0002"}


def test_equal_states_have_equal_digests_wherever_their_bytes_lie(store: Store) -> None:
    session = save(store)
    whole = session.save(contents(3), 400, refer=False)
    shared = session.save(contents(3), 500)
    assert shared.commit.references
    assert Run(store).find(300).commit.content_digest == whole.commit.content_digest == shared.commit.content_digest


def test_nothing_refers_to_a_step_that_is_damaged(store: Store) -> None:
    path = "steps/0000000300-a0001/index-n0000.safetensors"
    data = store.read(path)
    store.delete(path)
    store.create(path, data[:-1])
    save(store, (400, 4))
    assert is_self_contained(store, 400)
    assert read(store, 400) == 4


def test_a_step_of_another_attempt_may_be_referred_to(store: Store) -> None:
    save(store, (400, 4))
    assert FIRST_FILE in files_of(store, 400)
    Run(store).rollback(200)
    save(store, (250, 25))
    assert Run(store).find(250).commit.references == [StepRef(100, 1)]
    prune(store)
    assert (read(store, 250), read(store, 400)) == (25, 4), "the end of the abandoned line is kept, and what it refers to"


def layers(count: int, changed: float) -> dict[str, Any]:
    """A state of equal layers of which the first `count` were trained."""
    return {"model": {f"layer{n}": torch.full((1024,), changed if n < count else -1.0 - n) for n in range(8)}}


def test_what_is_unchanged_in_a_mostly_dead_file_is_written_anew_so_that_the_file_can_go(tmp_path: Path) -> None:
    holdfast.save(tmp_path, layers(8, 1.0), 1)
    for step in range(2, 9):  # fewer than half of the layers stay as they were
        holdfast.save(tmp_path, layers(6, float(step)), step)
        Run(tmp_path).prune(Keep(last=1))
        assert torch.equal(holdfast.load(tmp_path)["model"]["layer7"], torch.full((1024,), -8.0))
    owners = {path.split("/")[1] for path in files_of(tmp_path, "latest")}
    assert "0000000001-a0001" not in owners
    stored = sum(path.stat().st_size for path in (tmp_path / "steps").rglob("n0000-*"))
    assert stored < 1.5 * Run(tmp_path).latest().nbytes + 4096 * len(owners)


def test_a_run_that_changes_a_little_each_time_never_stores_much_more_than_one_state(tmp_path: Path) -> None:
    chance = random.Random(5)
    state = layers(8, 0.0)
    for step in range(1, 40):
        for name in chance.sample(sorted(state["model"]), chance.randrange(9)):
            state["model"][name] = state["model"][name] + 1
        holdfast.save(tmp_path, state, step)
        Run(tmp_path).prune(Keep(last=1))
        loaded = holdfast.load(tmp_path)
        assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state["model"].items())
        data = [path.stat().st_size for path in (tmp_path / "steps").rglob("n0000-*")]
        assert sum(data) - 4096 * len(data) <= 2 * Run(tmp_path).latest().nbytes + 4096 * len(data)


# --- self-contained steps ---------------------------------------------------------------------------------------------


def test_a_step_saved_with_a_pin_refers_to_no_other(tmp_path: Path) -> None:
    holdfast.save(tmp_path, layers(1, 1.0), 1)
    holdfast.save(tmp_path, layers(1, 2.0), 2, pin="good")
    holdfast.save(tmp_path, layers(1, 3.0), 3)
    assert is_self_contained(tmp_path, 2)
    assert not is_self_contained(tmp_path, 3)


def test_a_step_kept_for_ever_refers_to_no_other(tmp_path: Path) -> None:
    state = layers(1, 0.0)
    with Checkpointer(tmp_path, state, save=Every(steps=1), keep=Keep(last=2, every=4)) as checkpointer:
        checkpointer.resume()
        for step in range(1, 11):
            state["model"]["layer0"] += 1
            checkpointer.step(step)
    assert steps_of(tmp_path) == [4, 8, 9, 10]
    assert [is_self_contained(tmp_path, step) for step in (4, 8, 9, 10)] == [True, True, False, False]


def test_a_step_that_is_pinned_later_is_made_self_contained(store: Store) -> None:
    before = Run(store).find(200)
    Run(store).pin(200, "good")
    after = Run(store).find("good")
    assert is_self_contained(store, 200)
    assert (after.commit.content_digest, after.metrics, after.created, after.ref) == (
        before.commit.content_digest, before.metrics, before.created, before.ref
    )  # fmt: skip
    prune(store)
    assert (read(store, 200), read(store, 300)) == (2, 3)


def test_what_others_refer_to_stays_when_its_step_is_written_again(store: Store) -> None:
    save(store, (400, 4))
    Run(store).pin(300, "good")
    Run(store).prune(Keep(last=None, weights=1))
    assert damage(store) == []
    assert FIRST_FILE in files_of(store, 400)


# --- ageing -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Three steps of a real model with its optimizer."""
    torch.manual_seed(1)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2, 3):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        holdfast.save(tmp_path, State(rng=False, model=model, optimizer=optimizer), step)
    return tmp_path


def digests(run: Path, step: int) -> dict[str, str]:
    with holdfast.open(run, step=step) as checkpoint:
        return {name: checkpoint.digest(name) for name in checkpoint.names}


def test_an_old_step_keeps_its_weights_and_drops_its_optimizer(trained: Path) -> None:
    before = {step: digests(trained, step) for step in (1, 2, 3)}
    pruned = Run(trained).prune(Keep(last=None, weights=1))
    assert pruned.weights_only == [1, 2]
    assert {s.step: s.kind for s in Run(trained).steps()} == {1: "partial", 2: "partial", 3: "full"}
    for step in (1, 2):
        assert digests(trained, step) == {n: d for n, d in before[step].items() if n.startswith("model.")}
        assert set(holdfast.load(trained, step=step)) == {"model"}
    assert digests(trained, 3) == before[3]


def test_ageing_gives_space_back_and_happens_once(trained: Path) -> None:
    assert Run(trained).prune(Keep(last=None, weights=1)).freed_bytes > 0
    again = Run(trained).prune(Keep(last=None, weights=1))
    assert (again.weights_only, again.freed_bytes) == ([], 0)
    names = sorted(path.name.partition("-r")[0] for path in (trained / "steps").iterdir())
    assert names == ["0000000001-a0001", "0000000002-a0001", "0000000003-a0001"]


def test_the_newest_and_pinned_steps_keep_their_optimizer(trained: Path) -> None:
    Run(trained).pin(1, "good")
    Run(trained).prune(Keep(last=None, weights=1))
    assert {s.step: s.kind for s in Run(trained).steps()} == {1: "full", 2: "partial", 3: "full"}


def test_an_aged_step_is_never_what_resumes(trained: Path) -> None:
    Run(trained).prune(Keep(last=None, weights=1))
    assert Run(trained).latest().step == 3
    assert Run(trained).find("latest").kind == "full"


def test_a_step_that_was_spared_while_it_aged_does_not_come_back_when_it_is_removed(trained: Path) -> None:
    with Run(trained).hold(2):
        Run(trained).prune(Keep(last=None, weights=1))
    pruned = Run(trained).prune(Keep(last=1))
    assert pruned.removed == [1, 2]
    assert steps_of(trained) == [3]


# --- recycling --------------------------------------------------------------------------------------------------------


def pool_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / ".recycle").glob("*"))


def test_the_pool_never_exceeds_one_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(2)
    state: dict[str, Any] = {"model": {}}
    with Checkpointer(tmp_path, state, save=Every(steps=1), keep=Keep(last=2), recycle=True) as checkpointer:
        checkpointer.resume()
        is_used = False
        for step in range(1, 25):
            state["model"]["weight"] = torch.full((chance.randrange(1, 40_000),), float(step))
            checkpointer.step(step)
            newest: Step | None = Run(tmp_path).latest()
            assert newest is not None
            assert pool_bytes(tmp_path) <= newest.commit.new_bytes
            is_used |= pool_bytes(tmp_path) > 0
            assert torch.equal(holdfast.load(tmp_path)["model"]["weight"], state["model"]["weight"])
    assert is_used


def test_a_trainer_that_does_not_recycle_keeps_nothing(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(1000)}}
    with Checkpointer(tmp_path, state, save=Every(steps=1), keep=Keep(last=1), recycle=False) as checkpointer:
        checkpointer.resume()
        for step in range(1, 5):
            state["model"]["weight"] += 1
            checkpointer.step(step)
            assert pool_bytes(tmp_path) == 0


def test_a_backup_by_hard_links_is_not_written_over(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    session = save(store, (100, 1), (200, 2))
    backup = tmp_path / "backup"
    backup.mkdir()
    for path in (tmp_path / "run" / "steps").rglob("n0000-*"):
        (backup / path.parent.name).hardlink_to(path)
    before = {path.name: path.read_bytes() for path in backup.iterdir()}
    for step in range(300, 900, 100):
        session.save(contents(step), step)
        Run(store).prune(Keep(last=1), recycle=True)
    assert {path.name: path.read_bytes() for path in backup.iterdir()} == before
