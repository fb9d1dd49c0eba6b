"""Modules: what is in their state dict has the name it has there, under the role; nothing else is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast

from .models import NET_NAMES, Net

EqualStates = Callable[[Any, Any], bool]


def names(**roles: Any) -> list[str]:
    return holdfast.State(rng=False, **roles).names()


def test_a_module_gives_the_names_of_its_state_dict_under_its_role() -> None:
    model = Net(blocks=1)
    assert names(model=model) == NET_NAMES == sorted(f"model.{key}" for key in model.state_dict())


def test_a_buffer_that_is_not_persistent_is_not_stored_and_not_touched(tmp_path: Path) -> None:
    model = Net()
    holdfast.save(tmp_path, {"model": model}, 1)
    model.blocks[0].scratch.fill_(7)
    holdfast.restore(tmp_path, {"model": model})
    assert not any("scratch" in name for name in holdfast.load(tmp_path)["model"])
    assert model.blocks[0].scratch.tolist() == [7, 7, 7]


def test_a_model_comes_back_with_its_buffers(tmp_path: Path, equal_states: EqualStates) -> None:
    model, other = Net(seed=1), Net(seed=2)
    model(torch.arange(8))
    holdfast.save(tmp_path, {"model": model}, 1)
    holdfast.restore(tmp_path, {"model": other})
    assert other.blocks[1].norm.num_batches_tracked == 1
    assert equal_states(model, other)


def test_restore_fills_the_tensors_that_are_there_and_does_not_replace_them(tmp_path: Path) -> None:
    model, other = Net(seed=1), Net(seed=2)
    holdfast.save(tmp_path, {"model": model}, 1)
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in other.named_parameters()}
    holdfast.restore(tmp_path, {"model": other})
    assert before == {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in other.named_parameters()}


def test_load_gives_a_state_dict_that_the_module_takes(tmp_path: Path, equal_states: EqualStates) -> None:
    model, other = Net(seed=1), Net(seed=2)
    holdfast.save(tmp_path, {"model": model}, 1)
    assert str(other.load_state_dict(holdfast.load(tmp_path)["model"])) == "<All keys matched successfully>"
    assert equal_states(model, other)


class Counter(nn.Module):
    """Has extra state of Python values and tensors, as layers with FP8 scales do."""

    def __init__(self, seen: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(seen)))
        self.extra: Any = {"seen": seen, "history": torch.arange(seen), "format": ("e4m3", None)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("nested", [False, True], ids=["at the root", "in a child"])
def test_extra_state_goes_through_its_getter_and_setter(tmp_path: Path, nested: bool) -> None:
    model, other = Counter(5), Counter(0)
    holdfast.save(tmp_path, {"model": nn.Sequential(model) if nested else model}, 1)
    holdfast.restore(tmp_path, {"model": nn.Sequential(other) if nested else other})
    assert other.extra["seen"] == 5
    assert other.extra["format"] == ("e4m3", None)
    assert torch.equal(other.extra["history"], torch.arange(5))


@pytest.mark.parametrize("extra", [torch.arange(4), torch.empty(0), {}, None, 3, "text", [1, {"a": torch.ones(2)}]], ids=repr)
def test_extra_state_may_be_anything_that_can_be_stored(tmp_path: Path, extra: Any, equal_states: EqualStates) -> None:
    model, other = Counter(1), Counter(1)
    model.extra = extra
    holdfast.save(tmp_path, {"model": model}, 1)
    holdfast.restore(tmp_path, {"model": other})
    assert equal_states({"extra": other.extra}, {"extra": extra})


def test_parametrized_weights_keep_their_originals(tmp_path: Path, equal_states: EqualStates) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 4))
        nn.utils.parametrizations.orthogonal(model[1])
        return model

    model, other = build(), build()
    holdfast.save(tmp_path, {"model": model}, 1)
    holdfast.restore(tmp_path, {"model": other})
    assert "model.0.parametrizations.weight.original0" in names(model=model)
    assert equal_states(model, other)
    assert torch.equal(model(torch.ones(3)), other(torch.ones(3)))


def test_a_lazy_module_is_refused_by_name_until_it_has_run_once() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(holdfast.Unsupported, match=r"model\.0\.weight is not initialised yet; run the lazy module once"):
        names(model=model)
    model(torch.ones(2, 3))
    assert names(model=model) == ["model.0.bias", "model.0.weight"]


def test_a_module_in_which_two_names_hold_one_module_keeps_both(tmp_path: Path) -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"first": shared, "second": shared})
    holdfast.save(tmp_path, {"model": model}, 1)
    tree = holdfast.load(tmp_path)["model"]
    assert sorted(tree) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert tree["first.weight"].data_ptr() == tree["second.weight"].data_ptr()


def test_module_and_parameter_names_may_be_strange(tmp_path: Path, equal_states: EqualStates) -> None:
    strange = ["0", "a@b", "100%", "naïve 🪸", "__metadata__", "new\nline", "a b"]
    model, other = (nn.ParameterDict({name: nn.Parameter(torch.randn(2)) for name in strange}) for _ in range(2))
    holdfast.save(tmp_path, {"model": model}, 1)
    holdfast.restore(tmp_path, {"model": other})
    assert equal_states(model, other)
    assert sorted(holdfast.load(tmp_path)["model"]) == sorted(strange)


class Doubled(nn.Linear):
    """Its state dict holds twice its weight, as modules do that keep another form than they show."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"] * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] / 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_shows_copies_is_restored_through_its_own_loader_or_refused(tmp_path: Path) -> None:
    model, other = nn.Sequential(Doubled(2, 2)), nn.Sequential(Doubled(2, 2))
    try:
        holdfast.save(tmp_path, {"model": model}, 1)
    except holdfast.Unsupported as refused:
        assert "model.0.weight" in str(refused)
    else:
        holdfast.restore(tmp_path, {"model": other})
        assert torch.equal(model[0].weight, other[0].weight), "the ledger said filled, but the weight was not"
