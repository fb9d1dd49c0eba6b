"""Golden checkpoints of each format version load for ever, bit for bit, without a change to a single byte of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.format.records import FORMAT

from .make_golden import HERE, described, golden_state, leaves

VERSIONS = sorted(p.name for p in HERE.iterdir() if (p / "expected.json").exists())


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the run, and what it holds."""
    folder = HERE / request.param
    return Path(shutil.copytree(folder / "run", tmp_path / "run")), json.loads((folder / "expected.json").read_text())


def is_known(leaf: Any) -> bool:
    return "dtype" not in leaf or hasattr(torch, leaf["dtype"])


def test_there_is_one_for_this_version() -> None:
    assert f"v{FORMAT}" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_small_and_names_nobody(version: str) -> None:
    files = [p for p in (HERE / version / "run").rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 50_000
    for path in files:
        assert b"/root/" not in path.read_bytes()
        assert b"/home/" not in path.read_bytes()
        if b'"by"' in path.read_bytes():
            assert b'"host": "golden/' in path.read_bytes()


def test_every_step_loads_bit_for_bit(golden: tuple[Path, dict[str, Any]]) -> None:
    run, expected = golden
    for step, held in expected["steps"].items():
        found = {path: described(leaf) for path, leaf in leaves(holdfast.load(f"{run}@{step}"))}
        assert {p: leaf for p, leaf in held["leaves"].items() if is_known(leaf)} == {
            p: found[p] for p in found if is_known(found[p])
        }


def test_the_digests_are_the_recorded_ones(golden: tuple[Path, dict[str, Any]]) -> None:
    run, expected = golden
    for step, held in expected["steps"].items():
        with holdfast.open(f"{run}@{step}") as checkpoint:
            assert not checkpoint.verify()
            assert checkpoint.content_digest == held["content_digest"]
            assert checkpoint.names == sorted(held["logical_digests"])
            assert {name: checkpoint.digest(name) for name in checkpoint.names} == held["logical_digests"]


def test_the_history_is_the_recorded_one(golden: tuple[Path, dict[str, Any]]) -> None:
    run, expected = golden
    opened = holdfast.Run(str(run))
    assert [s.step for s in opened.steps()] == expected["lineage"]
    assert {str(s.step): s.metrics for s in opened.steps(abandoned=True)} == expected["metrics"]
    assert opened.find("first").step == 1
    assert opened.latest().step == expected["lineage"][-1]  # type: ignore[union-attr]


def test_tied_tensors_come_back_tied(golden: tuple[Path, dict[str, Any]]) -> None:
    model = holdfast.load(str(golden[0]))["model"]
    assert model["head"].data_ptr() == model["embed"].data_ptr()


def test_a_live_state_is_filled_from_it(golden: tuple[Path, dict[str, Any]]) -> None:
    run, expected = golden
    state = golden_state(1)
    state["progress"]["step"] = 77
    for tensor in (*state["dtypes"].values(), *state["model"].values()):
        tensor.zero_()
    holdfast.restore(f"{run}@1", state)
    held = expected["steps"]["1"]["leaves"]
    found = {path: described(leaf) for path, leaf in leaves(state)}
    assert {p: leaf for p, leaf in held.items() if is_known(leaf)} == {p: found[p] for p in found if is_known(found[p])}


def test_training_goes_on_from_it(golden: tuple[Path, dict[str, Any]]) -> None:
    """The next step refers to the golden one's files, and the golden steps stay what they were."""
    run, expected = golden
    state = golden_state(3)
    with holdfast.Checkpointer(str(run), state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=9)) as checkpointer:
        assert checkpointer.resume() == 2
        state["progress"]["step"] = 3
        handle = checkpointer.step(3)
    assert handle is not None
    with holdfast.open(str(run)) as checkpoint:
        assert checkpoint.commit.references
    step = expected["lineage"][0]
    found = {path: described(leaf) for path, leaf in leaves(holdfast.load(f"{run}@{step}"))}
    assert found.keys() == expected["steps"][str(step)]["leaves"].keys()
