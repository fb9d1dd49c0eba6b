"""`holdfast export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast

from .conftest import weights


def test_safetensors_have_every_tensor_bit_equal(command, run: Path, tmp_path: Path) -> None:
    ended = command("export", f"{run}@20", tmp_path / "out", "--json")
    (file,) = ended.json["files"]
    assert (ended.code, ended.json["step"], ended.json["format"]) == (0, 20, "safetensors")
    assert file == {"path": str(tmp_path / "out" / "model.safetensors"), "bytes": Path(file["path"]).stat().st_size}
    tensors = load_file(file["path"])
    assert set(tensors) == {"model.layer.2", "model.layer.10", "model.frozen"}
    assert torch.equal(tensors["model.layer.2"], weights(20))


def test_names_are_selected_and_dtypes_cast_by_pattern(command, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert command("export", run, out, "--select", "*.layer.2", "--select", "*.frozen", "--cast", "*.frozen=float16").code == 0
    tensors = load_file(out / "model.safetensors")
    assert {name: t.dtype for name, t in tensors.items()} == {"model.layer.2": torch.float32, "model.frozen": torch.float16}


def test_files_are_split_at_the_size_that_was_asked_for(command, run: Path, tmp_path: Path) -> None:
    found = command("export", run, tmp_path / "out", "--max-shard-size", "1kB", "--json").json
    *shards, index = (Path(file["path"]).name for file in found["files"])
    assert len(shards) > 1
    weight_map = json.loads((tmp_path / "out" / index).read_text())["weight_map"]
    assert set(weight_map.values()) == set(shards)


def test_hf_has_the_weights_of_modules_under_their_own_names(command, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    holdfast.save(tmp_path / "run", holdfast.State(model=model, extra={"x": torch.ones(1)}), 1)
    assert command("export", tmp_path / "run", tmp_path / "out", "--to", "hf").code == 0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"weight", "bias"}


def test_torch_gives_one_file_with_the_whole_tree(command, run: Path, tmp_path: Path) -> None:
    ended = command("export", run, tmp_path / "all.pt", "--to", "torch")
    assert ended.code == 0
    assert str(tmp_path / "all.pt") in ended.out
    tree = torch.load(tmp_path / "all.pt", weights_only=True)
    assert tree["progress"]["samples"] == 240


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--to", "onnx"], "known: safetensors, hf, torch"),
        (["--select", "modle.*"], "nothing in"),
        (["--cast", "bfloat16"], "PATTERN=DTYPE"),
        (["--cast", "*=float33"], "there is no dtype float33"),
        (["--cast", "layers.*=float16"], "matches 'layers.*'"),
        (["--max-shard-size", "5 apples"], "is not a size"),
        (["--max-shard-size", "0"], "is not a size"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error_and_writes_nothing(command, run: Path, tmp_path: Path, options, says) -> None:
    ended = command("export", run, tmp_path / "out", *options)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err
    assert not (tmp_path / "out").exists()


def test_a_target_that_holds_something_is_left_alone(command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    ended = command("export", run, tmp_path / "out")
    assert ended.code == 6
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_damaged_step_is_not_exported_in_part(command, run: Path, tmp_path: Path, flip) -> None:
    flip(run, 30)
    assert command("export", run, tmp_path / "out").code == 4
    assert not (tmp_path / "out").exists()
