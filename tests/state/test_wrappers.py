"""Wrappers: a model has the names of the plain one, however it is wrapped, and each loads what the other saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import holdfast

from .models import NET_NAMES, Net, train
from .test_module_names import Counter

EqualStates = Callable[[Any, Any], bool]


def compile_children(model: nn.Module) -> nn.Module:
    """As `model.blocks[i] = torch.compile(...)` does for each layer."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
    return model


def checkpoint_children(model: nn.Module) -> nn.Module:
    """Activation checkpointing around each layer."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": torch.compile,
    "compiled by layer": compile_children,
    "data parallel": nn.DataParallel,
    "activation checkpointing": checkpoint_children,
    "compiled data parallel": lambda m: torch.compile(nn.DataParallel(m)),
    "data parallel of compiled layers": lambda m: nn.DataParallel(compile_children(m)),
    "all checkpointed and compiled": lambda m: torch.compile(checkpoint_wrapper(checkpoint_children(m))),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    return WRAPPERS[request.param]


def job(wrap: Callable[[nn.Module], nn.Module] = lambda m: m, *, seed: int, steps: int = 0) -> dict[str, Any]:
    """A model, wrapped or not, and the optimizer of its parameters. Trains plain, as all that a wrapper changes is names."""
    model = Net(blocks=1, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(steps))
    return {"model": wrap(model), "optimizer": optimizer}


def test_a_wrapped_model_has_the_names_of_the_plain_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    assert holdfast.State(rng=False, model=wrap(Net(blocks=1))).names() == NET_NAMES


def test_its_optimizer_has_the_names_of_the_plain_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped, plain = (holdfast.State(rng=False, **job(w, seed=1, steps=1)) for w in (wrap, lambda m: m))
    assert wrapped.names() == plain.names()
    assert "optimizer.model.blocks.0.linear.weight.exp_avg" in wrapped.names()
    assert wrapped.digest() == plain.digest()


def test_a_wrapped_job_loads_what_the_plain_one_saved(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], equal_states: EqualStates
) -> None:
    plain, wrapped = job(seed=1, steps=2), job(wrap, seed=2)
    holdfast.save(tmp_path, plain, 2)
    holdfast.restore(tmp_path, wrapped)
    assert list(wrapped["optimizer"].state_dict()["state"])
    assert equal_states(plain["optimizer"], wrapped["optimizer"])
    assert equal_states(dict(enumerate(plain["model"].parameters())), dict(enumerate(wrapped["model"].parameters())))


def test_a_plain_job_loads_what_the_wrapped_one_saved(
    tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], equal_states: EqualStates
) -> None:
    wrapped, plain, twin = job(wrap, seed=1, steps=2), job(seed=2), job(seed=1, steps=2)
    holdfast.save(tmp_path, wrapped, 2)
    holdfast.restore(tmp_path, plain)
    assert equal_states(plain, twin)


def test_the_state_dict_in_the_file_has_no_wrapper_in_it(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    holdfast.save(tmp_path, job(wrap, seed=1), 1)
    assert sorted(holdfast.load(tmp_path)["model"]) == sorted(Net(blocks=1).state_dict())


def test_extra_state_reaches_a_module_inside_a_wrapper(tmp_path: Path) -> None:
    for name, wrapper in {"checkpointed": checkpoint_wrapper, "compiled": torch.compile}.items():
        run, model, other = tmp_path / name, Counter(5), Counter(0)
        holdfast.save(run, {"model": nn.Sequential(wrapper(model))}, 1)
        holdfast.restore(run, {"model": nn.Sequential(wrapper(other))})
        assert other.extra["seen"] == 5, name


def test_averaged_weights_have_the_names_of_the_model_and_their_own_counter(tmp_path: Path) -> None:
    model = Net(blocks=1)
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    state = holdfast.State(rng=False, averaged=averaged)
    assert state.names() == sorted([*(n.replace("model.", "averaged.") for n in NET_NAMES), "averaged.n_averaged"])

    holdfast.save(tmp_path, state, 1)
    fresh = AveragedModel(Net(blocks=1, seed=3), use_buffers=True)
    holdfast.restore(tmp_path, {"averaged": fresh})
    assert fresh.n_averaged == 1
    assert torch.equal(fresh.module.embed.weight, averaged.module.embed.weight)


def test_a_plain_model_loads_the_averaged_weights_under_another_role(tmp_path: Path) -> None:
    averaged, model = AveragedModel(Net(seed=1)), Net(seed=2)
    holdfast.save(tmp_path, {"averaged": averaged}, 1)
    ledger = holdfast.restore(tmp_path, {"model": model}, rename={"averaged.*": "model.*"}, waive="model.n_averaged")
    assert list(ledger.waived) == ["model.n_averaged"]
    assert torch.equal(model.embed.weight, averaged.module.embed.weight)


class Scaled(nn.Module):
    """No wrapper: its only child is called `module` by chance, and it has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2))


def test_a_child_that_is_called_module_by_chance_does_not_stop_a_model_from_being_saved(
    tmp_path: Path, equal_states: EqualStates
) -> None:
    model, other = Scaled(), Scaled()
    holdfast.save(tmp_path, {"model": model}, 1)
    holdfast.restore(tmp_path, {"model": other})
    assert equal_states(model, other)


def test_a_child_that_is_called_module_beside_others_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False), "head": nn.Linear(1, 1, bias=False)})
    assert holdfast.State(rng=False, model=model).names() == ["model.head.weight", "model.module.weight"]
