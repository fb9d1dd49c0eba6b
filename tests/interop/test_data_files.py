"""The data files of a checkpoint are safetensors: readable without holdfast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading.tensors import DTYPES, bits, random
from safetensors import safe_open
from safetensors.torch import load_file
from state.models import Net, train
from torch import optim

import holdfast


def data_files(run: Path, step: int) -> list[Path]:
    return sorted((run / "steps").glob(f"{step:010d}-*/n*.safetensors"))


def test_safetensors_opens_the_data_file_of_one_writer_and_has_the_state(tmp_path: Path) -> None:
    model = Net(tied=False)
    optimizer = optim.Adam(model.parameters())
    train(model, optimizer, range(2))
    state = holdfast.State(model=model, optimizer=optimizer)
    holdfast.save(tmp_path, state, 2)
    (file,) = data_files(tmp_path, 2)
    tensors = load_file(file)
    with holdfast.open(tmp_path) as checkpoint:
        assert sorted(tensors) == checkpoint.names
    assert all(torch.equal(tensors[f"model.{name}"], t) for name, t in model.state_dict().items())
    assert torch.equal(tensors["optimizer.model.embed.weight.exp_avg"], optimizer.state[model.embed.weight]["exp_avg"])


def test_a_dtype_that_safetensors_lacks_is_there_as_bytes(tmp_path: Path) -> None:
    saved = {str(d).removeprefix("torch."): random(d, (3, 2), 1) for d in DTYPES}
    holdfast.save(tmp_path, {"part": saved}, 1)
    (file,) = data_files(tmp_path, 1)
    tensors = load_file(file)
    assert {name: bits(t) for name, t in tensors.items()} == {f"part.{name}": bits(t) for name, t in saved.items()}
    assert tensors["part.complex128"].dtype == torch.uint8
    assert tensors["part.bfloat16"].dtype == torch.bfloat16


def test_a_tied_weight_is_in_the_file_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": Net(tied=True)}, 1)
    (file,) = data_files(tmp_path, 1)
    assert "model.embed.weight" in load_file(file)
    assert "model.head.weight" not in load_file(file)


def test_every_entry_is_aligned_to_its_item(tmp_path: Path) -> None:
    saved = {str(d).removeprefix("torch."): random(d, (3, 3), 1) for d in DTYPES}
    holdfast.save(tmp_path, {"part": saved}, 1)
    (file,) = data_files(tmp_path, 1)
    length = int.from_bytes(file.read_bytes()[:8], "little")
    assert (8 + length) % 4096 == 0
    header = json.loads(file.read_bytes()[8 : 8 + length])
    for name, tensor in saved.items():
        assert header[f"part.{name}"]["data_offsets"][0] % tensor.element_size() == 0, name


def test_the_second_file_has_what_changed_alone(tmp_path: Path) -> None:
    parts = {"frozen": torch.ones(1000), "trained": torch.ones(1000)}
    holdfast.save(tmp_path, parts, 1)
    parts["trained"].add_(1)
    holdfast.save(tmp_path, parts, 2)
    names = [set(load_file(*data_files(tmp_path, step))) for step in (1, 2)]
    assert names == [{"frozen", "trained"}, {"trained"}]


def test_strange_names_are_escaped_and_the_file_stays_valid(tmp_path: Path) -> None:
    strange = {"a@0+1": torch.ones(1), "__metadata__": torch.ones(2), "new\nline": torch.ones(3), "naïve 🪸": torch.ones(4)}
    holdfast.save(tmp_path, {"part": strange, "__metadata__": torch.zeros(1)}, 1)
    (file,) = data_files(tmp_path, 1)
    with safe_open(file, "pt") as opened:
        assert len(list(opened.keys())) == 5
    assert sorted(holdfast.load(tmp_path)["part"]) == sorted(strange)


def test_the_commit_record_is_json_with_the_values(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"part": {"weight": torch.ones(2), "epoch": 3}}, 1, metrics={"loss": 0.5})
    (file,) = (tmp_path / "steps").glob("*/commit.json")
    record = json.loads(file.read_text())
    assert (record["decision"], record["step"], record["metrics"]) == ("committed", 1, {"loss": 0.5})
    assert [["part", "epoch"], 3] in record["values"]


@pytest.mark.parametrize("size", [0, 1])
def test_a_state_of_hardly_anything_can_be_saved_and_loaded(tmp_path: Path, size: int) -> None:
    holdfast.save(tmp_path, {"part": {"empty": torch.empty(0)} if size else {"epoch": 1}}, 1)
    tree = holdfast.load(tmp_path)["part"]
    assert tree["empty"].shape == (0,) if size else tree == {"epoch": 1}
    assert holdfast.open(tmp_path).verify() == []
