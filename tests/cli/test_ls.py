"""`holdfast ls`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast


def test_it_lists_the_steps_with_their_metrics_sizes_and_pins(command, run: Path) -> None:
    holdfast.Run(run).pin(20, "good")
    holdfast.Run(run).note(10, {"accuracy": 0.5})
    found = command("ls", run, "--json").json
    assert (found["run"], found["latest"], found["attempt"]) == (str(run), 30, 1)
    assert [s["step"] for s in found["steps"]] == [10, 20, 30]
    first, second, _ = found["steps"]
    assert first["metrics"] == {"loss": 0.1, "accuracy": 0.5}
    assert second["pins"] == ["good"]
    assert (first["kind"], first["tier"], first["line"]) == ("full", "local", "lineage")
    assert first["bytes"] == 12 * 4 + 12 * 2 + 300 * 4
    assert first["created"] == holdfast.Run(run).find(10).created


def test_a_step_that_refers_to_another_has_fewer_new_bytes(command, run: Path) -> None:
    _, second, _ = command("ls", run, "--json").json["steps"]
    with holdfast.open(run, step=20) as opened:
        assert len(opened.index.files()) == 2, "the frozen tensor is in the file of step 10"
    assert second["refers_to"] == [{"step": 10, "attempt": 1}]


def test_the_table_has_a_line_for_each_step(command, run: Path) -> None:
    holdfast.Run(run).pin(20, "good")
    lines = command("ls", run).out.splitlines()
    assert lines[0] == f"{run}: 3 steps, attempt 1 (start)"
    assert lines[1].split() == ["step", "line", "kind", "tier", "attempt", "saved", "size", "new", "metrics", "pins"]
    assert [line.split()[0] for line in lines[2:]] == ["10", "20", "30"]
    assert lines[3].endswith("loss=0.05       good")


def test_an_address_with_a_step_lists_that_one(command, run: Path) -> None:
    holdfast.Run(run).pin(20, "good")
    for at in ("20", "good"):
        (only,) = command("ls", f"{run}@{at}", "--json").json["steps"]
        assert (only["step"], only["pins"]) == (20, ["good"])


def test_steps_that_a_rollback_left_behind_are_shown_when_asked_for(command, run: Path) -> None:
    holdfast.Run(run).rollback(10)
    found = command("ls", run)
    assert "1 step, attempt 2 (rollback)" in found.out
    assert "not shown: 2 abandoned steps; --all shows them" in found.out
    for option in ("--all", "--abandoned"):
        steps = command("ls", run, option, "--json").json["steps"]
        assert [(s["step"], s["line"]) for s in steps] == [(10, "lineage"), (20, "abandoned"), (30, "abandoned")]


def test_an_interrupted_save_is_no_step_and_is_named(command, run: Path, interrupted) -> None:
    left = interrupted(run, 40)
    found = command("ls", run, "--json").json
    assert [s["step"] for s in found["steps"]] == [10, 20, 30]
    assert found["leftovers"] == [{"path": f"steps/{left.name}", "state": "interrupted", "reason": ""}]
    assert "`holdfast prune` removes it" in command("ls", run).out


def test_a_damaged_commit_record_is_named_and_hides_no_other_step(command, run: Path, flip) -> None:
    flip(run, 30, "commit.json", 100)
    found = command("ls", run, "--json").json
    assert found["latest"] == 20
    assert [s["step"] for s in found["steps"]] == [10, 20]
    (damaged,) = found["damaged"]
    assert damaged["path"].startswith("steps/0000000030-a0001")
    assert "damaged: steps/0000000030-a0001" in command("ls", run).out


def test_a_step_without_its_optimizer_is_partial(command, tmp_path: Path) -> None:
    weight = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9)
    weight(torch.ones(4)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        holdfast.save(tmp_path / "run", holdfast.State(model=weight, optimizer=optimizer), step)
    assert command("prune", tmp_path / "run", "--weights", 1).code == 0
    assert [s["kind"] for s in command("ls", tmp_path / "run", "--json").json["steps"]] == ["partial", "full"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("nowhere", "there is no run at nowhere: the directory does not exist"),
        ("empty", "it is empty"),
        ("runs", "runs in it: runs/gpt"),
        ("runs/gpt/steps", "lies inside the run"),
        ("file", "is a file, not a run"),
        ("theirs", "safetensors:theirs"),
        ("runs/gpt@7", "has no step 7; it has 1"),
        ("runs/gpt@best-one", "has no pin best-one"),
    ],
)
def test_where_there_is_no_run_it_says_what_there_is(command, tmp_path: Path, monkeypatch, address, says) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save("runs/gpt", {"w": 1}, 1)
    Path("empty").mkdir()
    Path("theirs").mkdir()
    Path("theirs/model.safetensors").touch()
    Path("file").touch()
    ended = command("ls", address)
    assert (ended.code, ended.out) == (3, "")
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_the_files_of_others_have_no_steps(command, tmp_path: Path) -> None:
    ended = command("ls", f"hf:{tmp_path}")
    assert ended.code == 2
    assert f"holdfast inspect hf:{tmp_path}" in ended.err
