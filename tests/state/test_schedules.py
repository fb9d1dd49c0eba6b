"""Schedules, loss scalers and averages: after a load into fresh objects, every later value is what it would have been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

import holdfast

from .models import Net, train

EqualStates = Callable[[Any, Any], bool]


class WarmUp:
    """A factor with state of its own, for LambdaLR, which keeps the attributes of callable objects."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def sequential(optimizer: optim.Optimizer) -> schedules.LRScheduler:
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.CosineAnnealingLR(optimizer, T_max=5)]
    return schedules.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULES: dict[str, Callable[[optim.Optimizer], Any]] = {
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "lambda with state": lambda o: schedules.LambdaLR(o, WarmUp(4)),
    "step": lambda o: schedules.StepLR(o, step_size=2),
    "multi step": lambda o: schedules.MultiStepLR(o, milestones=[2, 4, 4]),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, T_max=7, eta_min=1e-4),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, T_0=3),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.3, total_steps=12),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequential": sequential,
    "chained": lambda o: schedules.ChainedScheduler([schedules.ConstantLR(o), schedules.ExponentialLR(o, 0.9)]),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "averaging": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


class Job:
    """A model, its optimizer and a schedule."""

    def __init__(self, schedule: str, *, seed: int, steps: int = 0, lr: Any = 0.1) -> None:
        self.model = Net(seed=seed)
        self.optimizer = optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.train(range(steps))

    def parts(self) -> dict[str, Any]:
        return vars(self)

    def train(self, steps: range) -> list[float]:
        """Train; returns the learning rate after each step."""
        rates = []

        def after(loss: torch.Tensor) -> None:
            self.schedule.step(*[loss.item()] * isinstance(self.schedule, schedules.ReduceLROnPlateau))
            rates.append(float(self.optimizer.param_groups[0]["lr"]))

        train(self.model, self.optimizer, steps, after)
        return rates


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("live_steps", [0, 6], ids=["into a fresh job", "into one that is further on"])
def test_a_schedule_goes_on_where_it_was(tmp_path: Path, schedule: str, live_steps: int) -> None:
    trained, other = Job(schedule, seed=0, steps=4), Job(schedule, seed=1, steps=live_steps)
    holdfast.save(tmp_path, trained.parts(), 4)
    holdfast.restore(tmp_path, other.parts())
    assert other.schedule.get_last_lr() == trained.schedule.get_last_lr()
    assert trained.train(range(4, 10)) == other.train(range(4, 10))


def test_a_schedule_of_a_tensor_learning_rate_goes_on_where_it_was(tmp_path: Path) -> None:
    trained = Job("cosine", seed=0, steps=4, lr=torch.tensor(0.1))
    fresh = Job("cosine", seed=1, lr=torch.tensor(0.1))
    rate = fresh.optimizer.param_groups[0]["lr"]
    holdfast.save(tmp_path, trained.parts(), 4)
    holdfast.restore(tmp_path, fresh.parts())
    assert fresh.optimizer.param_groups[0]["lr"] is rate, "a compiled step holds this very tensor"
    assert trained.train(range(4, 10)) == fresh.train(range(4, 10))


def test_the_learning_rate_of_the_optimizer_and_of_its_schedule_agree_after_a_load(tmp_path: Path) -> None:
    trained, fresh = Job("one cycle", seed=0, steps=4), Job("one cycle", seed=1)
    holdfast.save(tmp_path, trained.parts(), 4)
    holdfast.restore(tmp_path, fresh.parts())
    assert fresh.schedule.get_last_lr() == [fresh.optimizer.param_groups[0]["lr"]]


def test_a_loss_scaler_comes_back_with_its_scale_and_its_count(tmp_path: Path) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def step(scaler: torch.amp.GradScaler, gradient: float) -> float:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = optim.SGD([weight], lr=0.1)
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    trained, fresh = scaler(), scaler()
    assert [step(trained, g) for g in (1.0, float("inf"), 1.0, 1.0)] == [8.0, 4.0, 4.0, 4.0]
    holdfast.save(tmp_path, {"scaler": trained}, 4)
    holdfast.restore(tmp_path, {"scaler": fresh})
    assert [step(trained, 1.0), step(trained, 1.0)] == [step(fresh, 1.0), step(fresh, 1.0)] == [8.0, 8.0]


def test_a_disabled_loss_scaler_is_no_trouble(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    holdfast.save(tmp_path, {"scaler": scaler}, 1)
    holdfast.restore(tmp_path, {"scaler": scaler})


def test_an_average_goes_on_where_it_was(tmp_path: Path, equal_states: EqualStates) -> None:
    def build(seed: int) -> dict[str, Any]:
        model = Net(seed=seed)
        return {"model": model, "average": AveragedModel(model), "optimizer": optim.SGD(model.parameters(), lr=0.1)}

    def run(parts: dict[str, Any], steps: range) -> None:
        train(parts["model"], parts["optimizer"], steps, lambda _: parts["average"].update_parameters(parts["model"]))

    trained, fresh = build(0), build(1)
    run(trained, range(3))
    holdfast.save(tmp_path, trained, 3)
    holdfast.restore(tmp_path, fresh)
    run(trained, range(3, 6))
    run(fresh, range(3, 6))
    assert fresh["average"].n_averaged == 6
    assert equal_states(trained, fresh)


class Ledgered:
    """Anything with `state_dict` and `load_state_dict`, here with tensors, values and a structure that grows."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.by_source: dict[str, int] = {}

    def add(self, source: str, value: int) -> None:
        self.seen.append(torch.tensor([value]))
        self.by_source[source] = self.by_source.get(source, 0) + value

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "by_source": self.by_source}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.by_source = list(state["seen"]), dict(state["by_source"])


@pytest.mark.parametrize("live", [0, 1, 5])
def test_an_object_gets_back_the_tree_it_gave_whatever_its_live_one_looks_like(tmp_path: Path, live: int) -> None:
    saved, other = Ledgered(), Ledgered()
    for number in range(3):
        saved.add(f"source {number % 2}", number)
    for number in range(live):
        other.add("another", number)
    holdfast.save(tmp_path, {"ledgered": saved}, 1)
    holdfast.restore(tmp_path, {"ledgered": other})
    assert other.by_source == {"source 0": 2, "source 1": 1}
    assert [int(t) for t in other.seen] == [0, 1, 2]


def test_an_object_saved_empty_is_empty_after_the_load(tmp_path: Path) -> None:
    saved, other = Ledgered(), Ledgered()
    other.add("another", 1)
    holdfast.save(tmp_path, {"ledgered": saved}, 1)
    holdfast.restore(tmp_path, {"ledgered": other})
    assert (other.seen, other.by_source) == ([], {})
