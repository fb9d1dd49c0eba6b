"""`holdfast doctor`: it tries what saves need, and says what could be recovered."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import checkup, machine, probes

QUICK = ("--quick", "--json")


def by_name(found) -> dict[str, dict]:
    return {finding["name"]: finding for finding in found["findings"]}


def test_a_sound_directory_passes_every_probe(command, tmp_path: Path) -> None:
    ended = command("doctor", tmp_path, "--probe-size", "4MiB", "--json")
    found = by_name(ended.json)
    assert (ended.code, ended.json["healthy"], ended.json["is_run"]) == (0, True, False)
    assert found["create-once"]["status"] == found["fsync"]["status"] == found["speed"]["status"] == "ok"
    assert found["fsync"]["facts"]["median_seconds"] > 0
    assert found["speed"]["facts"]["over_existing_bytes_per_second"] > 0
    assert found["room"]["facts"]["free_bytes"] > 0
    assert {"filesystem", "direct-io", "memory", "limits"} <= set(found)
    assert ended.json["versions"]["holdfast"] == holdfast.__version__
    assert ended.json["versions"]["numpy"]


def test_nothing_of_the_probes_stays(command, run: Path) -> None:
    before = sorted(run.rglob("*"))
    command("doctor", run, "--probe-size", "4MiB")
    assert sorted(run.rglob("*")) == before


def test_of_a_run_it_says_what_could_be_recovered(command, run: Path) -> None:
    ended = command("doctor", run, *QUICK)
    assert (ended.json["newest_intact"], by_name(ended.json)["recovery"]["facts"]["step"]) == (30, 30)
    assert by_name(ended.json)["room"]["facts"]["next_bytes"] == holdfast.Run(run).latest().nbytes
    assert by_name(ended.json)["writer"]["facts"]["pid"] == os.getpid()
    assert by_name(ended.json)["writer"]["facts"]["state"] == "running"


def test_damage_in_the_newest_step_leads_to_the_one_before(command, run: Path, flip) -> None:
    flip(run, 30)
    ended = command("doctor", run, "--probe-size", "4MiB", "--json")
    recovery = by_name(ended.json)["recovery"]
    assert (ended.code, ended.json["newest_intact"], recovery["status"]) == (4, 20, "failed")
    assert recovery["facts"]["damaged"] == [30]
    assert "step 20" in recovery["detail"]


def test_a_quick_look_reads_no_data(command, run: Path, flip) -> None:
    flip(run, 30)
    ended = command("doctor", run, *QUICK)
    assert (ended.code, ended.json["newest_intact"]) == (0, 30)
    assert "speed" not in by_name(ended.json)
    assert "none of its" in by_name(ended.json)["recovery"]["detail"]


def test_damaged_records_are_named(command, run: Path, flip) -> None:
    flip(run, None, "attempts/0001.json", 40)
    ended = command("doctor", run, *QUICK)
    assert ended.code == 4
    assert by_name(ended.json)["records"]["facts"]["file"] == "attempts/0001.json"
    assert "holdfast verify" in by_name(ended.json)["recovery"]["detail"]


def test_what_interrupted_saves_left_is_counted(command, run: Path, interrupted) -> None:
    left = interrupted(run, 40)
    finding = by_name(command("doctor", run, *QUICK).json)["leftovers"]
    assert finding["status"] == "warning"
    assert finding["facts"]["paths"] == [f"steps/{left.name}"]
    assert finding["facts"]["bytes"] == sum(path.stat().st_size for path in left.iterdir())


def test_a_checkpoint_that_does_not_fit_is_exit_code_8(command, run: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkup, "room", lambda path: machine.Room(free_bytes=100, total_bytes=10**9, free_files=5))
    ended = command("doctor", run, *QUICK)
    assert ended.code == 8
    assert "does not fit" in by_name(ended.json)["room"]["detail"]


def test_a_filesystem_without_create_once_is_exit_code_7(command, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(probes, "is_create_once", lambda store: False)
    ended = command("doctor", tmp_path, *QUICK)
    assert (ended.code, ended.json["healthy"]) == (7, False)
    assert "two jobs could both commit" in by_name(ended.json)["create-once"]["detail"]


def test_a_filesystem_without_fsync_is_exit_code_7(command, tmp_path: Path, monkeypatch) -> None:
    def broken(store: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(probes, "fsync_latency", broken)
    ended = command("doctor", tmp_path, *QUICK)
    assert ended.code == 7
    assert by_name(ended.json)["fsync"]["status"] == "failed"


def test_a_filesystem_without_direct_io_is_a_warning(command, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(probes, "has_direct_io", lambda store: False)
    ended = command("doctor", tmp_path, *QUICK)
    assert ended.code == 0
    assert by_name(ended.json)["direct-io"]["status"] == "warning"


def test_memory_as_a_filesystem_is_a_warning(command) -> None:
    if machine.filesystem("/dev/shm").kind != "tmpfs":
        pytest.skip("no tmpfs here")
    assert by_name(command("doctor", "/dev/shm", *QUICK).json)["filesystem"]["status"] == "warning"


def test_a_directory_that_cannot_be_written_is_exit_code_7(command, tmp_path: Path, monkeypatch) -> None:
    def refuse(**options: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(probes.tempfile, "TemporaryDirectory", refuse)
    ended = command("doctor", tmp_path, *QUICK)
    assert ended.code == 7
    assert by_name(ended.json)["write"]["status"] == "failed"


@pytest.mark.parametrize(("path", "code"), [("{tmp}/nowhere", 7), ("{tmp}/file", 7), ("{tmp}@3", 2), ("s3://bucket/run", 2)])
def test_what_is_no_directory_is_said_to_be_none(command, tmp_path: Path, path: str, code: int) -> None:
    (tmp_path / "file").touch()
    ended = command("doctor", path.format(tmp=tmp_path))
    assert (ended.code, ended.out) == (code, "")
    assert "directory" in ended.err


def test_the_table_has_a_line_for_each_finding(command, run: Path) -> None:
    lines = command("doctor", run, "--quick").out.splitlines()
    assert lines[0] == f"{run}: a run"
    assert any(line.startswith("create-once  ok") for line in lines)
    assert lines[-1].startswith("versions: ")
