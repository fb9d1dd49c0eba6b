"""Optimizers: every moment has its parameter's full name, and training goes on bit-equal after a load, fresh or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import holdfast

from .models import Net, train

EqualStates = Callable[[Any, Any], bool]
Parameters = Any


def two_groups(parameters: Parameters) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [{"params": listed[:3], "weight_decay": 0.1}, {"params": listed[3:], "lr": 0.003}]


OPTIMIZERS: dict[str, Callable[[Parameters], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "adam with amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "adamw of tensor lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adamw of tensor lr, fused": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adamw of two groups": lambda p: optim.AdamW(two_groups(p), lr=0.01),
    "adamw of two groups that share a tensor lr": lambda p: optim.AdamW(
        [{"params": g["params"]} for g in two_groups(p)], lr=torch.tensor(0.01), foreach=False
    ),
    "adamax": lambda p: optim.Adamax(p),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.001, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p),
    "asgd": lambda p: optim.ASGD(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}


@pytest.fixture(params=OPTIMIZERS)
def make(request: pytest.FixtureRequest) -> Callable[[Parameters], optim.Optimizer]:
    return OPTIMIZERS[request.param]


def job(make: Callable[[Parameters], optim.Optimizer], *, seed: int = 0, steps: int = 0) -> dict[str, Any]:
    model = Net(seed=seed)
    optimizer = make(model.parameters())
    train(model, optimizer, range(steps))
    return {"model": model, "optimizer": optimizer}


def test_one_that_never_stepped_gets_its_state_and_training_goes_on_bit_equal(
    tmp_path: Path, make: Callable[[Parameters], optim.Optimizer], equal_states: EqualStates
) -> None:
    trained, fresh = job(make, steps=3), job(make, seed=1)
    holdfast.save(tmp_path, trained, 3)
    holdfast.restore(tmp_path, fresh)
    assert equal_states(trained, fresh)
    assert train(**trained, steps=range(3, 6)) == train(**fresh, steps=range(3, 6))
    assert equal_states(trained, fresh)


def test_one_that_has_stepped_is_filled_in_place_and_training_goes_on_bit_equal(
    tmp_path: Path, make: Callable[[Parameters], optim.Optimizer], equal_states: EqualStates
) -> None:
    trained, other = job(make, steps=3), job(make, seed=1, steps=5)
    holdfast.save(tmp_path, trained, 3)
    holdfast.restore(tmp_path, other)
    assert equal_states(trained, other)
    assert train(**trained, steps=range(3, 6)) == train(**other, steps=range(3, 6))
    assert equal_states(trained, other)


def test_load_gives_the_moments_by_the_full_names_of_their_parameters(tmp_path: Path) -> None:
    trained = job(OPTIMIZERS["adam with amsgrad"], steps=1)
    holdfast.save(tmp_path, trained, 1)
    moments = holdfast.load(tmp_path)["optimizer"]["model.blocks.0.linear.weight"]
    assert set(moments) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    kept = trained["optimizer"].state[trained["model"].blocks[0].linear.weight]
    assert all(torch.equal(kept[key], moments[key]) for key in moments)


def test_the_ledger_says_which_moments_it_made(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(OPTIMIZERS["sgd with momentum"], steps=1), 1)
    fresh = job(OPTIMIZERS["sgd with momentum"])
    ledger = holdfast.restore(tmp_path, fresh)
    names = {n for n in holdfast.State.of(fresh).names() if n.endswith("momentum_buffer")}
    assert len(names) == len(list(fresh["model"].parameters()))
    assert set(ledger.allocated) == names


def test_made_moments_lie_where_and_how_torch_would_have_put_them(tmp_path: Path) -> None:
    for name in ("adam", "adamw fused", "adamw of tensor lr"):
        fresh, trained = job(OPTIMIZERS[name]), job(OPTIMIZERS[name], steps=1)
        holdfast.save(tmp_path / name, trained, 1)
        holdfast.restore(tmp_path / name, fresh)
        for one, other in zip(trained["model"].parameters(), fresh["model"].parameters(), strict=True):
            for key, tensor in trained["optimizer"].state[one].items():
                made = fresh["optimizer"].state[other][key]
                assert (made.device, made.dtype, made.stride()) == (tensor.device, tensor.dtype, tensor.stride()), (name, key)
                assert not made.requires_grad


def test_the_moment_of_a_channels_last_weight_gets_its_strides(tmp_path: Path) -> None:
    def build(steps: int) -> dict[str, Any]:
        model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        optimizer = optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 3, 4, 4)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    trained, fresh = build(1), build(0)
    holdfast.save(tmp_path, trained, 1)
    holdfast.restore(tmp_path, fresh)
    theirs = trained["optimizer"].state[trained["model"].weight]["exp_avg"]
    ours = fresh["optimizer"].state[fresh["model"].weight]["exp_avg"]
    assert ours.stride() == theirs.stride() == trained["model"].weight.stride()
    assert torch.equal(ours, theirs)


def test_frozen_parameters_without_moments_come_back_without_them(tmp_path: Path, equal_states: EqualStates) -> None:
    def build(steps: int) -> dict[str, Any]:
        model = Net(tied=False)
        model.embed.requires_grad_(False)
        optimizer = optim.Adam(model.parameters())
        train(model, optimizer, range(steps))
        return {"model": model, "optimizer": optimizer}

    trained, fresh = build(2), build(0)
    holdfast.save(tmp_path, trained, 2)
    holdfast.restore(tmp_path, fresh)
    assert fresh["model"].embed.weight not in fresh["optimizer"].state
    assert equal_states(trained, fresh)


def test_moments_that_only_some_live_parameters_have_yet_are_made_for_the_others(
    tmp_path: Path, equal_states: EqualStates
) -> None:
    trained, partly = job(OPTIMIZERS["adam"], steps=3), job(OPTIMIZERS["adam"], seed=1)
    partly["model"].blocks[0].requires_grad_(False)
    train(**partly, steps=range(1))
    partly["model"].blocks[0].requires_grad_(True)
    holdfast.save(tmp_path, trained, 3)
    ledger = holdfast.restore(tmp_path, partly)
    assert "optimizer.model.blocks.0.linear.weight.exp_avg" in ledger.allocated
    assert "optimizer.model.blocks.1.linear.weight.exp_avg" in ledger.filled
    assert equal_states(trained, partly)


def test_an_optimizer_without_its_model_is_restored_by_the_places_of_its_parameters(
    tmp_path: Path, equal_states: EqualStates
) -> None:
    trained, fresh = job(OPTIMIZERS["adamw of two groups"], steps=2), job(OPTIMIZERS["adamw of two groups"])
    holdfast.save(tmp_path, {"optimizer": trained["optimizer"]}, 2)
    holdfast.restore(tmp_path, {"optimizer": fresh["optimizer"]})
    assert equal_states(trained["optimizer"], fresh["optimizer"])


class Averaging(optim.SGD):
    """Keeps what belongs to no parameter where torch allows that: in `state`, under a key that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        shared = self.state["shared"]
        shared["steps"] = shared.get("steps", 0) + 1
        shared["norm"] = torch.tensor([float(shared["steps"])])
        return super().step(closure)


class Counting(optim.SGD):
    """Keeps something outside of `state` and adds it to its state dict."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        super().load_state_dict({key: value for key, value in state.items() if key != "count"})


@pytest.mark.parametrize("kind", [Averaging, Counting])
@pytest.mark.parametrize("live_steps", [0, 1])
def test_state_that_belongs_to_no_parameter_comes_back_or_is_refused(
    tmp_path: Path, equal_states: EqualStates, kind: type[optim.SGD], live_steps: int
) -> None:
    def make(parameters: Parameters) -> optim.Optimizer:
        return kind(parameters, lr=0.1)

    trained, other = job(make, steps=3), job(make, steps=live_steps)
    try:
        holdfast.save(tmp_path, trained, 3)
    except (holdfast.Unsupported, holdfast.Refused) as refused:
        assert "optimizer" in str(refused)
    else:
        holdfast.restore(tmp_path, other)
        assert equal_states(trained["optimizer"], other["optimizer"]), "dropped without a word"


def test_hyper_parameters_come_back_with_their_types(tmp_path: Path) -> None:
    trained = job(lambda p: optim.AdamW(p, lr=1e-3, betas=(0.8, 0.95), foreach=False))
    fresh = job(lambda p: optim.AdamW(p, lr=5e-3, betas=(0.9, 0.99)))
    holdfast.save(tmp_path, trained, 1)
    holdfast.restore(tmp_path, fresh)
    group = fresh["optimizer"].param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"], group["fused"]) == (1e-3, (0.8, 0.95), False, None)


def test_the_states_of_several_optimizers_of_one_model_stay_apart(tmp_path: Path, equal_states: EqualStates) -> None:
    def build(seed: int, steps: int) -> dict[str, Any]:
        model = Net(seed=seed, tied=False)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim < 2]
        parts = {"model": model, "inner": optim.Adam(matrices, lr=0.01), "outer": optim.SGD(others, lr=0.1, momentum=0.9)}
        for number in range(steps):
            train(model, parts["inner"], range(number, number + 1))
            parts["outer"].step()
        return parts

    trained, fresh = build(0, 3), build(1, 0)
    holdfast.save(tmp_path, trained, 3)
    holdfast.restore(tmp_path, fresh)
    assert equal_states(trained, fresh)


def test_a_parameter_group_added_in_training_is_saved_and_asked_for_at_the_load(tmp_path: Path) -> None:
    def build() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return {"model": model, "optimizer": optim.Adam(model[0].parameters())}

    trained, fresh = build(), build()
    trained["optimizer"].add_param_group({"params": trained["model"][1].parameters(), "lr": 0.5})
    holdfast.save(tmp_path, trained, 1)
    with pytest.raises(holdfast.Mismatch, match=r"optimizer\.param_groups\.1"):
        holdfast.restore(tmp_path, fresh)
    fresh["optimizer"].add_param_group({"params": fresh["model"][1].parameters()})
    holdfast.restore(tmp_path, fresh)
    assert fresh["optimizer"].param_groups[1]["lr"] == 0.5
