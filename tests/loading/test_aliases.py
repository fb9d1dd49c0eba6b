"""Tied tensors: their bytes are stored once, load() ties them again, and restore keeps what is tied tied."""

from __future__ import annotations

from pathlib import Path

import torch
from state.models import WIDTH, WORDS, Net, train
from torch import nn, optim

import holdfast


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    tied, apart = Net(tied=True), Net(tied=False)
    holdfast.save(tmp_path / "tied", {"model": tied}, 1)
    holdfast.save(tmp_path / "apart", {"model": apart}, 1)
    sizes = [holdfast.Run(tmp_path / name).latest().nbytes for name in ("tied", "apart")]
    assert sizes[1] - sizes[0] == WORDS * WIDTH * 4
    with holdfast.open(tmp_path / "tied") as checkpoint:
        assert "model.head.weight" in checkpoint
        assert checkpoint["model.head.weight"].alias_of == "model.embed.weight"
        assert torch.equal(checkpoint["model.head.weight"][2:4], tied.head.weight[2:4])


def test_load_gives_tied_tensors_one_memory(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Net(tied=True)}, 1)
    tree = holdfast.load(tmp_path)["model"]
    assert tree["head.weight"].data_ptr() == tree["embed.weight"].data_ptr()
    tree["head.weight"].zero_()
    assert tree["embed.weight"].sum() == 0


def test_either_of_the_tied_names_can_be_loaded_alone(tmp_path: Path) -> None:
    model = Net(tied=True)
    holdfast.save(tmp_path, {"model": model}, 1)
    for name in ("head.weight", "embed.weight"):
        assert torch.equal(holdfast.load(tmp_path, select=f"model.{name}")["model"][name], model.embed.weight)


def test_restore_keeps_tied_weights_tied_and_training_moves_both(tmp_path: Path) -> None:
    saved, model = Net(tied=True, seed=1), Net(tied=True, seed=2)
    holdfast.save(tmp_path, {"model": saved}, 1)
    ledger = holdfast.restore(tmp_path, {"model": model})
    assert {"model.head.weight", "model.embed.weight"} <= set(ledger.filled)
    assert model.head.weight is model.embed.weight
    train(model, optim.SGD(model.parameters(), lr=0.1), range(1))
    assert torch.equal(model.head.weight, model.embed.weight)
    assert not torch.equal(model.head.weight, saved.head.weight)


def test_a_save_of_the_tie_under_its_second_name_alone_has_the_bytes(tmp_path: Path) -> None:
    model = Net(tied=True)
    holdfast.save(tmp_path, {"model": model}, 1, select="model.head.*")
    assert torch.equal(holdfast.load(tmp_path, step=1)["model"]["head.weight"], model.embed.weight)


def test_three_names_and_ties_across_roles_are_stored_once(tmp_path: Path) -> None:
    shared = nn.Linear(100, 100, bias=False)
    state = {"model": nn.ModuleDict({"a": shared, "b": shared}), "teacher": nn.ModuleDict({"c": shared})}
    holdfast.save(tmp_path, state, 1)
    assert holdfast.Run(tmp_path).latest().nbytes == 40_000
    tree = holdfast.load(tmp_path)
    pointers = {t.data_ptr() for role in tree.values() for t in role.values()}
    assert len(pointers) == 1


def test_a_parameter_that_another_part_shows_as_well_is_one_tensor(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    holdfast.save(tmp_path, {"model": model, "best": {"weight": model.weight, "copy": model.weight.detach().clone()}}, 1)
    with holdfast.open(tmp_path) as checkpoint:
        ties = {name: checkpoint[name].alias_of for name in checkpoint.names if name.endswith(("weight", "copy"))}
    assert sorted(filter(None, ties.values())) in (["best.weight"], ["model.weight"])
    assert ties["best.copy"] is None


def test_views_of_one_storage_that_are_not_the_same_view_are_no_ties(tmp_path: Path) -> None:
    storage = torch.arange(12.0)
    parts = {"head": storage[:6], "tail": storage[6:], "even": storage[::2], "grid": storage[:6].view(2, 3)}
    holdfast.save(tmp_path, {"part": parts}, 1)
    tree = holdfast.load(tmp_path)["part"]
    assert all(torch.equal(tree[name], tensor) for name, tensor in parts.items())
    assert len({t.data_ptr() for t in tree.values()}) == 4


def test_empty_tensors_are_never_tied(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {"a": torch.empty(0, 3), "b": torch.empty(0, 3)}}, 1)
    holdfast.restore(tmp_path, {"part": {"a": torch.empty(0, 3), "b": torch.empty(0, 3)}})


def test_waiving_one_name_of_a_live_tie_leaves_the_memory_to_the_other(tmp_path: Path) -> None:
    """Both names are one memory here; only the bytes of the name that is not waived may go there."""
    apart = nn.ModuleDict({name: nn.Linear(1500, 1500, bias=False) for name in ("embed", "head")})
    tied = nn.ModuleDict({name: nn.Linear(1500, 1500, bias=False) for name in ("embed", "head")})
    tied["head"].weight = tied["embed"].weight
    holdfast.save(tmp_path, {"model": apart}, 1)
    ledger = holdfast.restore(tmp_path, {"model": tied}, waive="model.head.weight")
    assert list(ledger.waived) == ["model.head.weight"]
    assert torch.equal(tied["embed"].weight, apart["embed"].weight)


def test_waiving_a_stored_tie_fills_both_apart(tmp_path: Path) -> None:
    saved, model = Net(tied=True), Net(tied=False, seed=2)
    holdfast.save(tmp_path, {"model": saved}, 1)
    ledger = holdfast.restore(tmp_path, {"model": model}, waive="model.head.weight")
    assert list(ledger.waived) == ["model.head.weight"]
    assert model.head.weight is not model.embed.weight
    assert torch.equal(model.embed.weight, saved.embed.weight)


def test_excluding_one_name_of_a_tie_loads_the_other(tmp_path: Path) -> None:
    saved, model = Net(tied=True, seed=1), Net(tied=False, seed=2)
    kept = model.head.weight.clone()
    holdfast.save(tmp_path, {"model": saved}, 1)
    holdfast.restore(tmp_path, {"model": model}, exclude="model.head.weight")
    assert torch.equal(model.embed.weight, saved.embed.weight)
    assert torch.equal(model.head.weight, kept)
