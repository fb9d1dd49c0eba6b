"""What is captured from a GPU is the state at the call; the host waits for nothing, and the device no longer than it must."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences

import holdfast
from holdfast.capture.device import streams_of

from .jobs import CUDA, Job, stored

pytestmark = [pytest.mark.usefixtures("in_background"), pytest.mark.slow, pytest.mark.timeout(600)]
ALL = holdfast.Keep(last=None)
LONG_CYCLES = 2_000_000_000
"""About a second of a GPU."""
SHORT_CYCLES = 50_000_000


def saving(run: Path, job: Job, **options: Any) -> holdfast.Checkpointer:
    return holdfast.Checkpointer(run, job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait", **options)


@contextlib.contextmanager
def without_waiting(ckpt: holdfast.Checkpointer) -> Iterator[None]:
    """In place of `mutating` in tests of what happens without it."""
    yield


def delay_copies() -> None:
    """Have what is copied next come late."""
    streams = streams_of(torch.device("cuda", torch.cuda.current_device()))
    with torch.cuda.stream(streams._copies):  # type: ignore[attr-defined]
        torch.cuda._sleep(SHORT_CYCLES)


def assert_as_at_the_call(run: Path, known: dict[int, dict[str, Any]], **options: Any) -> None:
    other = Job(seed=9, **options)
    with holdfast.Checkpointer(run.with_name("other"), other.state, agent=False) as ckpt:
        ckpt.resume()
        other.train(ckpt)
    steps = [one.step for one in holdfast.Run(run).steps()]
    assert steps == list(known)
    wrong = {step: bit_differences(stored(run, step, other), known[step]) for step in steps}
    assert {step: lines for step, lines in wrong.items() if lines} == {}
    shutil.rmtree(run)


@pytest.mark.parametrize("agent", [True, False])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": True, "capturable": True}])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_two_hundred_steps_are_stored_as_they_were(tmp_path: Path, agent: bool, options: dict[str, Any], is_scaled: bool) -> None:
    job, known = Job(is_scaled=is_scaled, **options), {}
    with saving(tmp_path / "run", job, agent=agent) as ckpt:
        for step in range(ckpt.resume() + 1, 201):
            job.train(ckpt)
            ckpt.step(step)
            known[step] = job.copy()
    assert_as_at_the_call(tmp_path / "run", known, is_scaled=is_scaled, **options)


def test_a_training_on_a_stream_of_its_own_whose_copies_come_late(tmp_path: Path) -> None:
    job, known = Job(fused=True), {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), saving(tmp_path / "run", job) as ckpt:
        for step in range(ckpt.resume() + 1, 31):
            torch.cuda._sleep(SHORT_CYCLES)  # the device is far behind when the call comes
            job.train(ckpt)
            delay_copies()
            ckpt.step(step)
            known[step] = job.copy()
    torch.cuda.synchronize()
    assert_as_at_the_call(tmp_path / "run", known, fused=True)


def test_neither_the_call_nor_the_optimizer_waits_for_the_device(tmp_path: Path) -> None:
    job = Job(fused=True)
    job.average = torch.nn.Module()  # type: ignore[assignment]  # nothing that waits by itself
    with saving(tmp_path / "run", job) as ckpt:
        for step in range(ckpt.resume() + 1, 6):  # the first captures are waited for and compared
            train_without_average(job)
            handle = ckpt.step(step)
        assert handle is not None
        handle.wait("durable", 60)
        torch.cuda.synchronize()
        train_without_average(job)
        torch.cuda._sleep(LONG_CYCLES)
        event = torch.cuda.Event()
        event.record()
        ckpt.step(6)
        assert not event.query(), "the call waited for the device"
        train_without_average(job)
        assert not event.query(), "the step of the optimizer waited for the device"


def train_without_average(job: Job) -> None:
    tokens = torch.randint(0, 97, (32,), device=CUDA)
    torch.nn.functional.cross_entropy(job.net(tokens), tokens).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


@pytest.mark.parametrize("wrap", [False, True])
def test_what_changes_right_after_the_call_is_as_at_the_call_or_torn(tmp_path: Path, wrap: bool) -> None:
    job, known, handles = Job(fused=True), {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with saving(tmp_path / "run", job) as ckpt:
            for step in range(ckpt.resume() + 1, 23):
                job.train(ckpt)
                if step % 5 == 0:
                    delay_copies()
                known[step] = job.copy()
                handles[step] = ckpt.step(step)
                if step % 5 == 0:
                    with (ckpt.mutating if wrap else lambda: without_waiting(ckpt))(), torch.no_grad():
                        for tensor in job.net.parameters():
                            tensor.add_(1)
    torn = [step for step, handle in handles.items() if handle is not None and isinstance(handle.error, holdfast.Torn)]
    assert set(torn) <= (set() if wrap else {5, 10, 15, 20})
    assert wrap or 5 in torn, "nothing was torn: this test shows nothing"
    assert_as_at_the_call(tmp_path / "run", {step: state for step, state in known.items() if step not in torn}, fused=True)


def test_saving_within_the_call_waits_for_the_stream_that_computes(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(1_000_000, device=CUDA)
        torch.cuda._sleep(LONG_CYCLES)
        tensor.add_(1)
        holdfast.save(tmp_path, {"tensor": tensor}, 1)
    assert holdfast.load(tmp_path)["tensor"].eq(1).all()
