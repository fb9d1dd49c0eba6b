"""`holdfast cp`."""

from __future__ import annotations

import shutil
from pathlib import Path

import holdfast


def test_a_step_is_copied_with_what_it_refers_to(command, run: Path, tmp_path: Path) -> None:
    digest = holdfast.open(run, step=20).content_digest
    ended = command("cp", f"{run}@20", tmp_path / "copy", "--json")
    assert (ended.code, ended.json["step"], ended.json["content_digest"]) == (0, 20, digest)
    assert ended.json["refers_to"] == []
    shutil.rmtree(run)
    assert command("verify", tmp_path / "copy").code == 0


def test_without_a_step_the_latest_is_copied(command, run: Path, tmp_path: Path) -> None:
    assert command("cp", run, tmp_path / "copy").out.startswith(f"step 30 of {run} is now in {tmp_path / 'copy'}")


def test_a_target_that_has_the_step_or_a_later_one_is_refused(command, run: Path, tmp_path: Path) -> None:
    command("cp", f"{run}@20", tmp_path / "copy")
    for step in (10, 20):
        assert command("cp", f"{run}@{step}", tmp_path / "copy").code == 6
    assert [s.step for s in holdfast.Run(tmp_path / "copy").steps()] == [20]


def test_a_directory_of_something_else_is_refused(command, run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    ended = command("cp", run, tmp_path / "mine")
    assert ended.code == 6
    assert "thesis.tex" in ended.err


def test_the_target_is_a_run_and_not_a_step(command, run: Path, tmp_path: Path) -> None:
    assert command("cp", run, f"{tmp_path}/copy@30").code == 2
    assert command("cp", run, f"hf:{tmp_path}/copy").code == 2


def test_a_damaged_step_is_not_copied(command, run: Path, tmp_path: Path, flip) -> None:
    flip(run, 30)
    ended = command("cp", run, tmp_path / "copy")
    assert ended.code == 4
    assert holdfast.Run(tmp_path / "copy").steps() == []
