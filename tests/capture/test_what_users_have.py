"""What trainings have besides a model and an optimizer: scalers, averages, statistics, loads between steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.store.local import LocalStore

from .jobs import Job, stored
from .slow import slow_copies  # noqa: F401
from .stores import Slow

pytestmark = pytest.mark.usefixtures("in_background", "slow_copies")
STEPS = 6
ALL = holdfast.Keep(last=None)
EACH = holdfast.Every(steps=1)
Parts = dict[str, Any]


def state_of(parts: Parts) -> holdfast.State:
    return holdfast.State(rng=False, **parts)


def copy_of(parts: Parts) -> dict[str, Any]:
    return {role: copy.deepcopy(part.state_dict()) for role, part in parts.items()}


def assert_as_at_the_call(run: Path, make: Callable[[], Parts], known: dict[int, dict[str, Any]]) -> None:
    """Every step is there, with the bits that the state had when `step` returned."""
    assert [step.step for step in holdfast.Run(run).steps()] == list(known)
    fresh = make()
    for step, wanted in known.items():
        holdfast.restore(run, state_of(fresh), step=step)
        assert bit_differences(copy_of(fresh), wanted) == [], step


def wide() -> nn.Sequential:
    """Layers that are worth copying in the background, statistics of normalization included."""
    return nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 512), nn.BatchNorm1d(512))


def backward(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, 512)).square().mean() * scale
    return loss


@pytest.mark.parametrize("agent", [True, False])
def test_a_gradient_scaler_that_skips_steps(tmp_path: Path, agent: bool) -> None:
    """Where it finds infinite gradients the optimizer does not step: nothing waits before the next forward."""

    def make() -> Parts:
        model = wide()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "scaler": scaler}

    parts, known, scales = make(), {}, []
    model, optimizer, scaler = parts.values()
    with holdfast.Checkpointer(
        tmp_path / "run", state_of(parts), save=EACH, keep=ALL, on_full="wait", agent=agent
    ) as ckpt:  # fmt: skip
        ckpt.resume()
        for step in range(1, STEPS + 1):
            scaler.scale(backward(model, float("inf") if step % 3 == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            ckpt.step(step)
            known[step] = copy_of(parts)
    assert sum(after < before for before, after in itertools.pairwise(scales)) == STEPS // 3, "steps were skipped"
    assert_as_at_the_call(tmp_path / "run", make, known)


def test_an_average_that_moves_though_the_optimizer_did_not_step_is_stored_as_at_the_call_or_not_at_all(tmp_path: Path) -> None:
    """A skipped step fires no hook, so that nothing holds the average's update back."""

    def make() -> Parts:
        model = wide()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "average": average}

    parts, known, handles, skipped = make(), {}, {}, STEPS // 2
    model, optimizer, average = parts.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is lost
        with holdfast.Checkpointer(tmp_path / "run", state_of(parts), save=EACH, keep=ALL, on_full="wait") as ckpt:
            ckpt.resume()
            for step in range(1, STEPS + 1):
                backward(model).backward()
                if step != skipped:
                    optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(model)
                handles[step] = ckpt.step(step)
                known[step] = copy_of(parts)
    lost = {step: handle.error for step, handle in handles.items() if handle is not None and handle.error is not None}
    assert set(lost) <= {skipped - 1}
    assert all(isinstance(error, holdfast.Torn) for error in lost.values())
    assert_as_at_the_call(tmp_path / "run", make, {step: state for step, state in known.items() if step not in lost})


@pytest.mark.parametrize(("swap", "agent"), [("load_state_dict", True), ("mutating", False)])
def test_an_average_that_is_swapped_in_for_an_evaluation(tmp_path: Path, swap: str, agent: bool) -> None:
    def make() -> Parts:
        model = wide()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "average": average}

    parts, known = make(), {}
    model, optimizer, average = parts.values()
    with holdfast.Checkpointer(
        tmp_path / "run", state_of(parts), save=EACH, keep=ALL, on_full="wait", agent=agent
    ) as ckpt:  # fmt: skip
        ckpt.resume()
        for step in range(1, STEPS + 1):
            backward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            ckpt.step(step)
            known[step] = copy_of(parts)
            if step % 3 == 0:
                trained = copy.deepcopy(model.state_dict())
                for values in (average.module.state_dict(), trained):
                    if swap == "load_state_dict":
                        model.load_state_dict(values)
                    else:
                        with ckpt.mutating(), torch.no_grad():
                            for name, tensor in model.state_dict().items():
                                tensor.copy_(values[name])
                    model(torch.randn(8, 512))
    assert_as_at_the_call(tmp_path / "run", make, known)


class Scaled(nn.Module):
    """As layers in FP8 are: the largest magnitudes of the last forwards, and scales made of them, are buffers."""

    def __init__(self, width: int = 512, history: int = 1024) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("amax_history", torch.zeros(history, 2))
        self.register_buffer("scale", torch.ones(2, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.amax_history.copy_(self.amax_history.roll(-1, 0))
            self.amax_history[-1] = torch.stack([x.abs().max(), self.linear.weight.abs().max()])
            self.scale.copy_((448.0 / self.amax_history.max(0).values.clamp(min=1e-9))[:, None].expand_as(self.scale))
        result: torch.Tensor = self.linear(x) * self.scale[0] / self.scale[0]
        return result


@pytest.mark.parametrize("make_model", [wide, lambda: nn.Sequential(Scaled(), nn.ReLU(), Scaled())], ids=["BatchNorm", "FP8"])
@pytest.mark.parametrize("forwards", [1, 3])
def test_buffers_that_the_forward_changes(tmp_path: Path, make_model: Callable[[], nn.Module], forwards: int) -> None:
    """Also where a forward comes without a step of the optimizer: of an evaluation, or where gradients are accumulated."""

    def make() -> Parts:
        model = make_model()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.01, 0.9)}

    parts, known = make(), {}
    model, optimizer = parts.values()
    with holdfast.Checkpointer(tmp_path / "run", state_of(parts), save=EACH, keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            for _ in range(forwards):
                backward(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.step(step)
            known[step] = copy_of(parts)
    assert_as_at_the_call(tmp_path / "run", make, known)


def test_buffers_that_held_still_for_long_and_then_move_are_stored_as_at_the_call_or_not_at_all(tmp_path: Path) -> None:
    """Statistics that are frozen, as in fine-tuning, and then not any more."""

    def make() -> Parts:
        model = wide()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.01, 0.9)}

    parts, known, handles = make(), {}, {}
    model, optimizer = parts.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is lost
        with holdfast.Checkpointer(tmp_path / "run", state_of(parts), save=EACH, keep=ALL, on_full="wait") as ckpt:
            ckpt.resume()
            for step in range(1, STEPS + 1):
                model.train(step > STEPS // 2)
                backward(model).backward()
                optimizer.step()
                optimizer.zero_grad()
                handles[step] = ckpt.step(step)
                known[step] = copy_of(parts)
    lost = {step: handle.error for step, handle in handles.items() if handle is not None and handle.error is not None}
    assert set(lost) <= {STEPS // 2}, "the last one before they move"
    assert all(isinstance(error, holdfast.Torn) for error in lost.values())
    assert_as_at_the_call(tmp_path / "run", make, {step: state for step, state in known.items() if step not in lost})


LOADS: dict[str, Callable[[Job, Job], None]] = {
    "model": lambda job, other: job.net.load_state_dict(other.net.state_dict()),
    "a module in it": lambda job, other: job.net.layers[1].load_state_dict(other.net.layers[1].state_dict()),
    "optimizer and model": lambda job, other: (
        job.optimizer.load_state_dict(other.optimizer.state_dict()), job.net.load_state_dict(other.net.state_dict())
    ),
}  # fmt: skip


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS.keys())
def test_what_is_loaded_while_copies_are_under_way_waits_for_them(tmp_path: Path, load: Callable[[Job, Job], None]) -> None:
    job, other, known = Job(), Job(seed=1), {}
    other.train()
    store = Slow(LocalStore(tmp_path / "run"), 0.05)
    with holdfast.Checkpointer(store, job.state, save=EACH, keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, STEPS + 1):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
            if step % 2 == 0 and step > 2:  # the tensors have been seen to hold still
                load(job, other)
    assert [step.step for step in holdfast.Run(tmp_path / "run").steps()] == list(known)
    for step, wanted in known.items():
        assert bit_differences(stored(tmp_path / "run", step), wanted) == []


def hooks_of(job: Job) -> int:
    modules = sum(len(module._load_state_dict_pre_hooks) for module in job.net.modules())
    return modules + len(job.optimizer._optimizer_load_state_dict_pre_hooks)


def test_nothing_is_left_on_the_users_parts_nor_keeps_them(tmp_path: Path) -> None:
    job = Job()
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=EACH, on_full="wait", agent=False) as ckpt:
        ckpt.resume()
        for step in range(1, 5):
            job.train()
            ckpt.step(step)
            if step == 2:  # another structure: all is covered anew, once
                job.optimizer.load_state_dict(job.optimizer.state_dict())
        assert hooks_of(job) == len(list(job.net.modules())) + 1
    assert hooks_of(job) == 0
    last = weakref.ref(job.net)
    with contextlib.suppress(UnboundLocalError):
        del job, ckpt
    gc.collect()
    assert last() is None


def test_a_copy_of_a_module_waits_for_nothing_and_needs_no_holdfast(tmp_path: Path) -> None:
    """Averages are deep copies, and whole modules are pickled, also for programs that have no holdfast."""
    net = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with holdfast.Checkpointer(tmp_path / "run", {"model": net, "optimizer": optimizer}, save=EACH, agent=False) as ckpt:
        ckpt.resume()
        ckpt.step(1)
        copies = copy.deepcopy(net), pickle.dumps(net)
    for made in (copies[0], pickle.loads(copies[1])):
        made.load_state_dict(net.state_dict())
    (tmp_path / "net").write_bytes(copies[1])
    code = (
        "import pickle, sys; net = pickle.load(open(sys.argv[1], 'rb')); net.load_state_dict(net.state_dict()); "
        "assert 'holdfast' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "net")], check=True, timeout=60)
