"""Hyper-parameters: what is stored wins and the difference is told; `live=` keeps ours, and the schedule follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from state.models import Net, train
from torch import optim
from torch.optim import lr_scheduler as schedules

import holdfast

from .refusals import refused


class Job:
    def __init__(self, schedule: Any = None, *, steps: int = 0, lr: Any = 0.1, make: Any = optim.SGD, **settings: Any) -> None:
        self.model = Net()
        self.optimizer = make(self.model.parameters(), lr=lr, **settings)
        self.schedule = schedule and schedule(self.optimizer)
        self.rates(range(steps))

    def parts(self) -> dict[str, Any]:
        return vars(self)

    def rates(self, steps: range) -> list[float]:
        """Train; returns the learning rate of each of the steps."""
        rates = []
        for step in steps:
            rates.append(float(self.optimizer.param_groups[0]["lr"]))
            loss = train(self.model, self.optimizer, range(step, step + 1))
            if isinstance(self.schedule, schedules.ReduceLROnPlateau):
                self.schedule.step(loss[0])
            elif self.schedule:
                self.schedule.step()
        return rates


def test_the_stored_hyper_parameters_win_and_each_difference_is_listed(tmp_path: Path) -> None:
    holdfast.save(tmp_path, Job(lr=0.1, momentum=0.9).parts(), 1)
    live = Job(lr=0.5, momentum=0.9, weight_decay=0.01)
    ledger = holdfast.restore(tmp_path, live.parts())
    assert live.optimizer.param_groups[0]["lr"] == 0.1
    assert live.optimizer.param_groups[0]["weight_decay"] == 0
    assert ledger.hyper == {
        "optimizer.param_groups.0.lr": (0.1, 0.5),
        "optimizer.param_groups.0.weight_decay": (0, 0.01),
    }
    assert "optimizer.param_groups.0.lr" in str(ledger)


def test_a_difference_between_tensor_learning_rates_is_listed_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path, Job(lr=torch.tensor(0.125), make=optim.Adam, foreach=False).parts(), 1)
    live = Job(lr=torch.tensor(0.5), make=optim.Adam, foreach=False)
    ledger = holdfast.restore(tmp_path, live.parts())
    assert float(live.optimizer.param_groups[0]["lr"]) == 0.125
    assert [float(v) for v in ledger.hyper["optimizer.param_groups.0.lr"]] == [0.125, 0.5]


def test_live_keeps_what_it_names_and_the_rest_is_stored(tmp_path: Path) -> None:
    holdfast.save(tmp_path, Job(make=optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6).parts(), 1)
    live = Job(make=optim.AdamW, betas=(0.8, 0.99), weight_decay=0.2, eps=1e-8)
    ledger = holdfast.restore(tmp_path, live.parts(), live=("betas", "optimizer.*.weight_decay"))
    group = live.optimizer.param_groups[0]
    assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.8, 0.99), 0.2, 1e-6)
    assert sorted(ledger.live) == ["optimizer.param_groups.0.betas", "optimizer.param_groups.0.weight_decay"]
    assert ledger.hyper["optimizer.param_groups.0.betas"] == ((0.9, 0.95), (0.8, 0.99))


SCHEDULES: dict[str, Any] = {
    "none": None,
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=10),
    "step": lambda o: schedules.StepLR(o, step_size=2),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, T_max=8)], milestones=[2]
    ),
}


@pytest.mark.parametrize("pattern", ["lr", "optimizer.param_groups.*.lr"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES.keys() - {"plateau"}))
def test_with_a_live_learning_rate_the_schedule_goes_on_as_if_it_had_always_been_that(
    tmp_path: Path, schedule: str, pattern: str
) -> None:
    """Stored: four steps at 0.1. Live: 0.3. What follows is what a job at 0.3 would have done from step four on."""
    holdfast.save(tmp_path, Job(SCHEDULES[schedule], steps=4, lr=0.1).parts(), 4)
    live, other = Job(SCHEDULES[schedule], lr=0.3), Job(SCHEDULES[schedule], lr=0.3)
    expected = other.rates(range(9))[4:]
    holdfast.restore(tmp_path, live.parts(), live=(pattern,))
    assert live.rates(range(4, 9)) == pytest.approx(expected, rel=1e-9)


def test_a_live_learning_rate_under_a_plateau_schedule_is_where_it_goes_on_from(tmp_path: Path) -> None:
    """Such a schedule has no base rates: it lowers the rate that is there."""
    holdfast.save(tmp_path, Job(SCHEDULES["plateau"], steps=4, lr=0.1).parts(), 4)
    live = Job(SCHEDULES["plateau"], lr=0.3)
    state = holdfast.State(**live.parts())
    holdfast.restore(tmp_path, state, live=("lr",))
    assert state.touched is None
    assert live.schedule.get_last_lr() == [0.3]
    assert live.rates(range(4, 7)) == pytest.approx([0.3, 0.03, 0.003])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_with_the_stored_learning_rate_the_schedule_goes_on_as_it_would_have(tmp_path: Path, schedule: str) -> None:
    saved, live = Job(SCHEDULES[schedule], steps=4, lr=0.1), Job(SCHEDULES[schedule], lr=0.3)
    holdfast.save(tmp_path, saved.parts(), 4)
    holdfast.restore(tmp_path, live.parts())
    assert live.rates(range(4, 9)) == saved.rates(range(4, 9))


def test_a_live_learning_rate_of_its_own_for_each_group_is_kept(tmp_path: Path) -> None:
    def build(first: float, second: float, steps: int = 0) -> dict[str, Any]:
        parameters = list(Net().parameters())
        optimizer = optim.SGD([{"params": parameters[:2], "lr": first}, {"params": parameters[2:], "lr": second}])
        schedule = schedules.LambdaLR(optimizer, lambda step: 0.5**step)
        for _ in range(steps):
            optimizer.step()
            schedule.step()
        return {"optimizer": optimizer, "schedule": schedule}

    live = build(0.2, 0.4)
    holdfast.save(tmp_path, build(0.1, 1.0, steps=2), 2)
    holdfast.restore(tmp_path, live, live=("lr",))
    assert [g["lr"] for g in live["optimizer"].param_groups] == pytest.approx([0.05, 0.1])
    live["optimizer"].step()
    live["schedule"].step()
    assert live["schedule"].get_last_lr() == pytest.approx([0.025, 0.05])
    assert [g["initial_lr"] for g in live["optimizer"].param_groups] == [0.2, 0.4]


@pytest.mark.parametrize("is_live_tensor", [True, False], ids=["now a tensor", "no tensor now"])
def test_a_learning_rate_that_became_a_tensor_or_stopped_being_one_can_be_kept_live(tmp_path: Path, is_live_tensor: bool) -> None:
    def build(as_tensor: bool, lr: float) -> Job:
        return Job(lr=torch.tensor(lr) if as_tensor else lr, make=optim.Adam, foreach=False)

    holdfast.save(tmp_path, build(not is_live_tensor, 0.125).parts(), 1)
    live = build(is_live_tensor, 0.5)
    assert list(refused(tmp_path, live.parts())) == ["optimizer.param_groups.0.lr"]
    holdfast.restore(tmp_path, live.parts(), live=("lr",))
    assert float(live.optimizer.param_groups[0]["lr"]) == 0.5
    assert isinstance(live.optimizer.param_groups[0]["lr"], torch.Tensor) is is_live_tensor


def test_a_key_that_a_newer_torch_added_to_the_groups_is_no_error(tmp_path: Path) -> None:
    """As when `decoupled_weight_decay` came to Adam: the checkpoint does not have it, the live optimizer does."""
    holdfast.save(tmp_path, Job(make=optim.Adam, steps=1).parts(), 1)
    live = Job(make=optim.Adam, lr=0.7)
    live.optimizer.param_groups[0]["brand_new"] = True
    ledger = holdfast.restore(tmp_path, live.parts())
    assert live.optimizer.param_groups[0]["brand_new"] is True
    assert live.optimizer.param_groups[0]["lr"] == 0.1
    assert "optimizer.param_groups.0.brand_new" in ledger.hyper
    assert "optimizer.param_groups.0.brand_new" in ledger.live


def test_a_key_that_only_the_checkpoint_has_is_told_and_can_be_waived(tmp_path: Path) -> None:
    saved = Job(make=optim.Adam, steps=1)
    saved.optimizer.param_groups[0]["of_the_future"] = 5
    holdfast.save(tmp_path, saved.parts(), 1)
    assert list(refused(tmp_path, Job(make=optim.Adam).parts())) == ["optimizer.param_groups.0.of_the_future"]
    ledger = holdfast.restore(tmp_path, Job(make=optim.Adam).parts(), waive="optimizer.*.of_the_future")
    assert list(ledger.waived) == ["optimizer.param_groups.0.of_the_future"]
