"""Opening what others wrote: directories of Hugging Face, single safetensors files, and those that are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading.refusals import refused
from loading.tensors import bits, random
from safetensors.torch import save_file
from state.models import Net

import holdfast

EqualStates = Callable[[Any, Any], bool]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model() -> Net:
    return Net(seed=4, tied=False)


def write_shards(folder: Path, model: Net, **index: Any) -> dict[str, str]:
    """Two shards and their index, as Hugging Face libraries write them; returns the weight map."""
    folder.mkdir()
    names = sorted(model.state_dict())
    weight_map = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    for shard in set(weight_map.values()):
        tensors = {n: t for n, t in model.state_dict().items() if weight_map[n] == shard}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map} | index))
    return weight_map


def test_a_sharded_directory_opens_under_the_role_model(tmp_path: Path, model: Net, equal_states: EqualStates) -> None:
    write_shards(tmp_path / "hub", model)
    (tmp_path / "hub" / "config.json").write_text("{}")
    with holdfast.open(f"hf:{tmp_path / 'hub'}") as checkpoint:
        assert checkpoint.names == sorted(f"model.{name}" for name in model.state_dict())
        assert torch.equal(checkpoint["model.embed.weight"][3:5], model.embed.weight[3:5])
        assert checkpoint.verify() == []
    assert equal_states(holdfast.load(f"hf:{tmp_path / 'hub'}")["model"], model.state_dict())
    other = Net(seed=5, tied=False)
    ledger = holdfast.restore(f"hf:{tmp_path / 'hub'}", {"model": other})
    assert equal_states(other, model)
    assert len(ledger.filled) == len(model.state_dict())


@pytest.mark.parametrize("form", ["hf", "safetensors"])
def test_a_single_file_opens_by_itself_or_in_its_directory(tmp_path: Path, model: Net, form: str) -> None:
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    for address in (f"{form}:{tmp_path / 'weights.safetensors'}", f"{form}:{tmp_path}"):
        assert torch.equal(holdfast.load(address)["model"]["embed.weight"], model.embed.weight)


def test_a_single_file_is_not_mixed_up_with_others_beside_it(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert holdfast.load(f"safetensors:{tmp_path / 'two.safetensors'}")["model"]["a"] == 0
    with pytest.raises(holdfast.Corrupt, match=r"a stands in one\.safetensors and in two\.safetensors"):
        holdfast.open(f"safetensors:{tmp_path}")


def test_a_large_tensor_of_others_is_read_row_by_row(tmp_path: Path) -> None:
    weight = random(torch.bfloat16, (3000, 1001), 1)
    save_file({"w": weight, "x": torch.ones(3)}, tmp_path / "weights.safetensors")
    with holdfast.open(f"safetensors:{tmp_path / 'weights.safetensors'}") as checkpoint:
        assert bits(checkpoint["model.w"][2990:]) == bits(weight[2990:])
        assert bits(checkpoint["model.w"][...]) == bits(weight)
        assert len(checkpoint.digest("model.w")) >= 16


def test_a_load_of_others_is_as_strict_as_of_ours(tmp_path: Path, model: Net) -> None:
    write_shards(tmp_path / "hub", model)
    address = f"hf:{tmp_path / 'hub'}"
    assert "has dtype float32 stored" in refused(address, {"model": Net(tied=False).double()})["model.embed.weight"]
    assert "missing" in refused(address, {"model": Net(tied=False, blocks=3)})["model.blocks.2.linear.weight"]
    assert "unexpected" in refused(address, {"model": Net(tied=False, blocks=1)})["model.blocks.1.linear.weight"]


def test_names_of_others_are_renamed_and_cast_on_the_way_in(tmp_path: Path) -> None:
    save_file({f"transformer.h.{i}.ln.weight": torch.full((2,), i + 0.5) for i in range(2)}, tmp_path / "w.safetensors")
    live = {"model": {f"blocks.{i}.norm.weight": torch.zeros(2, dtype=torch.float16) for i in range(2)}}
    ledger = holdfast.restore(
        f"hf:{tmp_path}",
        live,
        rename={"model.transformer.h.*.ln.*": "model.blocks.*.norm.*"},
        cast={"model.*": torch.float16},
    )
    assert [t.tolist() for t in live["model"].values()] == [[0.5, 0.5], [1.5, 1.5]]
    assert len(ledger.renamed) == len(ledger.cast) == 2


def test_strange_names_of_others_keep_apart(tmp_path: Path) -> None:
    tensors = {"a@0+1": torch.ones(1), "a": torch.zeros(2), "100%": torch.ones(3), "": torch.ones(4)}
    save_file(tensors, tmp_path / "w.safetensors")
    tree = holdfast.load(f"hf:{tmp_path}")["model"]
    assert {name: t.tolist() for name, t in tree.items()} == {name: t.tolist() for name, t in tensors.items()}


@pytest.mark.parametrize("address", ["hf:{0}/missing", "safetensors:{0}/missing.safetensors", "hf:{0}"])
def test_a_place_without_safetensors_is_no_checkpoint(tmp_path: Path, address: str) -> None:
    with pytest.raises(holdfast.NoCheckpoint, match="no safetensors"):
        holdfast.open(address.format(tmp_path))


def test_a_shard_that_the_index_names_and_is_not_there_is_told(tmp_path: Path, model: Net) -> None:
    write_shards(tmp_path / "hub", model)
    (tmp_path / "hub" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(holdfast.Corrupt, match=r"model-00002-of-00002\.safetensors"):
        holdfast.load(f"hf:{tmp_path / 'hub'}")


def test_a_tensor_that_the_index_does_not_find_where_it_says_is_told(tmp_path: Path, model: Net) -> None:
    weight_map = write_shards(tmp_path / "hub", model)
    for wrong in ({"absent.weight": "model-00001-of-00002.safetensors"}, {"embed.weight": "model-00009-of-00002.safetensors"}):
        (tmp_path / "hub" / INDEX).write_text(json.dumps({"weight_map": weight_map | wrong}))
        with pytest.raises(holdfast.Corrupt, match=next(iter(wrong))):
            holdfast.open(f"hf:{tmp_path / 'hub'}")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"embed.weight": 5}}', '{"weight_map": null}', "\xff"]
)
def test_an_index_that_is_no_index_is_damage_and_not_a_crash(tmp_path: Path, model: Net, content: str) -> None:
    write_shards(tmp_path / "hub", model)
    (tmp_path / "hub" / INDEX).write_bytes(content.encode("latin-1"))
    with pytest.raises(holdfast.Corrupt, match=r"model\.safetensors\.index\.json"):
        holdfast.open(f"hf:{tmp_path / 'hub'}")


@pytest.mark.parametrize("path", ["../outside.safetensors", "/etc/passwd", "a/../../b", "a\x00b"])
def test_an_index_that_points_outside_of_its_directory_is_refused(tmp_path: Path, model: Net, path: str) -> None:
    weight_map = write_shards(tmp_path / "hub", model)
    (tmp_path / "hub" / INDEX).write_text(json.dumps({"weight_map": weight_map | {"embed.weight": path}}))
    with pytest.raises(holdfast.Corrupt):
        holdfast.open(f"hf:{tmp_path / 'hub'}")


def test_shards_beside_the_index_that_it_does_not_name_are_not_loaded(tmp_path: Path, model: Net) -> None:
    """As when a hub directory has the original weights of another layout beside the converted ones."""
    write_shards(tmp_path / "hub", model)
    save_file({"of.another.layout": torch.ones(2)}, tmp_path / "hub" / "consolidated.safetensors")
    with holdfast.open(f"hf:{tmp_path / 'hub'}") as checkpoint:
        assert checkpoint.names == sorted(f"model.{name}" for name in model.state_dict())


@pytest.mark.parametrize("keep_bytes", [0, 4, 8, 100, -1])
def test_a_file_that_is_cut_off_is_damage_that_is_told(tmp_path: Path, model: Net, keep_bytes: int) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), file)
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(holdfast.Corrupt, match=r"weights\.safetensors"):
        holdfast.load(f"safetensors:{file}")


def test_a_pickle_is_not_opened(tmp_path: Path, model: Net) -> None:
    torch.save(model.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(holdfast.Corrupt):
        holdfast.open(f"safetensors:{tmp_path / 'weights.safetensors'}")


def test_an_unknown_format_is_an_error_that_names_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(holdfast.HoldfastError, match="known: hf, safetensors") as raised:
        holdfast.open(f"dcp:{tmp_path}")
    assert raised.value.exit_code == 2
