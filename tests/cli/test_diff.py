"""`holdfast diff`: what differs between two checkpoints, by how much, and that equal ones are not read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import holdfast


def saved(path: Path, state: object, step: int = 1) -> Path:
    holdfast.save(path, state, step)
    return path


def test_two_steps_of_a_run_differ_in_what_training_changed(command, run: Path) -> None:
    ended = command("diff", f"{run}@10", f"{run}@30", "--json")
    found = ended.json
    assert (ended.code, found["equal"], found["a"]["step"], found["b"]["step"]) == (5, False, 10, 30)
    assert {c["name"]: c["what"] for c in found["changed"]} == {"model.layer.2": ["content"], "model.layer.10": ["content"]}
    assert found["changed_values"] == [{"name": "progress.samples", "a": 80, "b": 240}]
    (measured,) = (c["distance"] for c in found["changed"] if c["name"] == "model.layer.2")
    assert (measured["max_abs"], measured["differing"], measured["elements"]) == (20, 12, 12)
    first = torch.arange(12.0) + 10
    assert measured["relative_l2"] == pytest.approx((20 * math.sqrt(12) / first.norm()).item())


def test_a_step_equals_itself_and_its_copy(command, run: Path, tmp_path: Path) -> None:
    command("cp", f"{run}@20", tmp_path / "copy")
    for other in (f"{run}@20", tmp_path / "copy"):
        ended = command("diff", f"{run}@20", other)
        assert (ended.code, ended.out) == (0, "equal: 3 tensors and 2 values, in every bit\n")


def test_tensors_with_equal_digests_are_not_read(command, tmp_path: Path, flip) -> None:
    same = torch.ones(1000)
    a = saved(tmp_path / "a", {"same": same, "other": torch.zeros(3)})
    b = saved(tmp_path / "b", {"same": same, "other": torch.ones(3)})
    flip(a, 1, at=4096 + 10)
    assert command("verify", a).code == 4
    assert [c["name"] for c in command("diff", a, b, "--json").json["changed"]] == ["other"]


def test_names_that_only_one_of_the_two_has_are_listed(command, tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(2), "old": torch.ones(2), "lr": 1})
    b = saved(tmp_path / "b", {"w": torch.ones(2), "new": torch.ones(2), "lr": 1, "momentum": 0.9})
    ended = command("diff", a, b, "--json")
    assert (ended.code, ended.json["only_in_a"], ended.json["only_in_b"]) == (5, ["old"], ["momentum", "new"])
    assert f"only in {b}: momentum" in command("diff", a, b).out


def test_another_shape_dtype_or_alias_is_named_and_measured_where_it_can_be(command, tmp_path: Path) -> None:
    x, wide = torch.linspace(0, 1, 8), torch.ones(4, 2)
    a = saved(tmp_path / "a", {"cast": x, "shape": wide, "tied": wide, "exact": torch.ones(3)})
    b = saved(tmp_path / "b", {"cast": x.bfloat16(), "shape": torch.ones(2, 4), "tied": wide, "exact": torch.ones(3).half()})
    found = {c["name"]: c for c in command("diff", a, b, "--json").json["changed"]}
    assert {name: c["what"] for name, c in found.items()} == {
        "cast": ["dtype", "content"],
        "shape": ["shape"],
        "tied": ["alias"],
        "exact": ["dtype"],
    }
    error = (x - x.bfloat16().float()).abs()
    assert found["cast"]["distance"]["max_abs"] == error.max().item()
    assert found["cast"]["distance"]["differing"] == error.count_nonzero().item()
    assert found["shape"]["distance"] is None
    assert (found["cast"]["a"], found["cast"]["b"]) == ("float32 [8]", "bfloat16 [8]")


def test_bits_count_where_numbers_are_equal(command, tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.tensor([0.0, 1.0])})
    b = saved(tmp_path / "b", {"w": torch.tensor([-0.0, 1.0])})
    ended = command("diff", a, b, "--json")
    (changed,) = ended.json["changed"]
    assert ended.code == 5
    assert (changed["distance"]["differing"], changed["distance"]["max_abs"]) == (1, 0)


def test_what_is_not_finite_is_counted_and_not_measured(command, tmp_path: Path) -> None:
    nan = math.nan
    a = saved(tmp_path / "a", {"w": torch.tensor([nan, 1.0, 2.0, math.inf])})
    b = saved(tmp_path / "b", {"w": torch.tensor([nan, nan, 2.5, math.inf])})
    (changed,) = command("diff", a, b, "--json").json["changed"]
    assert changed["distance"]["differing"] == 2
    assert changed["distance"]["not_finite"] == 1
    assert changed["distance"]["max_abs"] == 0.5


def test_large_integers_are_subtracted_exactly(command, tmp_path: Path) -> None:
    limits = torch.iinfo(torch.int64)
    a = saved(tmp_path / "a", {"n": torch.tensor([limits.min, 2**60])})
    b = saved(tmp_path / "b", {"n": torch.tensor([limits.max, 2**60 + 1])})
    (changed,) = command("diff", a, b, "--json").json["changed"]
    assert changed["distance"]["max_abs"] == 2**64 - 1


def test_tensors_of_several_chunks_are_compared_piece_by_piece(command, tmp_path: Path) -> None:
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    y = x.clone()
    y[[0, 1_500_000, 2_999_999]] += 1
    a, b = saved(tmp_path / "a", {"x": x}), saved(tmp_path / "b", {"x": y})
    (changed,) = command("diff", a, b, "--json").json["changed"]
    assert changed["distance"]["differing"] == 3
    assert changed["distance"]["relative_l2"] == pytest.approx(((x - y).double().norm() / x.double().norm()).item())


def test_values_differ_by_type_too(command, tmp_path: Path) -> None:
    a = saved(tmp_path / "a", {"w": torch.ones(1), "n": 1, "flag": True, "pair": (1, 2)})
    b = saved(tmp_path / "b", {"w": torch.ones(1), "n": 1.0, "flag": 1, "pair": [1, 2]})
    ended = command("diff", a, b)
    assert ended.code == 5
    assert "value n: 1 -> 1.0\n" in ended.out
    assert "value pair: (1, 2) -> [1, 2]\n" in ended.out
    assert "value flag: True -> 1\n" in ended.out


def test_patterns_choose_what_is_compared(command, run: Path) -> None:
    assert command("diff", f"{run}@10", f"{run}@30", "--select", "model.frozen").code == 0
    assert command("diff", f"{run}@10", f"{run}@30", "--exclude", "*.layer.*", "--exclude", "progress.*").code == 0
    ended = command("diff", f"{run}@10", f"{run}@30", "--select", "modle.*")
    assert ended.code == 2
    assert "not compared" in ended.err


def test_an_export_equals_what_it_was_made_from(command, run: Path, tmp_path: Path) -> None:
    holdfast.export(run, tmp_path / "theirs", to="hf", select="model.*")
    assert command("diff", run, f"hf:{tmp_path / 'theirs'}", "--select", "model.*").code == 0


def test_damage_in_what_must_be_read_is_an_error(command, run: Path, flip) -> None:
    flip(run, 30)
    ended = command("diff", f"{run}@10", f"{run}@30")
    assert (ended.code, ended.out) == (4, "")
    assert "model.layer.10" in ended.err
