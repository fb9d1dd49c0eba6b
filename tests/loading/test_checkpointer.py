"""The Checkpointer: when it saves, what leaving the `with` does, which steps it takes, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast

from .jobs import EACH, Job, run_job, steps_of


def test_a_loop_saves_when_the_policy_says_so_and_the_last_step_on_leaving(tmp_path: Path) -> None:
    run_job(tmp_path, 8, save=holdfast.Every(steps=3))
    assert steps_of(tmp_path) == [3, 6, 8]


def test_leaving_after_a_step_that_is_saved_saves_nothing_more(tmp_path: Path) -> None:
    run_job(tmp_path, 6, save=holdfast.Every(steps=3))
    assert steps_of(tmp_path) == [3, 6]


def test_leaving_without_a_step_saves_nothing(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        assert ckpt.resume() == 0
    assert steps_of(tmp_path) == []


def test_close_saves_the_last_step_and_can_be_called_twice(tmp_path: Path) -> None:
    ckpt = holdfast.Checkpointer(tmp_path, Job().state)
    ckpt.resume()
    ckpt.step(7)
    assert steps_of(tmp_path) == []
    ckpt.close()
    ckpt.close()
    assert steps_of(tmp_path) == [7]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_exception_passes_through_and_nothing_more_is_saved(tmp_path: Path, error: type[BaseException]) -> None:
    def job() -> None:
        with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
            ckpt.resume()
            ckpt.step(1)
            ckpt.save()
            ckpt.step(2)
            raise error

    with pytest.raises(error):
        job()
    assert steps_of(tmp_path) == [1]


def test_a_break_saves_the_step_that_was_reached(tmp_path: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path, job.state) as ckpt:
        for step in range(ckpt.resume(), 100):
            job.step()
            ckpt.step(step + 1)
            if step == 4:
                break
    assert steps_of(tmp_path) == [5]


def test_step_gives_a_handle_when_it_saves_and_none_when_it_does_not(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=holdfast.Every(steps=2)) as ckpt:
        ckpt.resume()
        assert ckpt.step(1) is None
        handle = ckpt.step(2)
        assert handle is not None
        assert (handle.step, handle.attempt, handle.level, handle.error) == (2, 1, "durable", None)
        assert handle.wait("durable", timeout=1) is handle
        assert steps_of(tmp_path) == [2]


def test_a_multiple_that_was_stepped_over_is_saved_at_the_next_step(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=holdfast.Every(steps=10)) as ckpt:
        ckpt.resume()
        saved = [n for n in (4, 8, 13, 17, 40, 41) if ckpt.step(n) is not None]
    assert saved == [13, 40]
    assert steps_of(tmp_path) == [13, 40, 41]


@pytest.mark.parametrize("n", [5, 4, 0, -1])
def test_a_step_must_exceed_the_one_before(tmp_path: Path, n: int) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        ckpt.resume()
        ckpt.step(5)
        with pytest.raises(holdfast.Refused, match=rf"step\({n}\) after step 5"):
            ckpt.step(n)
    assert steps_of(tmp_path) == [5]


def test_a_step_must_exceed_what_was_resumed(tmp_path: Path) -> None:
    run_job(tmp_path, 5)
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        assert ckpt.resume() == 5
        with pytest.raises(holdfast.Refused, match="steps must grow"):
            ckpt.step(5)
        ckpt.step(6)
    assert steps_of(tmp_path)[-2:] == [5, 6]


def test_a_run_with_commits_wants_resume_before_step(tmp_path: Path) -> None:
    run_job(tmp_path, 2)
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt, pytest.raises(holdfast.Refused, match="call resume"):
        ckpt.step(3)
    assert steps_of(tmp_path) == [1, 2]


def test_a_new_run_does_not_need_resume(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH) as ckpt:
        ckpt.step(1)
    assert steps_of(tmp_path) == [1]


def test_save_saves_the_last_step_at_once(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        ckpt.resume()
        ckpt.step(3, metrics={"loss": 0.5})
        handle = ckpt.save(pin="before-lr-change")
        assert (handle.step, handle.level) == (3, "durable")
    (step,) = holdfast.Run(tmp_path).steps()
    assert step.pins == ("before-lr-change",)
    assert step.metrics == {"loss": 0.5}


def test_save_before_any_step_is_refused(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        with pytest.raises(holdfast.Refused, match=r"step\(\)"):
            ckpt.save()
        ckpt.resume()
        with pytest.raises(holdfast.Refused, match=r"call step\(\) first"):
            ckpt.save()


def test_a_step_that_the_policy_has_just_saved_can_still_be_pinned_by_save(tmp_path: Path) -> None:
    """A loop that pins at some event does not know whether the policy saved this very step."""
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH) as ckpt:
        ckpt.resume()
        ckpt.step(1)
        handle = ckpt.save(pin="before-lr-change")
    assert handle.step == 1
    assert [s.pins for s in holdfast.Run(tmp_path).steps()] == [("before-lr-change",)]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True), 0.5),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3),
        (7, 7),
        (True, True),
        ("phase 2", "phase 2"),
        (None, None),
    ],
    ids=repr,
)
def test_metrics_may_be_numbers_of_any_library(tmp_path: Path, given: Any, stored: Any) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH) as ckpt:
        ckpt.resume()
        ckpt.step(1, metrics={"loss": given})
    assert holdfast.Run(tmp_path).latest().metrics == {"loss": stored}


@pytest.mark.parametrize("given", [torch.ones(3), np.ones(3), [1, 2], {"a": 1}, object()], ids=lambda v: type(v).__name__)
def test_a_metric_that_is_no_number_is_refused_by_its_name(tmp_path: Path, given: Any) -> None:
    with pytest.raises(holdfast.HoldfastError, match="metric loss"):
        holdfast.save(tmp_path, Job().state, 1, metrics={"loss": given})


def test_a_loss_that_is_not_finite_is_kept_and_never_the_best(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH) as ckpt:
        ckpt.resume()
        for number, loss in enumerate([float("nan"), 2.0, float("-inf")], 1):
            ckpt.step(number, metrics={"loss": loss})
    assert holdfast.Run(tmp_path).best("loss").step == 2
    assert [str(s.metrics["loss"]) for s in holdfast.Run(tmp_path).steps()] == ["nan", "2.0", "-inf"]


def test_only_what_the_policy_keeps_is_there_after_each_save(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=2, every=4, best=1, metric="loss")
    losses = {1: 9, 2: 1, 3: 5}
    with holdfast.Checkpointer(tmp_path, Job().state, save=EACH, keep=keep) as ckpt:
        ckpt.resume()
        for step in range(1, 11):
            ckpt.step(step, metrics={"loss": losses.get(step, 7)})
            if step == 5:
                holdfast.Run(tmp_path).pin(5, "kept")
            assert steps_of(tmp_path)[-1] == step
    assert steps_of(tmp_path) == [2, 4, 5, 8, 9, 10]
    assert holdfast.Run(tmp_path).best().step == 2, "the run knows what its Keep ranks by"
    assert all(float(holdfast.load(tmp_path, step=s)["model"]["bias"].sum()) == 0 for s in (2, 4, 5, 8))


def test_the_first_step_is_not_lost_when_only_one_is_kept(tmp_path: Path) -> None:
    job = run_job(tmp_path, 4, keep=holdfast.Keep(last=1))
    assert steps_of(tmp_path) == [4]
    assert run_job(tmp_path, 4).at == job.at == 4


def test_by_default_the_last_three_of_every_hundred_steps_are_kept(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, Job().state) as ckpt:
        for step in range(ckpt.resume(), 550, 10):
            ckpt.step(step + 10)
    assert steps_of(tmp_path) == [400, 500, 550]


@pytest.mark.parametrize("settings", [{"on_failure": "ignore"}, {"increments": True}, {"tiers": ["/mnt"]}])
def test_a_setting_that_does_not_exist_is_an_error_and_not_silently_left_out(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        holdfast.Checkpointer(tmp_path, Job().state, **settings)
    assert not list(tmp_path.iterdir())
