"""What is captured from a GPU is the state at the call; the host waits for nothing, and the device no longer than it must."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences

import holdfast

from .jobs import CUDA, Job, stored

pytestmark = [pytest.mark.usefixtures("in_background"), pytest.mark.slow]
ALL = holdfast.Keep(last=None)
LONG_CYCLES = 2_000_000_000
"""About a second of a GPU."""


def assert_as_at_the_call(run: Path, known: dict[int, dict[str, Any]], other: Job) -> None:
    steps = [one.step for one in holdfast.Run(run).steps()]
    assert steps == list(known)
    wrong = {step: bit_differences(stored(run, step, other), known[step]) for step in steps}
    assert {step: lines for step, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": True, "capturable": True}])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_two_hundred_steps_are_stored_as_they_were(tmp_path: Path, agent: bool, options: dict[str, Any], is_scaled: bool) -> None:
    job, known = Job(is_scaled=is_scaled, **options), {}
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, agent=agent, on_full="wait"
    ) as ckpt:
        for step in range(ckpt.resume() + 1, 201):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
    other = Job(seed=9, is_scaled=is_scaled, **options)
    other.train()
    assert_as_at_the_call(tmp_path / "run", known, other)


def test_a_training_on_a_stream_of_its_own(tmp_path: Path) -> None:
    job, known = Job(fused=True), {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait"
    ) as ckpt:  # fmt: skip
        for step in range(ckpt.resume() + 1, 31):
            torch.cuda._sleep(20_000_000)  # the device is far behind when the call comes
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
    torch.cuda.synchronize()
    other = Job(seed=9, fused=True)
    other.train()
    assert_as_at_the_call(tmp_path / "run", known, other)


def test_neither_the_call_nor_the_optimizer_waits_for_the_device(tmp_path: Path) -> None:
    job = Job(fused=True)
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        for step in range(ckpt.resume() + 1, 6):  # the first captures are waited for and compared
            job.train()
            ckpt.step(step)
        torch.cuda.synchronize()
        job.train()
        torch.cuda._sleep(LONG_CYCLES)
        event = torch.cuda.Event()
        event.record()
        ckpt.step(6)
        assert not event.query(), "the call waited for the device"
        job.train()
        assert not event.query(), "the step of the optimizer waited for the device"


@pytest.mark.parametrize("wrap", [False, True])
def test_what_changes_right_after_the_call_is_as_at_the_call_or_torn(tmp_path: Path, wrap: bool) -> None:
    job, known, handles = Job(fused=True), {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
            for step in range(ckpt.resume() + 1, 21):
                job.train()
                known[step] = job.copy()
                handles[step] = ckpt.step(step)
                if step % 5 == 0 and wrap:
                    with ckpt.mutating():
                        change(job)
                elif step % 5 == 0:
                    change(job)
    torn = [step for step, handle in handles.items() if handle is not None and isinstance(handle.error, holdfast.Torn)]
    assert set(torn) <= (set() if wrap else {5, 10, 15, 20})
    other = Job(seed=9, fused=True)
    other.train()
    assert_as_at_the_call(tmp_path / "run", {step: state for step, state in known.items() if step not in torn}, other)


def change(job: Job) -> None:
    with torch.no_grad():
        for tensor in job.net.parameters():
            tensor.add_(1)


def test_saving_within_the_call_waits_for_the_stream_that_computes(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1_000_000, device=CUDA)
        torch.cuda._sleep(LONG_CYCLES)
        tensor.add_(1)
        holdfast.save(tmp_path, {"tensor": tensor}, 1)
    assert holdfast.load(tmp_path)["tensor"].eq(1).all()
