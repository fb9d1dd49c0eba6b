"""What a caller may ask of a load: a part of it, other names, other dtypes. All of it is in the ledger."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state.models import Net, train
from torch import nn, optim

import holdfast

from .refusals import refused

EqualStates = Callable[[Any, Any], bool]


def job(seed: int = 0, steps: int = 0) -> dict[str, Any]:
    model = Net(seed=seed, tied=False)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(steps))
    return {"model": model, "optimizer": optimizer}


def ones(*names: str, value: float = 1) -> dict[str, Any]:
    return {"part": {name: torch.full((2,), float(value)) for name in names}}


# --- select and exclude -----------------------------------------------------------------------------------------------


def test_select_loads_what_matches_and_accounts_for_that_alone(tmp_path: Path, equal_states: EqualStates) -> None:
    trained, other = job(0, 2), job(1)
    holdfast.save(tmp_path, trained, 2)
    ledger = holdfast.restore(tmp_path, other, select="model.*")
    assert equal_states(trained["model"], other["model"])
    assert not other["optimizer"].state
    assert set(ledger.filled) == {n for n in holdfast.State.of(other).names() if n.startswith("model.")}
    assert "optimizer.model.embed.weight.exp_avg" in ledger.skipped


def test_exclude_leaves_out_what_matches(tmp_path: Path) -> None:
    trained, other = job(0, 2), job(1)
    kept = other["model"].head.weight.clone()
    holdfast.save(tmp_path, trained, 2)
    ledger = holdfast.restore(tmp_path, other, select=["model.*"], exclude=["*.head.*", "*.norm.*"])
    assert torch.equal(other["model"].head.weight, kept)
    assert torch.equal(other["model"].embed.weight, trained["model"].embed.weight)
    assert "model.head.weight" in ledger.skipped


def test_what_is_selected_is_still_strict(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a", "b"), 1)
    assert list(refused(tmp_path, ones("a", "c"), select="part.*", exclude="part.b")) == ["part.c"]


def test_load_selects_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(0, 1), 1)
    tree = holdfast.load(tmp_path, select="*embed*", exclude=["model.*", "*.exp_avg_sq", "*.step"])
    assert sorted(tree) == ["optimizer"]
    assert list(tree["optimizer"]["model.embed.weight"]) == ["exp_avg"]
    assert sorted(holdfast.load(tmp_path, select="model.head.*")["model"]) == ["head.weight"]


def test_a_step_saved_in_part_has_what_was_selected_and_is_asked_for_by_its_number(tmp_path: Path) -> None:
    trained, other = job(0, 1), job(1)
    holdfast.save(tmp_path, trained, 1, select=["model.*", "optimizer.*.exp_avg"])
    with holdfast.open(tmp_path, step=1) as checkpoint:
        assert {name.rpartition(".")[2] for name in checkpoint.names if name.startswith("optimizer.")} == {"exp_avg"}
    holdfast.restore(tmp_path, other, step=1, select="model.*")
    assert torch.equal(other["model"].embed.weight, trained["model"].embed.weight)
    assert "missing" in refused(f"{tmp_path}@1", job(1, 1))["optimizer.model.embed.weight.exp_avg_sq"]


def test_a_step_saved_in_part_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    trained = job(0, 1)
    holdfast.save(tmp_path, trained, 1)
    holdfast.save(tmp_path, trained, 2, select="model.*")
    assert "optimizer" in holdfast.load(tmp_path), "an address without @ takes the newest whole step"
    with holdfast.Checkpointer(tmp_path, trained) as ckpt:
        assert ckpt.resume() == 1


def test_a_pattern_is_for_the_whole_name_and_a_star_matches_dots(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(0, 1), 1)
    assert holdfast.load(tmp_path, select="weight") == {}
    assert set(holdfast.load(tmp_path, select="model.blocks.?.linear.bias")["model"]) == {
        "blocks.0.linear.bias",
        "blocks.1.linear.bias",
    }


def test_a_module_loads_what_was_saved_as_its_state_dict_and_the_other_way_round(
    tmp_path: Path, equal_states: EqualStates
) -> None:
    saved, model, tree = Net(seed=1), Net(seed=2), Net(seed=3).state_dict()
    holdfast.save(tmp_path / "dict", {"model": saved.state_dict()}, 1)
    holdfast.restore(tmp_path / "dict", {"model": model})
    holdfast.save(tmp_path / "module", {"model": saved}, 1)
    holdfast.restore(tmp_path / "module", {"model": tree})
    assert equal_states(saved, model)
    assert equal_states(saved.state_dict(), tree)


# --- rename -----------------------------------------------------------------------------------------------------------


def test_rename_maps_stored_names_to_live_ones(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a", "b", value=5), 1)
    state = ones("x", "b")
    ledger = holdfast.restore(tmp_path, state, rename={"part.a": "part.x"})
    assert state["part"]["x"].tolist() == [5, 5]
    assert ledger.renamed == {"part.x": "part.a"}
    assert sorted(ledger.filled) == ["part.b", "part.x"]
    assert "part.a" in str(ledger)


def test_the_stars_of_a_rename_keep_what_they_matched(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {f"layers.{i}.attention.{n}": torch.full((1,), i) for i in (0, 11) for n in "qk"}}, 1)
    state = {"net": {f"h.{i}.attn.{n}": torch.zeros(1, dtype=torch.int64) for i in (0, 11) for n in "qk"}}
    holdfast.restore(tmp_path, state, rename={"part.layers.*.attention.*": "net.h.*.attn.*"})
    assert {name: int(tensor) for name, tensor in state["net"].items()} == {
        "h.0.attn.q": 0,
        "h.0.attn.k": 0,
        "h.11.attn.q": 11,
        "h.11.attn.k": 11,
    }


def test_a_prefix_without_a_star_is_renamed_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"teacher": nn.ModuleDict({"body": nn.Linear(2, 2)})}, 1)
    student = nn.ModuleDict({"trunk": nn.Linear(2, 2)})
    ledger = holdfast.restore(tmp_path, {"student": student}, rename={"teacher.body": "student.trunk"})
    assert sorted(ledger.renamed) == ["student.trunk.bias", "student.trunk.weight"]


def test_the_first_rename_that_matches_counts(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a.x", "a.y", value=3), 1)
    state = ones("b.x", "c")
    ledger = holdfast.restore(tmp_path, state, rename={"part.a.y": "part.c", "part.a.*": "part.b.*"})
    assert ledger.renamed == {"part.b.x": "part.a.x", "part.c": "part.a.y"}


def test_a_rename_to_nothing_live_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a"), 1)
    differences = refused(tmp_path, ones("x"), rename={"part.a": "part.y"})
    assert set(differences) == {"part.x", "part.y"}


def test_two_stored_names_that_become_one_are_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {"a": torch.ones(2), "b": torch.zeros(2)}}, 1)
    for wish in ({"part.a": "part.b"}, {"part.b": "part.a"}):
        state = holdfast.State(rng=False, **ones(*(name.removeprefix("part.") for name in wish.values()), value=7))
        before = state.digest()
        with pytest.raises((holdfast.Mismatch, holdfast.Refused, ValueError), match=r"part\.[ab]"):
            holdfast.restore(tmp_path, state, rename=wish)
        assert state.digest() == before


def test_a_rename_with_other_stars_on_its_sides_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a"), 1)
    with pytest.raises(ValueError, match="same number of stars"):
        holdfast.restore(tmp_path, ones("a"), rename={"part.*.x": "part.x"})


class Renamed(nn.Module):
    """The same layers as before under new names."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.names = first, second
        self.add_module(first, nn.Linear(4, 4))
        self.add_module(second, nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def renamed_job(first: str, second: str, steps: int) -> dict[str, Any]:
    model = Renamed(first, second)
    optimizer = optim.Adam(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("live_steps", [0, 1], ids=["moments are made", "moments are there"])
def test_a_rename_of_layers_carries_their_moments_along(tmp_path: Path, live_steps: int) -> None:
    """The optimizer's list of its parameters' names holds the old names: it is renamed with them."""
    stored, live = renamed_job("fc1", "fc2", 3), renamed_job("up", "down", live_steps)
    holdfast.save(tmp_path, stored, 3)
    holdfast.restore(tmp_path, live, rename={"*model.fc1.*": "*model.up.*", "*model.fc2.*": "*model.down.*"})
    for old, new in zip(stored["model"].parameters(), live["model"].parameters(), strict=True):
        assert torch.equal(old, new)
        theirs, ours = stored["optimizer"].state[old], live["optimizer"].state[new]
        assert set(theirs) == set(ours)
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


# --- cast -------------------------------------------------------------------------------------------------------------


def test_a_cast_that_was_asked_for_is_made_and_listed(tmp_path: Path) -> None:
    stored = torch.tensor([1.5, -0.25, 3.0])
    holdfast.save(tmp_path, {"part": {"a": stored, "b": stored.double(), "c": stored.clone()}}, 1)
    state = {"part": {"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(3), "c": torch.zeros(3)}}
    ledger = holdfast.restore(tmp_path, state, cast={"part.a": torch.bfloat16, "part.[bc]": torch.float32})
    assert all(tensor.tolist() == stored.tolist() for tensor in state["part"].values())
    assert ledger.cast == {"part.a": "float32 -> bfloat16", "part.b": "float64 -> float32"}
    assert "part.a" in str(ledger)


@pytest.mark.parametrize("wanted", [torch.float32, "float32", "torch.float32"], ids=repr)
def test_a_cast_may_be_named_by_the_dtype_or_its_name(tmp_path: Path, wanted: Any) -> None:
    holdfast.save(tmp_path, {"part": {"a": torch.ones(2, dtype=torch.float16)}}, 1)
    state = ones("a", value=0)
    holdfast.restore(tmp_path, state, cast={"*": wanted})
    assert state["part"]["a"].tolist() == [1, 1]


def test_a_cast_that_was_not_asked_for_is_refused_and_the_error_says_how_to_ask(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {"a": torch.ones(2), "b": torch.ones(2)}}, 1)
    live = {"part": {"a": torch.zeros(2, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.bfloat16)}}
    differences = refused(tmp_path, live, cast={"part.b": torch.bfloat16})
    assert list(differences) == ["part.a"]
    assert 'cast={"part.a": torch.bfloat16}' in differences["part.a"]


def test_a_cast_to_another_dtype_than_the_live_one_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, ones("a"), 1)
    differences = refused(tmp_path, {"part": {"a": torch.zeros(2, dtype=torch.float16)}}, cast={"*": torch.bfloat16})
    assert "bfloat16" in differences["part.a"]


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided"])
def test_a_cast_of_what_is_larger_than_a_chunk_is_the_cast_that_torch_makes(tmp_path: Path, kind: str) -> None:
    stored = torch.randn(1031, 1201, generator=torch.Generator().manual_seed(0))
    live = {
        "contiguous": torch.zeros(1031, 1201, dtype=torch.bfloat16),
        "transposed": torch.zeros(1201, 1031, dtype=torch.bfloat16).t(),
        "strided": torch.zeros(2062, 2402, dtype=torch.bfloat16)[::2, ::2],
    }[kind]
    holdfast.save(tmp_path, {"weight": stored}, 1)
    holdfast.restore(tmp_path, {"weight": live}, cast={"weight": torch.bfloat16})
    assert torch.equal(live, stored.to(torch.bfloat16))


def test_a_model_trained_in_float32_goes_into_one_of_bfloat16_and_the_counters_stay(tmp_path: Path) -> None:
    model, half = Net(seed=1), Net(seed=2).to(torch.bfloat16)
    model(torch.arange(4))
    holdfast.save(tmp_path, {"model": model}, 1)
    ledger = holdfast.restore(tmp_path, {"model": half}, cast={"model.*": torch.bfloat16})
    assert "model.blocks.0.norm.num_batches_tracked" not in ledger.cast
    assert half.blocks[0].norm.num_batches_tracked == 1
    assert torch.equal(half.embed.weight, model.embed.weight.to(torch.bfloat16))


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_every_live_name_is_accounted_for_once(tmp_path: Path) -> None:
    trained, fresh = job(0, 2), job(1)
    holdfast.save(tmp_path, {**trained, "progress": {"epoch": 1}}, 2)
    state = holdfast.State(rng=False, **fresh, progress={"epoch": 0})
    ledger = holdfast.restore(tmp_path, state)
    accounted = [*ledger.filled, *ledger.allocated]
    assert sorted(accounted) == sorted(set(accounted))
    assert set(state.names()) - set(accounted) == {"optimizer.param_groups.0.params"} - set(accounted)
    assert (ledger.missing, ledger.unexpected, ledger.waived, ledger.step, ledger.attempt) == ([], [], {}, 2, 1)


def test_the_account_can_be_read_and_written_as_json(tmp_path: Path) -> None:
    import json

    holdfast.save(tmp_path, job(0, 1), 1)
    ledger = holdfast.restore(tmp_path, job(1), waive="nothing.*")
    plain = json.loads(json.dumps(ledger.as_dict()))
    assert plain["step"] == 1
    assert "step 1 (attempt 1)" in str(ledger)
    assert f"{len(ledger.filled)} filled, {len(ledger.allocated)} allocated" in str(ledger)
