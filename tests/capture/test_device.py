"""What lies on a device is stored as it was at the call, though the device computes and copies late and nobody waits for it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast

from .emulated import Device, install

pytestmark = [pytest.mark.usefixtures("in_background")]
SHAPES = {"wide": (300, 700), "long": (1_300_001,), "small": (7,), "scalar": (), "empty": (0, 3), "odd": (513, 3)}
STEPS = 12


class Lagging(torch.optim.Optimizer):
    """One whose `step` only enqueues what it does."""

    def __init__(self, params: Any, device: Device) -> None:
        super().__init__(params, {})
        self._device = device

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter] = {"moment": torch.zeros(parameter.shape), "step": torch.zeros(())}
                self._device.add(parameter, 1.0)
                for value in self.state[parameter].values():
                    self._device.add(value, 2.0)


class Job:
    """Parameters that an optimizer changes, and buffers that each forward does; after step n all are what n says."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.model = torch.nn.Module()
        for name, shape in SHAPES.items():
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.model.register_parameter("turned", torch.nn.Parameter(torch.zeros(90, 70).t()))
        self.model.register_buffer("seen", torch.zeros(5))
        self.model.register_buffer("statistics", torch.zeros(4000))
        self.optimizer = Lagging(self.model.parameters(), device)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def forward(self) -> None:
        for buffer in self.model.buffers():
            self.device.add(buffer, 3.0)

    def train(self) -> None:
        self.forward()
        self.optimizer.step()

    def wrong(self, step: int) -> list[str]:
        """What is not as it is after a step."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        factors = dict.fromkeys(dict(self.model.named_parameters()), 1.0) | dict.fromkeys(moments, 2.0)
        values = dict(self.model.named_parameters()) | moments
        for name, buffer in self.model.named_buffers():
            values[name], factors[name] = buffer, 3.0
        return [name for name, value in values.items() if not torch.equal(value, torch.full_like(value, factors[name] * step))]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = install(monkeypatch, seed=5)
    yield made
    made.close()


def wrong_in(run: Path, step: int) -> list[str]:
    device = Device(0)
    try:
        job = Job(device)
        job.train()
        device.settle()
        holdfast.restore(run, job.state, step=step)
        return job.wrong(step)
    finally:
        device.close()


@pytest.mark.parametrize("agent", [True, False])
def test_every_step_is_stored_as_it_was_at_the_call_and_nobody_waits(tmp_path: Path, device: Device, agent: bool) -> None:
    job = Job(device)
    keep = holdfast.Keep(last=None)
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=keep, agent=agent, on_full="wait"
    ) as ckpt:
        for step in range(ckpt.resume() + 1, STEPS + 1):
            job.train()
            ckpt.step(step)
            if step == 3:  # the first captures were waited for and compared: the first of all, and that of the buffers
                waited = device.waits
        assert device.waits == waited
        assert device.pinned
    assert device.pinned == []
    steps = [one.step for one in holdfast.Run(tmp_path / "run").steps()]
    assert steps == list(range(1, STEPS + 1))
    assert {step: wrong for step in steps if (wrong := wrong_in(tmp_path / "run", step))} == {}


def test_what_changes_in_mid_capture_is_never_stored(tmp_path: Path, device: Device) -> None:
    """By the device, after steps that were quiet: the step is as it was at the call, or it is declared torn."""
    job, handles = Job(device), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is torn
        with holdfast.Checkpointer(
            tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=None), on_full="wait"
        ) as ckpt:
            ckpt.resume()
            for step in range(1, STEPS + 1):
                job.train()
                handles[step] = ckpt.step(step)
                if step in (6, 9):
                    for parameter in job.model.parameters():
                        device.add(parameter, 1.0)
                    with ckpt.mutating():
                        device.settle()
                        for parameter in job.model.parameters():
                            device.add(parameter, -1.0)
    torn = {step for step, handle in handles.items() if handle is not None and handle.error is not None}
    assert torn <= {6, 9}
    steps = {one.step for one in holdfast.Run(tmp_path / "run").steps()}
    assert steps == set(handles) - torn
    assert {step: wrong for step in steps if (wrong := wrong_in(tmp_path / "run", step))} == {}


def test_mutating_waits_for_the_device(tmp_path: Path, device: Device) -> None:
    job = Job(device)
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 6):
            job.train()
            ckpt.step(step)
            with ckpt.mutating():
                device.settle()
                for parameter in job.model.parameters():  # by the host, which no stream orders
                    parameter.data.add_(100.0)
                    parameter.data.sub_(100.0)
    steps = [one.step for one in holdfast.Run(tmp_path / "run").steps()]
    assert steps[-1] == 5
    assert {step: wrong for step in steps if (wrong := wrong_in(tmp_path / "run", step))} == {}


def test_a_load_from_elsewhere_waits_for_the_device(tmp_path: Path, device: Device) -> None:
    """`restore` writes into live tensors itself, in no stream that the capture knows of."""
    job = Job(device)
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=None), on_full="wait"
    ) as ckpt:
        ckpt.resume()
        for step in range(1, 6):
            job.train()
            handle = ckpt.step(step)
        holdfast.restore(tmp_path / "run", job.state, step=1)
        assert handle is not None
        assert handle.wait("durable", 60).error is None
    assert wrong_in(tmp_path / "run", 5) == []
