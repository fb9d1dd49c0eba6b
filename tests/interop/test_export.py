"""Export: what others read is bit for bit what was saved, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading.tensors import DTYPES, bits, random
from safetensors import safe_open
from safetensors.torch import load_file
from state.models import Net, train
from torch import nn, optim

import holdfast

EqualStates = Callable[[Any, Any], bool]


def job(*, tied: bool = False) -> dict[str, Any]:
    model = Net(seed=1, tied=tied)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    return {"model": model, "optimizer": optimizer, "progress": {"epoch": 3, "losses": [0.5, 0.25]}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "run", job(), 2)
    return tmp_path / "run"


def test_safetensors_has_every_tensor_under_its_logical_name(tmp_path: Path, run: Path) -> None:
    files = holdfast.export(run, tmp_path / "out")
    assert files == [str(tmp_path / "out" / "model.safetensors")]
    tensors = load_file(files[0])
    with holdfast.open(run) as checkpoint:
        assert sorted(tensors) == checkpoint.names
        assert all(bits(tensors[name]) == bits(checkpoint[name][...]) for name in tensors)


def test_every_dtype_that_safetensors_has_goes_out_and_comes_back(tmp_path: Path) -> None:
    have_no_tag = {torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex128}
    saved = {str(d).removeprefix("torch."): random(d, (5, 3), 1) for d in DTYPES if d not in have_no_tag}
    saved |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "large": random(torch.bfloat16, (2100, 1003), 2)}
    holdfast.save(tmp_path / "run", {"part": saved}, 1)
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out")
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    back = holdfast.load(f"safetensors:{tmp_path / 'out'}")["model"]
    assert {name.removeprefix("part."): bits(t) for name, t in back.items()} == {n: bits(t) for n, t in saved.items()}
    assert all(back[f"part.{name}"].dtype == tensor.dtype for name, tensor in saved.items())


def test_a_dtype_that_safetensors_lacks_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"part": {"a": torch.ones(2), "odd": torch.ones(2, dtype=torch.complex128)}}, 1)
    with pytest.raises(holdfast.Unsupported, match=r"part\.odd has dtype complex128, which safetensors lacks; cast it"):
        holdfast.export(tmp_path / "run", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out", cast={"part.odd": "complex64"})
    assert load_file(file)["part.odd"].dtype == torch.complex64


def test_hf_has_the_weights_under_the_names_of_the_state_dict(tmp_path: Path, run: Path, equal_states: EqualStates) -> None:
    model = Net(seed=2, tied=False)
    (file,) = holdfast.export(run, tmp_path / "out", to="hf")
    assert sorted(load_file(file)) == sorted(model.state_dict())
    model.load_state_dict(load_file(file))
    assert equal_states(model, job()["model"])


def test_what_went_out_for_hf_comes_back_into_the_model(tmp_path: Path, run: Path, equal_states: EqualStates) -> None:
    holdfast.export(run, tmp_path / "out", to="hf")
    model = Net(seed=2, tied=False)
    holdfast.restore(f"hf:{tmp_path / 'out'}", {"model": model})
    assert equal_states(model, job()["model"])


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_large_states_are_cut_into_shards_with_an_index_of_all_names(tmp_path: Path, run: Path, to: str) -> None:
    files = [Path(f) for f in holdfast.export(run, tmp_path / "out", to=to, max_shard_bytes=600)]
    *shards, index = sorted(files, key=lambda f: f.suffix == ".json")
    assert index.name == "model.safetensors.index.json"
    assert [f.name for f in shards] == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(f.name for f in files)
    content = json.loads(index.read_text())
    held = {name: shard.name for shard in shards for name in load_file(shard)}
    assert content["weight_map"] == held
    tensors = {name: t for shard in shards for name, t in load_file(shard).items()}
    assert content["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    back = holdfast.load(f"hf:{tmp_path / 'out'}")["model"]
    assert {name: bits(t) for name, t in back.items()} == {name: bits(t) for name, t in tensors.items()}


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(tmp_path: Path) -> None:
    parts = {str(i): torch.zeros(n) for i, n in enumerate([10, 300, 10, 10, 200, 40])}
    holdfast.save(tmp_path / "run", {"part": parts}, 1)
    files = holdfast.export(tmp_path / "run", tmp_path / "out", max_shard_bytes=800)
    sizes = [[t.nbytes for t in load_file(f).values()] for f in files if f.endswith(".safetensors")]
    assert all(sum(shard) <= 800 or len(shard) == 1 for shard in sizes)


def test_a_cast_by_pattern_is_the_cast_that_torch_makes(tmp_path: Path, run: Path) -> None:
    (file,) = holdfast.export(run, tmp_path / "out", select="model.*", cast={"*.norm.*": "float32", "*.weight": torch.bfloat16})
    tensors, model = load_file(file), job()["model"].state_dict()
    for name, tensor in tensors.items():
        expected = model[name.removeprefix("model.")]
        if ".norm." in name:
            expected = expected.to(torch.float32)
        elif name.endswith(".weight"):
            expected = expected.to(torch.bfloat16)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


def test_a_cast_of_a_large_tensor_has_no_seams(tmp_path: Path) -> None:
    weight = torch.randn(17_000_003)
    holdfast.save(tmp_path / "run", {"weight": weight}, 1)
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out", cast={"*": "bfloat16"})
    assert torch.equal(load_file(file)["weight"], weight.to(torch.bfloat16))


def test_select_takes_a_part(tmp_path: Path, run: Path) -> None:
    (file,) = holdfast.export(run, tmp_path / "out", select=["model.embed.*", "*.embed.weight.exp_avg"])
    assert sorted(load_file(file)) == ["model.embed.weight", "optimizer.model.embed.weight.exp_avg"]


def test_a_selection_of_nothing_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(holdfast.HoldfastError, match="modle"):
        holdfast.export(run, tmp_path / "out", select="modle.*")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["safetensors", "hf", "torch"])
def test_a_target_that_holds_something_is_refused_and_left_alone(tmp_path: Path, run: Path, to: str) -> None:
    target = tmp_path / "out"
    if to == "torch":
        target.write_text("precious")
    else:
        target.mkdir()
        (target / "config.json").write_text("precious")
    with pytest.raises(holdfast.Refused, match="not empty") as raised:
        holdfast.export(run, target, to=to)
    assert raised.value.exit_code == 6
    assert (target if to == "torch" else target / "config.json").read_text() == "precious"


def test_an_empty_directory_is_a_target(tmp_path: Path, run: Path) -> None:
    (tmp_path / "out").mkdir()
    holdfast.export(run, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_damaged_checkpoint_is_not_exported_in_part(tmp_path: Path, run: Path) -> None:
    (data,) = (run / "steps").glob("*/n0000-00.safetensors")
    with data.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xa5")
    for to, target in (("safetensors", "out"), ("torch", "out.pt")):
        with pytest.raises(holdfast.Corrupt):
            holdfast.export(run, tmp_path / target, to=to)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_unknown_format_is_refused_with_those_that_are_known(tmp_path: Path, run: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match="safetensors, hf, torch"):
        holdfast.export(run, tmp_path / "out", to="gguf")


# --- tied weights, several models -------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_tied_weights_go_out_once(tmp_path: Path, to: str) -> None:
    parts = job(tied=True)
    holdfast.save(tmp_path / "run", parts, 1)
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out", to=to)
    held = [t for name, t in load_file(file).items() if name.endswith(("embed.weight", "head.weight"))]
    assert [torch.equal(t, parts["model"].embed.weight) for t in held] == [True]


def test_a_tied_weight_selected_by_its_second_name_goes_out_under_it(tmp_path: Path) -> None:
    parts = job(tied=True)
    holdfast.save(tmp_path / "run", parts, 1)
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out", select="model.head.*")
    assert torch.equal(load_file(file)["model.head.weight"], parts["model"].head.weight)


def test_a_tied_model_comes_back_from_hf_tied(tmp_path: Path, equal_states: EqualStates) -> None:
    """The file has one of the two names; the live model says that the other one is the same memory."""
    parts, model = job(tied=True), Net(seed=3, tied=True)
    holdfast.save(tmp_path / "run", parts, 1)
    holdfast.export(tmp_path / "run", tmp_path / "out", to="hf")
    holdfast.restore(f"hf:{tmp_path / 'out'}", {"model": model})
    assert model.head.weight is model.embed.weight
    assert equal_states(model, parts["model"])


def test_an_hf_export_of_two_models_with_the_same_names_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"student": nn.Linear(2, 2), "teacher": nn.Linear(2, 2)}, 1)
    with pytest.raises(holdfast.HoldfastError, match="weight"):
        holdfast.export(tmp_path / "run", tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out", to="hf", select="teacher.*")
    assert sorted(load_file(file)) == ["bias", "weight"]


# --- torch ------------------------------------------------------------------------------------------------------------


def test_a_torch_file_loads_with_weights_only_and_has_the_whole_tree(
    tmp_path: Path, run: Path, equal_states: EqualStates
) -> None:
    files = holdfast.export(run, tmp_path / "out.pt", to="torch")
    assert files == [str(tmp_path / "out.pt")]
    tree = torch.load(files[0], weights_only=True)
    assert equal_states(tree, holdfast.load(run))
    assert tree["progress"] == {"epoch": 3, "losses": [0.5, 0.25]}
    model = Net(seed=2, tied=False)
    model.load_state_dict(tree["model"])
    assert equal_states(model, job()["model"])


def test_a_torch_file_of_a_part(tmp_path: Path, run: Path) -> None:
    (file,) = holdfast.export(run, tmp_path / "out.pt", to="torch", select="model.*")
    assert list(torch.load(file, weights_only=True)) == ["model"]


def test_a_torch_file_keeps_ties(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", job(tied=True), 1)
    (file,) = holdfast.export(tmp_path / "run", tmp_path / "out.pt", to="torch")
    tree = torch.load(file, weights_only=True)["model"]
    assert tree["head.weight"].data_ptr() == tree["embed.weight"].data_ptr()


def test_a_torch_file_can_be_cast_or_says_that_it_cannot_and_leaves_nothing(tmp_path: Path, run: Path) -> None:
    try:
        (file,) = holdfast.export(run, tmp_path / "out.pt", to="torch", cast={"model.*": "bfloat16"})
    except holdfast.Unsupported:
        assert not (tmp_path / "out.pt").exists()
    else:
        assert torch.load(file, weights_only=True)["model"]["embed.weight"].dtype == torch.bfloat16
