"""`holdfast prune`: what it deletes, why, and what it never does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 8; the loss is smallest at 3."""
    path = tmp_path_factory.mktemp("built") / "run"
    for step in range(1, 9):
        state = {"model": {"w": torch.full((500,), float(step))}}
        holdfast.save(path, state, step, metrics={"loss": abs(step - 3)})
    return path


@pytest.fixture
def many(built: Path, tmp_path: Path) -> Path:
    """A copy of `built`."""
    return shutil.copytree(built, tmp_path / "run")


def verdicts(found) -> dict[int, str]:
    return {step["step"]: step["verdict"] for step in found["steps"]}


def steps(run: Path) -> list[int]:
    return [step.step for step in holdfast.Run(run).steps()]


def test_a_dry_run_says_what_would_go_and_deletes_nothing(command, many: Path) -> None:
    ended = command("prune", many, "--last", 2, "--dry-run", "--json")
    assert (ended.code, ended.json["dry_run"]) == (0, True)
    assert verdicts(ended.json) == dict.fromkeys(range(1, 7), "remove") | {7: "keep", 8: "keep"}
    assert ended.json["freed_bytes"] > 6 * 500 * 4
    assert steps(many) == list(range(1, 9))
    assert "would remove 6 steps" in command("prune", many, "--last", 2, "--dry-run").out


def test_each_step_that_stays_has_its_reason(command, many: Path) -> None:
    holdfast.Run(many).pin(1, "first")
    words = ["--last", 2, "--every", 4, "--best", 1, "--metric", "loss"]
    found = command("prune", many, *words, "--json").json
    reasons = {s["step"]: s["reason"] for s in found["steps"] if s["verdict"] == "keep"}
    assert reasons == {
        1: "pinned or held",
        3: "among the best 1 by loss",
        4: "a multiple of 4",
        7: "among the last 2",
        8: "newest",
    }
    assert steps(many) == [1, 3, 4, 7, 8]
    assert command("verify", many).code == 0


def test_the_best_may_be_the_largest(command, many: Path) -> None:
    command("prune", many, "--last", 1, "--best", 2, "--metric", "loss", "--mode", "max")
    assert steps(many) == [7, 8]


def test_the_default_keeps_the_last_three(command, many: Path) -> None:
    ended = command("prune", many)
    assert steps(many) == [6, 7, 8]
    assert "removed 5 steps" in ended.out


def test_a_step_that_somebody_reads_is_kept(command, many: Path) -> None:
    with holdfast.Run(many).hold(2):
        found = command("prune", many, "--last", 1, "--json").json
    assert verdicts(found)[2] == "keep"
    assert steps(many) == [2, 8]


def test_of_old_steps_the_weights_alone_may_stay(command, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    for step in (1, 2, 3):
        holdfast.save(tmp_path / "run", holdfast.State(model=model, optimizer=optimizer), step)
    found = command("prune", tmp_path / "run", "--weights", 1, "--json").json
    assert verdicts(found) == {1: "weights", 2: "weights", 3: "keep"}
    names = [t["name"] for t in command("inspect", f"{tmp_path / 'run'}@1", "--json").json["tensors"]]
    assert "model.weight" in names
    assert not any(name.startswith("optimizer.") for name in names)


def test_the_last_step_of_an_abandoned_line_stays(command, many: Path) -> None:
    holdfast.Run(many).rollback(5)
    found = command("prune", many, "--last", 1, "--json").json
    assert verdicts(found) == dict.fromkeys((1, 2, 3, 4, 6, 7), "remove") | {5: "keep", 8: "keep"}
    assert {s.step for s in holdfast.Run(many).steps(abandoned=True)} == {5, 8}


def test_what_interrupted_saves_left_goes(command, many: Path, interrupted) -> None:
    left = interrupted(many, 20)
    assert command("prune", many, "--last", 8).code == 0
    assert not left.exists()
    assert steps(many) == list(range(1, 9))


def test_nothing_is_deleted_beside_a_damaged_record(command, many: Path, flip) -> None:
    flip(many, 8, "commit.json", 50)
    ended = command("prune", many, "--last", 1)
    assert ended.code == 4
    assert "nothing was deleted" in ended.err
    assert steps(many) == list(range(1, 8))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--best", "2"], "--best needs --metric"),
        (["--mode", "middle"], "min or max"),
        (["--last", "0"], "--last"),
        (["--every", "x"], "--every"),
    ],
)
def test_a_policy_that_makes_no_sense_is_a_usage_error(command, many: Path, words, says) -> None:
    ended = command("prune", many, *words)
    assert ended.code == 2
    assert says in ended.err
    assert steps(many) == list(range(1, 9))


def test_a_step_cannot_be_pruned_by_its_address(command, many: Path) -> None:
    assert command("prune", f"{many}@3").code == 2
