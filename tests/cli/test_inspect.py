"""`holdfast inspect`: the tree of a checkpoint, and the statistics of a tensor."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import holdfast

FLOATS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8"]


def test_it_shows_tensors_and_values_as_a_tree(command, run: Path) -> None:
    out = command("inspect", run).out
    assert out.startswith(f"{run}, step 30, attempt 1, full\n")
    tree = [line.rstrip() for line in out.splitlines()]
    start = next(n for n, line in enumerate(tree) if line.startswith("name"))
    labels = [line[: line.find("  ", len(line) - len(line.lstrip()))] for line in tree[start + 1 :]]
    assert labels == ["model", "  frozen", "  layer", "    2", "    10", "progress", "  name", "  samples"]
    assert "    10     bfloat16" in out
    assert "  samples  240" in out


def test_json_has_every_tensor_and_value_and_who_wrote_them(command, run: Path) -> None:
    holdfast.Run(run).pin(20, "good")
    found = command("inspect", f"{run}@good", "--json").json
    assert (found["step"], found["attempt"], found["pins"], found["line"]) == (20, 1, ["good"], "lineage")
    assert found["content_digest"] == holdfast.open(run, step=20).content_digest
    assert found["writer"]["reason"] == "start"
    assert found["writer"]["pid"] > 0
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in found["tensors"]} == {
        "model.frozen": ("float32", [300], 1200),
        "model.layer.10": ("bfloat16", [3, 4], 24),
        "model.layer.2": ("float32", [3, 4], 48),
    }
    assert {v["name"]: v["value"] for v in found["values"]} == {"progress.samples": 160, "progress.name": "naïve"}


def test_it_names_the_files_that_the_bytes_lie_in(command, run: Path) -> None:
    files = command("inspect", run, "--json").json["files"]
    assert sorted(file["path"].split("/")[1] for file in files) == ["0000000010-a0001", "0000000030-a0001"]
    assert all((run / file["path"]).stat().st_size == file["bytes"] for file in files)


def test_tied_tensors_name_each_other_and_count_once(command, tmp_path: Path) -> None:
    tied = torch.ones(10)
    holdfast.save(tmp_path / "run", {"m": {"a": tied, "b": tied}}, 1)
    found = command("inspect", tmp_path / "run", "--json").json
    assert {t["name"]: t["alias_of"] for t in found["tensors"]} == {"m.a": None, "m.b": "m.a"}
    assert found["bytes"] == 40
    assert "shares m.a" in command("inspect", tmp_path / "run").out


def test_a_part_of_the_tree_or_a_pattern_shows_only_that(command, run: Path) -> None:
    for name, meant in (("model.layer", 2), ("*.layer.*", 2), ("model.*", 3), ("progress", 0)):
        assert len(command("inspect", run, name, "--json").json["tensors"]) == meant


def test_a_depth_sums_up_what_lies_deeper(command, run: Path) -> None:
    lines = command("inspect", run, "--depth", 1).out.splitlines()
    assert [line.split() for line in lines[-2:]] == [["model", "3", "tensors", "1.27", "kB"], ["progress", "2", "values"]]


def test_a_long_value_is_shown_whole_when_it_is_asked_for(command, tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"p": {"text": "x" * 500, "n": 1}}, 1)
    assert "x" * 500 not in command("inspect", tmp_path / "run").out
    assert "x" * 500 in command("inspect", tmp_path / "run", "p.text").out


def test_a_rolled_back_step_says_that_it_is_abandoned(command, run: Path) -> None:
    holdfast.Run(run).rollback(10)
    assert "abandoned" in command("inspect", f"{run}@30").out
    assert command("inspect", f"{run}@30", "--json").json["line"] == "abandoned"


def awkward(name: str) -> torch.Tensor:
    """Elements of a dtype with zeros of both signs, subnormals, large ones, and what it has of NaN and infinity."""
    dtype = getattr(torch, name)
    plain = torch.randn(300_000, generator=torch.Generator().manual_seed(1)).mul(4)
    special = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 448.0, -57344.0, math.nan, math.inf, -math.inf])
    return torch.cat([plain, special]).to(dtype)


@pytest.mark.parametrize("name", FLOATS)
def test_the_statistics_of_floats_are_those_of_their_finite_elements(command, tmp_path: Path, name: str) -> None:
    tensor = awkward(name)
    holdfast.save(tmp_path / "run", {"t": tensor}, 1)
    found = command("inspect", tmp_path / "run", "t", "--json").json
    exact = tensor.double()
    finite = exact[exact.isfinite()]
    assert (found["min"], found["max"]) == (finite.min().item(), finite.max().item())
    assert found["mean"] == pytest.approx(finite.mean().item(), rel=1e-9)
    assert found["std"] == pytest.approx(finite.std(correction=0).item(), rel=1e-9)
    assert (found["nan"], found["inf"]) == (exact.isnan().sum().item(), exact.isinf().sum().item())
    assert (found["zeros"], found["elements"]) == ((exact == 0).sum().item(), tensor.numel())
    with holdfast.open(tmp_path / "run") as opened:
        assert found["digest"] == opened.digest("t")


def test_every_code_of_an_8_bit_float_means_what_torch_says(command, tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    kinds = [n for n in (*FLOATS[4:], "float8_e8m0fnu") if hasattr(torch, n)]
    holdfast.save(tmp_path / "run", {n: {str(c): codes[c : c + 1].view(getattr(torch, n)) for c in range(256)} for n in kinds}, 1)
    with holdfast.open(tmp_path / "run") as opened:
        from holdfast.cli.elements import numbers, pieces

        for kind in kinds:
            for code in range(256):
                row = opened.tensor(f"{kind}.{code}")
                (value,) = (numbers(raw, row.dtype)[0] for raw in pieces(opened, row))
                wanted = codes[code : code + 1].view(getattr(torch, kind)).to(torch.float64).item()
                assert value == wanted or (math.isnan(value) and math.isnan(wanted)), (kind, code)


@pytest.mark.parametrize("name", INTEGERS)
def test_the_extremes_of_integers_are_exact(command, tmp_path: Path, name: str) -> None:
    limits = torch.iinfo(getattr(torch, name))
    holdfast.save(tmp_path / "run", {"t": torch.tensor([limits.max, limits.min, 0, 1], dtype=getattr(torch, name))}, 1)
    found = command("inspect", tmp_path / "run", "t", "--json").json
    assert (found["min"], found["max"], found["nan"]) == (limits.min, limits.max, 0)


def test_what_has_no_elements_or_no_order_has_statistics_too(command, tmp_path: Path) -> None:
    state = {"empty": torch.empty(0, 3), "mask": torch.tensor([True, False]), "wave": torch.tensor([3 + 4j, 0j])}
    holdfast.save(tmp_path / "run", {**state, "scalar": torch.tensor(7.0)}, 1)
    empty, mask, wave, scalar = (command("inspect", tmp_path / "run", n, "--json").json for n in (*state, "scalar"))
    assert (empty["elements"], empty["min"], empty["mean"]) == (0, None, None)
    assert (mask["mean"], mask["zeros"]) == (0.5, 1)
    assert (wave["max"], wave["min"], wave["zeros"]) == (5.0, 0.0, 1)
    assert (scalar["mean"], scalar["std"], scalar["shape"]) == (7.0, 0.0, [])
    assert "mean      -" in command("inspect", tmp_path / "run", "empty").out


def test_a_damaged_tensor_has_no_statistics_but_an_error_that_names_it(command, run: Path, flip) -> None:
    path = flip(run, 30)
    ended = command("inspect", run, "model.layer.10")
    assert (ended.code, ended.out) == (4, "")
    assert "model.layer.10" in ended.err
    assert path.name in ended.err


def test_an_unknown_name_is_a_usage_error_that_offers_a_near_one(command, run: Path) -> None:
    ended = command("inspect", run, "model.layer.3")
    assert ended.code == 2
    assert "did you mean model.layer.2?" in ended.err


def test_the_files_of_others_can_be_inspected(command, run: Path, tmp_path: Path) -> None:
    holdfast.export(run, tmp_path / "theirs", select="model.*")
    found = command("inspect", f"safetensors:{tmp_path / 'theirs'}", "--json").json
    assert [t["dtype"] for t in found["tensors"]] == ["float32", "bfloat16", "float32"]
    assert (found["pins"], found["writer"]) == ([], None)
