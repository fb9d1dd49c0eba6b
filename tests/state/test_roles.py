"""Roles: several parts in one state, parts whose names are united, parts held elsewhere, and names that collide."""

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


def names(**roles: Any) -> list[str]:
    return holdfast.State(rng=False, **roles).names()


def gan(seed: int, steps: int) -> dict[str, Any]:
    """Two models with an optimizer each."""
    parts: dict[str, Any] = {}
    for number, name in enumerate(("generator", "critic")):
        parts[name] = Net(seed=seed + number)
        parts[f"{name}_optimizer"] = optim.Adam(parts[name].parameters(), lr=0.01 * (number + 1))
        train(parts[name], parts[f"{name}_optimizer"], range(steps))
    return parts


def test_several_models_and_optimizers_in_one_state_keep_apart(tmp_path: Path, equal_states: EqualStates) -> None:
    trained, fresh = gan(0, 2), gan(5, 0)
    holdfast.save(tmp_path, trained, 2)
    holdfast.restore(tmp_path, fresh)
    assert equal_states(trained, fresh)
    assert "critic_optimizer.critic.embed.weight.exp_avg" in names(**fresh)


def stages(seed: int) -> tuple[list[nn.Module], list[optim.Optimizer]]:
    """Two pipeline stages on one rank, each with the layers that it runs under their names in the whole model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        parts = [nn.ModuleDict({str(i): nn.Linear(2, 2)}) for i in (0, 2)]
    return parts, [optim.SGD(part.parameters(), lr=0.1 * (i + 1), momentum=0.9) for i, part in enumerate(parts)]


def test_the_parts_of_a_list_are_united_under_its_role(tmp_path: Path, equal_states: EqualStates) -> None:
    (models, optimizers), (fresh, fresh_optimizers) = stages(0), stages(1)
    for model, optimizer in zip(models, optimizers, strict=True):
        next(iter(model.values()))(torch.ones(2)).sum().backward()
        optimizer.step()
    state = holdfast.State(rng=False, model=models, optimizer=optimizers)
    assert [n for n in state.names() if n.startswith("model")] == [
        "model.0.bias",
        "model.0.weight",
        "model.2.bias",
        "model.2.weight",
    ]
    assert "optimizer.model.2.weight.momentum_buffer" in state.names()

    holdfast.save(tmp_path, state, 1)
    holdfast.restore(tmp_path, {"model": fresh, "optimizer": fresh_optimizers})
    assert all(map(equal_states, models, fresh))
    assert all(map(equal_states, optimizers, fresh_optimizers))


def test_a_whole_model_loads_what_its_parts_saved(tmp_path: Path, equal_states: EqualStates) -> None:
    parts, _ = stages(0)
    whole = nn.ModuleDict({"0": nn.Linear(2, 2), "2": nn.Linear(2, 2)})
    holdfast.save(tmp_path, {"model": parts}, 1)
    holdfast.restore(tmp_path, {"model": whole})
    assert equal_states(whole, {k: v for part in parts for k, v in part.state_dict().items()})


def test_dicts_in_a_list_are_united_too(tmp_path: Path) -> None:
    first, second = {"epoch": 1}, {"samples": 2}
    assert names(progress=[first, second]) == ["progress.epoch", "progress.samples"]
    holdfast.save(tmp_path, holdfast.State(rng=False, progress=[first, second]), 1)
    first["epoch"] = second["samples"] = 0
    holdfast.restore(tmp_path, holdfast.State(rng=False, progress=[first, second]))
    assert (first, second) == ({"epoch": 1}, {"samples": 2})


def test_parts_of_a_list_that_give_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Refused, match=r"two things are called model\.weight"):
        holdfast.save(tmp_path, {"model": [nn.Linear(2, 2), nn.Linear(2, 2)]}, 1)
    assert holdfast.Run(tmp_path).latest() is None


def test_a_role_that_is_none_is_not_held_here(tmp_path: Path) -> None:
    state = holdfast.State(rng=False, model=nn.Linear(1, 1), scheduler=None, stages=[None, nn.Linear(1, 1)])
    assert state.names() == ["model.bias", "model.weight", "stages.bias", "stages.weight"]
    holdfast.save(tmp_path, state, 1)
    ledger = holdfast.restore(tmp_path, holdfast.State(rng=False, model=nn.Linear(1, 1), scheduler=None, stages=None))
    assert sorted(ledger.filled) == ["model.bias", "model.weight"]
    assert sorted(ledger.skipped) == ["stages.bias", "stages.weight"]


@pytest.mark.parametrize(
    "tree",
    [
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        {"a.b": 1, "a": {"b": 2}},
        {"a": {"b": torch.zeros(1)}, "a.b": 2},
        {"0": torch.ones(1), 0: torch.zeros(1)},
        {"x": {"": 1}, "x.": 2},
    ],
    ids=str,
)
def test_two_paths_of_one_name_are_refused_with_both(tmp_path: Path, tree: dict[Any, Any]) -> None:
    with pytest.raises(holdfast.Refused, match=r"two things are called part\..*\['part', .*\['part', "):
        holdfast.save(tmp_path, {"part": tree}, 1)
    assert holdfast.Run(tmp_path).latest() is None


def test_a_role_without_state_is_refused_at_the_save_by_its_name(tmp_path: Path) -> None:
    for number, part in enumerate([object(), 5, "text", lambda: 0]):
        with pytest.raises(holdfast.Unsupported, match="the role thing is a"):
            holdfast.save(tmp_path / str(number), holdfast.State(thing=part), 1)


@pytest.mark.parametrize("role", [0, None, "", ("a", 1)], ids=repr)
def test_a_role_that_is_no_name_is_refused(tmp_path: Path, role: Any) -> None:
    with pytest.raises(holdfast.HoldfastError, match="role"):
        holdfast.save(tmp_path, {role: torch.ones(1), "a": torch.ones(1)}, 1)
    assert holdfast.Run(tmp_path).latest() is None


def test_a_state_is_a_state_or_a_dict(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Refused, match="not a Linear"):
        holdfast.save(tmp_path, nn.Linear(1, 1), 1)


def test_a_tensor_may_be_a_role_and_is_filled_in_place(tmp_path: Path) -> None:
    weights = torch.arange(4.0)
    state = holdfast.State(rng=False, weights=weights)
    holdfast.save(tmp_path, state, 1)
    weights.zero_()
    holdfast.restore(tmp_path, state)
    assert weights.tolist() == [0, 1, 2, 3]
    assert state.names() == ["weights"]


BAD_TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(2, device="meta"), "is on the meta device and has no bytes"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "has layout torch.sparse_coo; make it dense"),
    "compressed": (lambda: torch.eye(3).to_sparse_csr(), "has layout torch.sparse_csr; make it dense"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "is quantized"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "part.bad"),
    "strange dtype": (lambda: torch.zeros(2, dtype=torch.float4_e2m1fn_x2), "float4_e2m1fn_x2 has no stored form"),
}


@pytest.mark.filterwarnings(
    "ignore:.*[Ss]parse.*:UserWarning", "ignore:.*quantize.*:UserWarning", "ignore:.*nested.*:UserWarning"
)
@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_a_tensor_without_plain_bytes_is_refused_by_name_and_nothing_is_committed(tmp_path: Path, kind: str) -> None:
    make, why = BAD_TENSORS[kind]
    with pytest.raises(holdfast.Unsupported, match=r"part\.bad") as refused:
        holdfast.save(tmp_path, {"part": {"bad": make()}}, 1)
    assert why in str(refused.value)
    assert holdfast.Run(tmp_path).latest() is None


def test_a_model_on_the_meta_device_is_refused_by_the_name_of_its_first_parameter(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(holdfast.Unsupported, match=r"model\.weight is on the meta device.*materialise"):
        holdfast.save(tmp_path, {"model": model}, 1)


# --- the digest of a live state ---------------------------------------------------------------------------------------


def test_equal_states_have_equal_digests_and_any_change_gives_another() -> None:
    model = Net()
    state = holdfast.State(rng=False, model=model, progress={"epoch": 1})
    twin = holdfast.State(rng=False, model=Net(), progress={"epoch": 1})
    first = state.digest()
    assert first == twin.digest()
    assert len(first) == 32
    others = {
        "a value": holdfast.State(rng=False, model=Net(), progress={"epoch": 2}),
        "a type": holdfast.State(rng=False, model=Net(), progress={"epoch": 1.0}),
        "a name": holdfast.State(rng=False, net=Net(), progress={"epoch": 1}),
        "a tie": holdfast.State(rng=False, model=Net(tied=False), progress={"epoch": 1}),
        "a dtype": holdfast.State(rng=False, model=Net().double(), progress={"epoch": 1}),
    }
    digests = {what: other.digest() for what, other in others.items()}
    with torch.no_grad():
        model.blocks[0].linear.bias[0] = -model.blocks[0].linear.bias[0]
    assert len({first, state.digest(), *digests.values()}) == 7, digests


def test_the_digest_survives_a_save_and_a_load(tmp_path: Path) -> None:
    state, other = holdfast.State(**gan(0, 2)), holdfast.State(**gan(3, 1))
    holdfast.save(tmp_path, state, 2)
    holdfast.restore(tmp_path, other)
    assert state.digest() == other.digest()
