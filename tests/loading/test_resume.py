"""resume(): from the newest step, from a chosen one, from an init, or refused; and what a second job does to the first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from state.models import Net, train
from torch import nn, optim

import holdfast
from holdfast.errors import NoSpace, Unavailable
from holdfast.store.local import LocalStore
from holdfast.testing.faults import Fault, Faulty

from .jobs import EACH, Job, run_job, steps_of

EqualStates = Callable[[Any, Any], bool]


def test_a_new_run_resumes_at_zero(tmp_path: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "new", job.state) as ckpt:
        assert ckpt.resume() == 0
        assert ckpt.ledger is None
    assert job.at == 0


def test_a_job_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    run_job(tmp_path, 3)
    job = Job()
    with holdfast.Checkpointer(tmp_path, job.state) as ckpt:
        assert ckpt.resume() == 3
        assert job.at == 3
        assert (ckpt.ledger.step, ckpt.ledger.attempt) == (3, 1)
        assert sorted(ckpt.ledger.filled) == ["data.samples", "model.bias", "model.weight"]
    assert run_job(tmp_path, 7).at == 7
    assert [step.attempt for step in holdfast.Run(tmp_path).steps()] == [1, 1, 1, 3, 3, 3, 3]


def test_an_interrupted_training_is_bit_equal_to_one_that_never_stopped(tmp_path: Path, equal_states: EqualStates) -> None:
    """With dropout (global generator), AdamW, a schedule, and a data position."""

    def train_to(run: Path, last: int, stops: list[int]) -> dict[str, Any]:
        torch.manual_seed(5)
        model = nn.Sequential(Net(), nn.Dropout(0.2))
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        progress = {"epoch": 0, "losses": []}
        state = holdfast.State(model=model, optimizer=optimizer, schedule=schedule, progress=progress)
        with holdfast.Checkpointer(run, state, save=holdfast.Every(steps=4)) as ckpt:
            for step in range(ckpt.resume(), last):
                progress["losses"] = progress["losses"] + train(model, optimizer, range(step, step + 1))
                schedule.step()
                ckpt.step(step + 1)
                if step + 1 in stops:
                    break
        return {"model": model, "optimizer": optimizer, "schedule": schedule, "progress": progress}

    whole = train_to(tmp_path / "whole", 12, [])
    for stop in (3, 8, 9):
        train_to(tmp_path / "broken", 12, [stop])
    broken = train_to(tmp_path / "broken", 12, [])
    assert len(broken["progress"]["losses"]) == 12
    assert equal_states(whole, broken)


def test_resume_at_a_step_goes_back_to_it_and_begins_a_new_line(tmp_path: Path) -> None:
    run_job(tmp_path, 5)
    job = Job()
    with holdfast.Checkpointer(tmp_path, job.state, save=EACH, keep=holdfast.Keep(last=None)) as ckpt:
        assert ckpt.resume(at=2, skip_samples=[(30, 50)]) == 2
        assert job.at == 2
        abandoned = [s for s in holdfast.Run(tmp_path).steps(abandoned=True) if s.is_abandoned]
        assert [(s.step, s.attempt) for s in abandoned] == [(3, 1), (4, 1), (5, 1)]
        job.step()
        ckpt.step(3)
    assert [(s.step, s.attempt) for s in holdfast.Run(tmp_path).steps()] == [(1, 1), (2, 1), (3, 2)]
    assert run_job(tmp_path, 3).at == 3, "the new line is what resumes"


@pytest.mark.parametrize(("at", "step"), [("best", 2), ("good", 1), ("3", 3), ("latest", 4), (1, 1)])
def test_resume_at_a_name(tmp_path: Path, at: int | str, step: int) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH, keep=holdfast.Keep(last=4)) as ckpt:
        for n, loss in enumerate([3.0, 1.0, 2.0, 5.0], ckpt.resume() + 1):
            ckpt.step(n, metrics={"loss": loss})
    holdfast.Run(tmp_path).pin(1, "good")
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        assert ckpt.resume(at=at) == step


@pytest.mark.parametrize("at", [9, "no-such-pin", "best"])
def test_resume_at_what_is_not_there_is_refused_and_changes_nothing(tmp_path: Path, at: int | str) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH) as ckpt:
        ckpt.step(1)
    before = sorted(tmp_path.rglob("*"))
    job = Job()
    with holdfast.Checkpointer(tmp_path, job.state) as ckpt, pytest.raises(holdfast.NoCheckpoint):
        ckpt.resume(at=at)
    assert sorted(tmp_path.rglob("*")) == before
    assert job.at == 0


def test_required_raises_instead_of_starting_anew(tmp_path: Path) -> None:
    for run in (tmp_path, tmp_path / "typo"):
        with holdfast.Checkpointer(run, Job().state) as ckpt, pytest.raises(holdfast.NoCheckpoint) as raised:
            ckpt.resume(required=True)
        assert str(run) in str(raised.value)
        assert raised.value.exit_code == 3
    assert not (tmp_path / "typo").exists()


def test_resume_accounts_for_all_roles(tmp_path: Path) -> None:
    """Unlike restore, which accounts for the roles given."""
    run_job(tmp_path, 2)
    weights = nn.Linear(4, 4)
    state = holdfast.State(rng=False, model=weights)
    before = state.digest()
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        with pytest.raises(holdfast.Mismatch, match=r"data\.samples unexpected"):
            ckpt.resume()
        assert state.digest() == before
        assert ckpt.resume(waive="data.*") == 2
        assert list(ckpt.ledger.waived) == ["data.samples"]


def test_resume_takes_the_wishes_of_restore(tmp_path: Path) -> None:
    optimizer = optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with holdfast.Checkpointer(tmp_path, {"old": torch.ones(2), "optimizer": optimizer}, save=EACH) as ckpt:
        ckpt.step(1)
    state = {"new": torch.zeros(2, dtype=torch.float64), "optimizer": optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5)}
    with holdfast.Checkpointer(tmp_path, state) as ckpt:
        wishes: dict[str, Any] = {"rename": {"old": "new"}, "cast": {"new": "float64"}, "live": ["lr"], "stage": True}
        assert ckpt.resume(**wishes) == 1
        assert ckpt.ledger.renamed == {"new": "old"}
    assert state["new"].tolist() == [1, 1]
    assert state["optimizer"].param_groups[0]["lr"] == 0.5


# --- init -------------------------------------------------------------------------------------------------------------


def base_run(path: Path) -> Net:
    """A run whose latest step is another job's, with an optimizer; returns its model."""
    model = Net(seed=8, tied=False)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    holdfast.save(path, holdfast.State(model=model, optimizer=optimizer), 500)
    return model


def base_directory(path: Path) -> Net:
    model = Net(seed=8, tied=False)
    path.mkdir()
    save_file(model.state_dict(), path / "model.safetensors")
    return model


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_init_is_where_a_new_run_begins_at_step_zero(tmp_path: Path, kind: str, equal_states: EqualStates) -> None:
    make, prefix = {"run": (base_run, ""), "hf": (base_directory, "hf:")}[kind]
    base = make(tmp_path / "base")
    model = Net(seed=1, tied=False)
    state = holdfast.State(model=model, optimizer=optim.Adam(model.parameters()), progress={"epoch": 0})
    init = holdfast.Init(f"{prefix}{tmp_path / 'base'}", select="model.*")
    with holdfast.Checkpointer(tmp_path / "run", state, init=init, save=EACH) as ckpt:
        assert ckpt.resume() == 0
        assert equal_states(base, model)
        assert "model.embed.weight" in ckpt.ledger.filled
        ckpt.step(1)
    assert steps_of(tmp_path / "run") == [1]


def test_init_may_be_a_bare_address_and_is_strict_about_what_it_has(tmp_path: Path, equal_states: EqualStates) -> None:
    base = base_directory(tmp_path / "base")
    address = f"hf:{tmp_path / 'base'}"
    model, deeper = Net(seed=1, tied=False), Net(seed=1, tied=False, blocks=3)
    with holdfast.Checkpointer(tmp_path / "a", holdfast.State(model=model), init=address) as ckpt:
        ckpt.resume()
        assert equal_states(base, model)
    strict = holdfast.Checkpointer(tmp_path / "b", holdfast.State(model=deeper), init=address)
    with pytest.raises(holdfast.Mismatch, match=r"model\.blocks\.2\.linear\.weight missing"):
        strict.resume()
    waived = holdfast.Init(address, waive=["model.blocks.2.*"])
    with holdfast.Checkpointer(tmp_path / "c", holdfast.State(model=deeper), init=waived) as ckpt:
        assert ckpt.resume() == 0
        assert all(name.startswith("model.blocks.2.") for name in ckpt.ledger.waived)
        assert torch.equal(deeper.embed.weight, base.embed.weight)


def test_init_is_not_read_once_the_run_has_a_commit(tmp_path: Path) -> None:
    init = f"hf:{tmp_path / 'gone'}"
    run_job(tmp_path / "run", 2)
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, init=init) as ckpt:
        assert ckpt.resume() == 2
    assert job.at == 2


def test_an_init_that_is_not_there_is_an_error_and_no_start_from_noise(tmp_path: Path) -> None:
    for address in (f"hf:{tmp_path / 'gone'}", str(tmp_path / "typo")):
        ckpt = holdfast.Checkpointer(tmp_path / "run", Job().state, init=address)
        with pytest.raises(holdfast.NoCheckpoint):
            ckpt.resume()


def test_a_step_without_resume_does_not_load_init_over_what_was_trained(tmp_path: Path) -> None:
    base_directory(tmp_path / "base")
    model = Net(seed=1, tied=False)
    state = holdfast.State(rng=False, model=model)
    trained = state.digest()
    with holdfast.Checkpointer(tmp_path / "run", state, init=f"hf:{tmp_path / 'base'}", save=EACH) as ckpt:
        try:
            ckpt.step(1)
        except holdfast.Refused as refused:
            assert "resume" in str(refused)
    assert state.digest() == trained


# --- failures and other jobs ------------------------------------------------------------------------------------------


def full_disk(path: Path, nth: int = 1, times: int | None = 1) -> Faulty:
    """A store in which committing fails as on a full disk, from the `nth` commit on."""
    fault = Fault("create", "steps/*/commit.json", nth=nth, times=times, error=NoSpace)
    return Faulty(LocalStore(str(path)), fault)


def test_a_save_that_fails_warns_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with holdfast.Checkpointer(full_disk(tmp_path, nth=2), job.state, save=EACH) as ckpt:
        ckpt.resume()
        assert ckpt.step(1) is not None
        with pytest.warns(RuntimeWarning, match="step 2 was not saved"):
            assert ckpt.step(2) is None
        assert steps_of(tmp_path) == [1]
        assert "step 2 was not saved" in caplog.text
        assert ckpt.step(3) is not None
    assert steps_of(tmp_path) == [1, 3]
    assert holdfast.open(tmp_path, step=1).verify() == []


def test_a_save_that_fails_raises_where_the_user_asked_for_that(tmp_path: Path) -> None:
    ckpt = holdfast.Checkpointer(full_disk(tmp_path), Job().state, save=EACH, on_failure="raise")
    ckpt.resume()
    with pytest.raises(NoSpace) as raised:
        ckpt.step(1)
    assert raised.value.exit_code == 8
    assert steps_of(tmp_path) == []


def test_save_itself_always_raises(tmp_path: Path) -> None:
    with holdfast.Checkpointer(full_disk(tmp_path), Job().state) as ckpt:
        ckpt.resume()
        ckpt.step(1)
        with pytest.raises(Unavailable):
            ckpt.save()
    assert steps_of(tmp_path) == [1], "leaving the `with` has tried again"


def test_a_failure_on_leaving_warns_and_does_not_raise(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="step 1 was not saved"):
        run_job(full_disk(tmp_path, times=None), 1, save=holdfast.Every(steps=100))
    assert steps_of(tmp_path) == []


def test_what_cannot_be_stored_raises_whatever_on_failure_says(tmp_path: Path) -> None:
    ckpt = holdfast.Checkpointer(tmp_path, {"data": {"thing": object()}}, save=EACH, on_failure="warn")
    with pytest.raises(holdfast.Unsupported, match=r"data\.thing"):
        ckpt.step(1)


def test_a_job_that_was_superseded_stops_at_its_next_save(tmp_path: Path) -> None:
    first, second = Job(), Job()
    one = holdfast.Checkpointer(tmp_path, first.state, save=EACH)
    one.resume()
    first.step()
    one.step(1)
    other = holdfast.Checkpointer(tmp_path, second.state, save=EACH)
    assert other.resume() == 1
    first.step()
    with pytest.raises(holdfast.Superseded) as raised:
        one.step(2)
    assert (raised.value.attempt, raised.value.newer, raised.value.exit_code) == (1, 2, 6)
    second.step()
    other.step(2)
    other.close()
    with pytest.raises(holdfast.Superseded):
        one.close()
    assert [(s.step, s.attempt) for s in holdfast.Run(tmp_path).steps()] == [(1, 1), (2, 2)]


def test_a_rollback_by_hand_stops_the_job_that_runs(tmp_path: Path) -> None:
    ckpt = holdfast.Checkpointer(tmp_path, Job().state, save=EACH)
    ckpt.resume()
    ckpt.step(1)
    ckpt.step(2)
    holdfast.Run(tmp_path).rollback(1)
    with pytest.raises(holdfast.Superseded):
        ckpt.step(3)
    assert steps_of(tmp_path) == [1]


def test_a_waiting_reader_gets_the_step_that_a_job_commits(tmp_path: Path) -> None:
    run_job(tmp_path, 1)
    timer = threading.Timer(0.3, run_job, (tmp_path, 2))
    timer.start()
    step = holdfast.Run(tmp_path).wait(after=1, timeout=20)
    timer.join()
    assert step.step == 2
    with pytest.raises(holdfast.Deadline, match="no step beyond 2"):
        holdfast.Run(tmp_path).wait(after=2, timeout=0.01)
