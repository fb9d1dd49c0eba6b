"""`holdfast verify`: every flipped bit is found and named, and what is intact is said to be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import holdfast


def test_an_intact_run_has_each_step_of_its_lineage_read(command, run: Path) -> None:
    ended = command("verify", run, "--json")
    assert (ended.code, ended.json["intact"], ended.json["newest_intact"]) == (0, True, 30)
    assert [(s["step"], s["intact"]) for s in ended.json["steps"]] == [(30, True), (20, True), (10, True)]
    assert ended.json["bytes"] == 3 * (12 * 4 + 12 * 2 + 300 * 4)
    assert command("verify", run).out.splitlines()[0] == "step 30: intact, 1.27 kB"


def test_a_step_in_the_address_is_the_only_one_read(command, run: Path, flip) -> None:
    flip(run, 30)
    assert [s["step"] for s in command("verify", f"{run}@20", "--json").json["steps"]] == [20]
    assert command("verify", f"{run}@20").code == 0
    assert command("verify", f"{run}@latest").code == 4


def test_a_flipped_bit_is_named_by_file_tensor_and_offset(command, run: Path, flip) -> None:
    path = flip(run, 20)
    ended = command("verify", run, "--json")
    assert (ended.code, ended.json["intact"], ended.json["newest_intact"]) == (4, False, 30)
    (step,) = (s for s in ended.json["steps"] if not s["intact"])
    (damage,) = step["damages"]
    assert (step["step"], damage["tensor"]) == (20, "model.layer.10")
    assert damage["file"] == str(path.relative_to(run))
    assert damage["offset"] + damage["nbytes"] == path.stat().st_size
    out = command("verify", run).out
    assert "step 20: DAMAGED in 1 place\n  model.layer.10: bytes" in out


def test_after_damage_it_names_the_newest_step_that_is_intact(command, run: Path, flip) -> None:
    flip(run, 30)
    assert command("verify", run).out.endswith("step 20 is the newest of these that is intact\n")


def test_what_several_steps_share_is_damaged_in_all_of_them(command, run: Path, flip) -> None:
    flip(run, 10, at=4096 + 12 * 4 + 10)
    ended = command("verify", run)
    assert ended.code == 4
    assert ended.out.count("model.frozen: bytes") == 3
    assert ended.out.endswith("none of these steps is intact\n")


@pytest.mark.parametrize("name", ["commit.json", "index-n0000.safetensors", "n0000-00.safetensors"])
def test_each_kind_of_file_of_a_step_is_checked_at_its_head(command, run: Path, flip, name: str) -> None:
    flip(run, 30, name, 40)
    ended = command("verify", run, "--json")
    assert (ended.code, ended.json["newest_intact"]) == (4, 20)
    files = [d["file"] for d in ended.json["records"]] + [d["file"] for s in ended.json["steps"] for d in s["damages"]]
    assert [Path(file).name for file in files] == [name]


def test_a_damaged_commit_record_of_the_step_that_was_asked_for_is_damage_too(command, run: Path, flip) -> None:
    flip(run, 30, "commit.json", 40)
    ended = command("verify", f"{run}@30", "--json")
    assert ended.code == 4
    assert ended.json["records"][0]["file"] == "steps/0000000030-a0001/commit.json"


@pytest.mark.parametrize("name", ["holdfast.json", "attempts/0001.json", "pins/good.json", "notes/*.json"])
def test_the_records_of_the_run_are_checked_and_the_steps_still_read(command, run: Path, flip, name: str) -> None:
    holdfast.Run(run).pin(20, "good")
    holdfast.Run(run).note(20, {"accuracy": 1})
    path = flip(run, None, name, 40)
    ended = command("verify", run, "--json")
    assert ended.code == 4
    assert [d["file"] for d in ended.json["records"]] == [str(path.relative_to(run))]
    assert {s["step"] for s in ended.json["steps"] if s["intact"]} == {10, 20, 30}


def test_a_cut_or_missing_data_file_is_damage(command, run: Path, flip) -> None:
    (path,) = (run / "steps" / "0000000030-a0001").glob("n*.safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    assert command("verify", f"{run}@30").code == 4
    path.unlink()
    ended = command("verify", f"{run}@30", "--json")
    assert ended.code == 4
    assert ended.json["steps"][0]["damages"][0]["file"].endswith(path.name)


def test_abandoned_steps_are_read_when_asked_for(command, run: Path, flip) -> None:
    holdfast.Run(run).rollback(20)
    flip(run, 30)
    assert command("verify", run).code == 0
    ended = command("verify", run, "--all", "--json")
    assert ended.code == 4
    newest = ended.json["steps"][0]
    assert (newest["step"], newest["line"], newest["intact"]) == (30, "abandoned", False)
    assert ended.json["newest_intact"] == 20


def test_a_run_without_steps_has_nothing_to_verify(command, run: Path) -> None:
    shutil.rmtree(run / "steps")
    ended = command("verify", run)
    assert ended.code == 3
    assert "nothing is committed" in ended.err


def test_the_files_of_others_are_read_and_said_to_have_no_digests(command, run: Path, tmp_path: Path) -> None:
    holdfast.export(run, tmp_path / "theirs", select="model.*")
    address = f"hf:{tmp_path / 'theirs'}"
    ended = command("verify", address)
    assert ended.code == 0
    assert ended.out.startswith(f"{address}: readable, 1.27 kB; 1.27 kB of it has no digest")


def test_verifying_changes_nothing(command, run: Path) -> None:
    def content() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")}

    before = content()
    command("verify", run)
    assert content() == before
