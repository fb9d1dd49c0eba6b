"""Loads are strict: any difference of name, shape, dtype, alias or kind is refused, all in one error, nothing touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from state.models import Net, train
from torch import nn, optim

import holdfast

from .refusals import refused


def part(**changes: Any) -> dict[str, Any]:
    """A state of one dict; a change of `...` leaves the key out."""
    tree = {"weight": torch.ones(2, 3), "bias": torch.ones(3, dtype=torch.bfloat16), "epoch": 1, "mode": {"name": "a"}}
    return {"part": {key: value for key, value in {**tree, **changes}.items() if value is not ...}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a stored tensor is not live": ({}, {"weight": ...}, "part.weight", "unexpected: it is stored"),
    "a live tensor is not stored": ({"weight": ...}, {}, "part.weight", "missing: it is live"),
    "a stored value is not live": ({}, {"epoch": ...}, "part.epoch", "unexpected: it is stored"),
    "a live value is not stored": ({"epoch": ...}, {}, "part.epoch", "missing: it is live"),
    "another shape": ({"weight": torch.ones(3, 2)}, {}, "part.weight", "has shape [3, 2] stored and [2, 3] live"),
    "a shape that would broadcast": ({"weight": torch.ones(1)}, {}, "part.weight", "has shape [1] stored and [2, 3] live"),
    "no dimension and one": ({"weight": torch.tensor(1.0)}, {"weight": torch.ones(1)}, "part.weight", "has shape [] stored"),
    "a wider dtype": ({"bias": torch.ones(3)}, {}, "part.bias", "has dtype float32 stored and bfloat16 live"),
    "a narrower dtype": ({}, {"bias": torch.ones(3)}, "part.bias", "has dtype bfloat16 stored and float32 live"),
    "two dtypes of one size": (
        {"bias": torch.ones(3, dtype=torch.float16)},
        {},
        "part.bias",
        "has dtype float16 stored and bfloat16 live",
    ),
    "signed and unsigned": (
        {"weight": torch.ones(2, dtype=torch.int16)},
        {"weight": torch.ones(2, dtype=torch.uint16)},
        "part.weight",
        "has dtype int16 stored and uint16 live",
    ),
    "a tensor for a value": ({"epoch": torch.ones(1)}, {}, "part.epoch", "stored as a tensor, but the live one is a value"),
    "a value for a tensor": ({"weight": 1.0}, {}, "part.weight", "stored as a value, but the live one is a tensor"),
    "an array of another dtype": (
        {"weight": np.ones(2, np.float32)},
        {"weight": np.ones(2)},
        "part.weight",
        "has dtype float32 stored and float64 live",
    ),
}


@pytest.mark.parametrize(("stored", "live", "name", "why"), CASES.values(), ids=CASES)
def test_a_difference_is_refused_by_its_name(
    tmp_path: Path, stored: dict[str, Any], live: dict[str, Any], name: str, why: str
) -> None:
    holdfast.save(tmp_path, part(**stored), 1)
    differences = refused(tmp_path, part(**live))
    assert list(differences) == [name]
    assert why in differences[name]


@pytest.mark.parametrize(("stored", "live", "name", "why"), CASES.values(), ids=CASES)
def test_only_waiving_that_name_lets_it_pass_and_the_ledger_lists_it(
    tmp_path: Path, stored: dict[str, Any], live: dict[str, Any], name: str, why: str
) -> None:
    holdfast.save(tmp_path, part(**stored, other=torch.arange(2)), 1)
    state = part(**live, other=torch.zeros(2, dtype=torch.int64))
    before = repr(state["part"].get(name.removeprefix("part.")))
    assert name in refused(tmp_path, state, waive="part.other")
    ledger = holdfast.restore(tmp_path, state, waive=name)
    assert list(ledger.waived) == [name]
    assert why in ledger.waived[name]
    assert name not in ledger.filled
    assert name in str(ledger)
    assert repr(state["part"].get(name.removeprefix("part."))) == before, "what is waived stays as it was"
    assert state["part"]["other"].tolist() == [0, 1]


def test_all_differences_stand_in_one_error_each_with_its_name(tmp_path: Path) -> None:
    holdfast.save(tmp_path, part(weight=torch.ones(9), mode={"extra": 2}, new=torch.ones(1)), 1)
    differences = refused(tmp_path, part(bias=torch.ones(3), fresh=1))
    assert sorted(differences) == ["part.bias", "part.fresh", "part.mode.extra", "part.mode.name", "part.new", "part.weight"]


def test_the_error_suggests_the_name_that_was_meant(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": nn.ModuleDict({"embedding": nn.Linear(2, 2)})}, 1)
    differences = refused(tmp_path, {"model": nn.ModuleDict({"embeding": nn.Linear(2, 2)})})
    assert "did you mean model.embeding.weight?" in differences["model.embedding.weight"]
    assert "did you mean model.embedding.weight?" in differences["model.embeding.weight"]


def test_the_error_says_which_step_of_which_run_and_what_may_be_done(tmp_path: Path) -> None:
    holdfast.save(tmp_path, part(), 7)
    with pytest.raises(holdfast.Mismatch) as raised:
        holdfast.restore(tmp_path, part(epoch=...))
    assert f"step 7 of {tmp_path}" in str(raised.value)
    assert "waive=" in str(raised.value)
    assert raised.value.exit_code == 5


def test_a_hundred_differences_are_all_attributes_of_the_error(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {f"t{i}": torch.ones(1) for i in range(100)}}, 1)
    with pytest.raises(holdfast.Mismatch) as raised:
        holdfast.restore(tmp_path, {"part": {f"u{i}": torch.ones(1) for i in range(100)}})
    assert len(raised.value.differences) == 200
    assert len(str(raised.value).splitlines()) < 60


# --- tied weights -----------------------------------------------------------------------------------------------------


def test_what_was_tied_is_not_loaded_into_what_is_apart(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Net(tied=True)}, 1)
    differences = refused(tmp_path, {"model": Net(tied=False)})
    assert list(differences) == ["model.head.weight"]
    assert "is tied to model.embed.weight where it was stored, but not here" in differences["model.head.weight"]


def test_what_was_apart_is_not_loaded_into_what_is_tied(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Net(tied=False)}, 1)
    differences = refused(tmp_path, {"model": Net(tied=True)})
    assert list(differences) == ["model.head.weight"]
    assert "is tied to model.embed.weight here, but stored apart from it" in differences["model.head.weight"]


def test_what_is_tied_to_something_else_is_refused(tmp_path: Path) -> None:
    def build(*tied: str) -> nn.Module:
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
        for name in tied[1:]:
            model[name].weight = model[tied[0]].weight
        return model

    holdfast.save(tmp_path, {"model": build("a", "b")}, 1)
    assert set(refused(tmp_path, {"model": build("b", "c")})) == {"model.b.weight", "model.c.weight"}


# --- optimizers -------------------------------------------------------------------------------------------------------


def job(steps: int = 0, *, frozen: bool = False, **settings: Any) -> dict[str, Any]:
    """A model whose blocks may be frozen, and the Adam of its parameters that are not."""
    model = Net(tied=False)
    model.blocks.requires_grad_(not frozen)
    optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], **settings)
    train(model, optimizer, range(steps))
    return {"model": model, "optimizer": optimizer}


def test_moments_that_are_live_but_not_stored_are_missing(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(steps=0), 1)
    live = job(steps=2)
    differences = refused(tmp_path, live)
    assert len(differences) == 3 * len(list(live["model"].parameters()))
    assert "missing: it is live" in differences["optimizer.model.embed.weight.exp_avg"]


def test_a_parameter_that_was_frozen_and_is_trained_now_is_named(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(steps=2, frozen=True), 2)
    differences = refused(tmp_path, job(frozen=False))
    assert list(differences) == ["optimizer.param_groups.0.params"]
    assert "model.blocks.0.linear.weight" in differences["optimizer.param_groups.0.params"]
    differences = refused(tmp_path, job(steps=1, frozen=False))
    assert "optimizer.model.blocks.0.linear.weight.exp_avg" in differences


def test_the_moments_of_a_parameter_that_was_trained_and_is_frozen_now_are_not_dropped(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(steps=2, frozen=False), 2)
    differences = refused(tmp_path, job(frozen=True))
    assert "unexpected: it is stored" in differences["optimizer.model.blocks.0.linear.weight.exp_avg"]
    ledger = holdfast.restore(tmp_path, job(frozen=True), waive=["optimizer.model.blocks.*", "optimizer.param_groups.0.params"])
    assert "optimizer.model.blocks.1.norm.bias.exp_avg_sq" in ledger.waived


def test_moments_of_another_kind_are_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path, job(steps=1, amsgrad=True), 1)
    differences = refused(tmp_path, job(steps=1, amsgrad=False))
    assert {name.rpartition(".")[2] for name in differences} == {"max_exp_avg_sq"}


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = Net()
    holdfast.save(tmp_path, {"model": model, "optimizer": optim.SGD(model.parameters(), momentum=0.9)}, 1)
    differences = refused(tmp_path, {"model": model, "optimizer": optim.Adam(model.parameters())})
    assert any("momentum" in name for name in differences)


def test_moments_of_another_dtype_are_refused(tmp_path: Path) -> None:
    stored, live = job(steps=1), job(steps=1)
    for state in stored["optimizer"].state.values():
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    holdfast.save(tmp_path, stored, 1)
    differences = refused(tmp_path, live)
    assert {name.rpartition(".")[2] for name in differences} == {"exp_avg"}
    assert all("has dtype bfloat16 stored and float32 live" in why for why in differences.values())


# --- objects and roles ------------------------------------------------------------------------------------------------


def test_restore_accounts_for_the_roles_given_and_leaves_the_others(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {**part(), "model": nn.Linear(1, 1)}, 1)
    ledger = holdfast.restore(tmp_path, part())
    assert sorted(ledger.skipped) == ["model.bias", "model.weight"]


def test_a_role_of_which_nothing_is_stored_is_missing(tmp_path: Path) -> None:
    weights = nn.Linear(1, 1)
    holdfast.save(tmp_path, {"model": weights}, 1)
    scheduler = optim.lr_scheduler.StepLR(optim.SGD(weights.parameters(), lr=0.1), 1)
    for role in ({"progress": {"epoch": 1}}, {"scheduler": scheduler}, {"other": nn.Linear(1, 1)}):
        differences = refused(tmp_path, {"model": weights, **role})
        assert differences
        assert all(name.split(".")[0] in role and "missing" in why for name, why in differences.items())
