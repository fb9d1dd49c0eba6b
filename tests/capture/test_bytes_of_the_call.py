"""What is stored is the state at the call of `step`, whatever happens to it after the call returned; or nothing is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences

import holdfast
from holdfast.capture import barrier
from holdfast.store.local import LocalStore

from .jobs import Job, stored
from .stores import Gated, Slow

pytestmark = [pytest.mark.usefixtures("in_background"), pytest.mark.slow]
ALL = holdfast.Keep(last=None)


def steps_of(run: Path) -> list[int]:
    return [step.step for step in holdfast.Run(run).steps()]


def assert_as_at_the_call(run: Path, known: dict[int, dict[str, Any]], steps: list[int]) -> None:
    for step in steps:
        assert bit_differences(stored(run, step), known[step]) == []


@pytest.mark.parametrize(
    ("options", "agent"),
    [({"foreach": True}, True), ({"foreach": True}, False), ({"foreach": False}, False), ({"fused": True}, True)],
)
def test_every_step_of_a_training_is_stored_as_it_was(tmp_path: Path, agent: bool, options: dict[str, Any]) -> None:
    job, known = Job(**options), {}
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, agent=agent, on_full="wait"
    ) as ckpt:
        for step in range(ckpt.resume() + 1, 16):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
    assert steps_of(tmp_path / "run") == list(known)
    assert_as_at_the_call(tmp_path / "run", known, list(known))


@pytest.mark.slow
def test_five_hundred_steps_each_saved(tmp_path: Path) -> None:
    job, known = Job(), {}
    with holdfast.Checkpointer(
        tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=20), on_full="wait"
    ) as ckpt:
        for step in range(ckpt.resume() + 1, 501):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
            known.pop(step - 20, None)
            if step % 50 == 0:
                assert ckpt.save().wait("durable", 60).level == "durable"
                assert_as_at_the_call(tmp_path / "run", known, steps_of(tmp_path / "run")[-2:])
    assert steps_of(tmp_path / "run") == list(range(481, 501))
    assert_as_at_the_call(tmp_path / "run", known, list(known))


def change_in_place(tensors: Iterator[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.add_(1)


def change_data(tensors: Iterator[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.data.add_(1)


def change_memory(tensors: Iterator[torch.Tensor]) -> None:
    for tensor in tensors:
        array = tensor.detach().numpy()
        array += 1


def tensors_of(job: Job) -> Iterator[torch.Tensor]:
    yield from job.net.parameters()
    yield from job.net.buffers()
    for state in job.optimizer.state.values():
        yield from state.values()


@pytest.mark.parametrize("change", [change_in_place, change_data, change_memory])
def test_every_tensor_changed_right_after_the_call_while_the_writer_is_slow(
    tmp_path: Path, change: Callable[[Iterator[torch.Tensor]], None]
) -> None:
    """From the first save on: nothing is copied later that was not seen to hold still, and these never do."""
    job, known = Job(), {}
    store = Slow(LocalStore(tmp_path / "run"), 0.05)
    with holdfast.Checkpointer(store, job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 9):
            job.train()
            before = job.copy()
            ckpt.step(step)
            change(tensors_of(job))
            known[step] = before
    assert steps_of(tmp_path / "run") == list(known)
    assert_as_at_the_call(tmp_path / "run", known, list(known))


@pytest.mark.parametrize("change", [change_in_place, change_data, change_memory])
def test_a_change_after_many_quiet_steps_is_stored_as_at_the_call_or_not_at_all(
    tmp_path: Path, change: Callable[[Iterator[torch.Tensor]], None]
) -> None:
    job, known, lost, handles = Job(), {}, [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what is lost
        with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
            ckpt.resume()
            for step in range(1, 23):  # the last step is not lost: it would be saved again at the end, as it is then
                job.train()
                before = job.copy()
                handles[step] = ckpt.step(step)
                known[step] = before
                if step % 5 == 0:
                    change(tensors_of(job))
    for step, handle in handles.items():
        assert handle is not None
        if handle.error is not None:
            assert isinstance(handle.error, holdfast.Torn)
            assert "ckpt.mutating()" in str(handle.error)
            lost.append(step)
    there = steps_of(tmp_path / "run")
    assert sorted(there + lost) == sorted(known)
    assert set(lost) <= {5, 10, 15, 20}
    assert_as_at_the_call(tmp_path / "run", known, there)


def test_mutating_waits_for_what_is_being_copied(tmp_path: Path) -> None:
    job, known = Job(), {}
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 11):
            job.train()
            ckpt.step(step)
            known[step] = job.copy()
            with ckpt.mutating():
                change_data(tensors_of(job))
    assert steps_of(tmp_path / "run") == list(known)
    assert_as_at_the_call(tmp_path / "run", known, list(known))


def test_three_saves_begun_before_the_first_is_durable(tmp_path: Path) -> None:
    job, known = Job(), {}
    store = Gated(LocalStore(tmp_path / "run"))
    with holdfast.Checkpointer(store, job.state, save=holdfast.Every(steps=1), keep=ALL) as ckpt:
        ckpt.resume()
        job.train()
        first = ckpt.step(1)
        assert first is not None
        first.wait("durable", 30)
        store.gate.clear()
        handles = []
        for step in range(2, 7):
            job.train()
            handles.append(ckpt.step(step))
            known[step] = job.copy()
        begun = [handle for handle in handles if handle is not None]
        assert len(begun) >= 2, "memory for two besides the one that is complete"
        assert not any(handle.level == "durable" for handle in begun)
        assert handles[-1] is None, "there was no memory for all of them, and nothing waited for it"
        store.gate.set()
        for handle in begun:
            handle.wait("durable", 30)
    assert_as_at_the_call(tmp_path / "run", known, [handle.step for handle in begun])


class Sgd:
    """An optimizer that torch does not know."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.moments = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            moment.mul_(0.9).add_(parameter.grad)
            parameter.add_(moment, alpha=-self.lr)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments, "lr": self.lr}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.moments, state["moments"], strict=True):
            mine.copy_(theirs)
        self.lr = state["lr"]


def test_an_optimizer_that_is_none_of_torch(tmp_path: Path) -> None:
    job, known = Job(Sgd), {}
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 10):
            job.train()
            ckpt.step(step)
            known[step] = {name: tensor.detach().clone() for name, tensor in job.net.state_dict().items()}
            known[step]["moment"] = job.optimizer.moments[0].clone()
    assert steps_of(tmp_path / "run") == list(known)
    for step, wanted in known.items():
        found = holdfast.load(tmp_path / "run", step=step)
        moment = found["optimizer"]["moments"][0]
        assert bit_differences({**found["model"], "moment": moment}, wanted) == []


def test_optimizers_that_step_inside_the_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    job = Job()
    each = {p: torch.optim.AdamW([p], lr=1e-3) for p in job.net.parameters()}
    for parameter, optimizer in each.items():

        def update(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    state = holdfast.State(model=job.net, optimizer=list(each.values()))
    known = {}
    with holdfast.Checkpointer(tmp_path / "run", state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 10):
            job.backward()
            ckpt.step(step)
            known[step] = {name: tensor.detach().clone() for name, tensor in job.net.state_dict().items()}
    assert steps_of(tmp_path / "run") == list(known)
    for step, wanted in known.items():
        assert bit_differences(holdfast.load(tmp_path / "run", step=step)["model"], wanted) == []


def test_an_optimizer_with_a_closure_that_keeps_lists(tmp_path: Path) -> None:
    job, known = Job(torch.optim.LBFGS, max_iter=3, history_size=2), {}
    tokens = torch.randint(0, 50, (16,))

    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(job.net(tokens), tokens)
        loss.backward()
        return loss

    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 9):
            job.optimizer.step(closure)
            ckpt.step(step)
            known[step] = job.copy()["model"]
    assert steps_of(tmp_path / "run") == list(known)
    for step, wanted in known.items():
        assert bit_differences(holdfast.load(tmp_path / "run", step=step)["model"], wanted) == []


def test_memory_that_is_exchanged_under_a_parameter(tmp_path: Path) -> None:
    """`p.data = other` keeps the parameter and changes its memory; so does whatever offloads."""
    job, known = Job(), {}
    with holdfast.Checkpointer(tmp_path / "run", job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 10):
            job.train()
            if step % 4 == 0:
                for parameter in job.net.parameters():
                    parameter.data = parameter.data.clone()
            ckpt.step(step)
            known[step] = job.copy()
    assert_as_at_the_call(tmp_path / "run", known, steps_of(tmp_path / "run"))
    assert steps_of(tmp_path / "run") == list(known)


def test_a_structure_that_changes_during_training(tmp_path: Path) -> None:
    job = Job()
    extra = torch.nn.Linear(300, 300)
    run = tmp_path / "run"
    with holdfast.Checkpointer(run, job.state, save=holdfast.Every(steps=1), keep=ALL, on_full="wait") as ckpt:
        ckpt.resume()
        for step in range(1, 11):
            if step == 5:
                job.net.extra = extra
                job.optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
            if step == 8:
                del job.net.extra
                del job.optimizer.param_groups[-1]
            job.train()
            ckpt.step(step)
    assert steps_of(run) == list(range(1, 11))
    for step in range(1, 11):
        with holdfast.open(run, step=step) as checkpoint:
            assert ("model.extra.weight" in checkpoint.names) == (5 <= step < 8)
            assert checkpoint.verify() == []


def test_the_barrier_is_one_hook_for_all() -> None:
    barrier.install()
    barrier.install()
    assert len(barrier._installed) == 1
