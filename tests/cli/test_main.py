"""What all commands share: exit codes, one line for an error, JSON alone on standard output, a quick start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import errors
from holdfast.cli import app, ls

ALL = [
    ["ls", "{run}"],
    ["inspect", "{run}"],
    ["inspect", "{run}", "model.frozen"],
    ["verify", "{run}"],
    ["diff", "{run}", "{run}"],
    ["export", "{run}", "{tmp}/out"],
    ["cp", "{run}", "{tmp}/copy"],
    ["rollback", "{run}@20"],
    ["pin", "{run}"],
    ["prune", "{run}"],
    ["doctor", "{run}", "--quick"],
    ["report", "{run}"],
    ["top", "{run}"],
]


def python(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(words).replace("{run}", "RUN"))
def test_every_command_prints_one_json_object_and_nothing_else(command, run: Path, tmp_path: Path, words) -> None:
    ended = command(*(word.format(run=run, tmp=tmp_path) for word in words), "--json")
    assert (ended.code, ended.err) == (0, "")
    assert ended.json


def test_every_command_is_tried_here_or_in_its_own_tests() -> None:
    assert {words[0] for words in ALL} | {"demo", "agent"} == set(app.COMMANDS)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_has_help(command, name: str) -> None:
    ended = command(name, "--help")
    assert ended.code == 0
    assert "--json" in ended.out
    assert f"Usage: holdfast {name}" in ended.out


def test_help_names_all_commands_and_exit_codes(command) -> None:
    out = command("--help").out
    assert all(f"\n  {name} " in out for name in app.COMMANDS)
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 130):
        assert str(code) in out


def test_the_version_is_printed(command) -> None:
    assert command("--version").out == f"holdfast {holdfast.__version__}\n"


@pytest.mark.parametrize(
    "words", [["lss"], ["ls"], ["ls", "a", "b"], ["ls", "--nope", "a"], ["inspect", "a", "--depth", "0"], ["ls", "x:y"]]
)
def test_a_misuse_is_one_line_and_exit_code_2(command, words) -> None:
    ended = command(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("holdfast: ")
    assert ended.err.count("\n") == 1


def test_without_a_command_the_help_is_shown(command) -> None:
    ended = command()
    assert ended.code == 2
    assert "\n  verify " in ended.out


ERRORS = [
    (errors.HoldfastError, 1),
    (errors.Unsupported, 2),
    (errors.NoCheckpoint, 3),
    (errors.Corrupt, 4),
    (errors.Mismatch, 5),
    (errors.Refused, 6),
    (errors.Superseded, 6),
    (errors.Unavailable, 7),
    (errors.Deadline, 7),
    (errors.NoSpace, 8),
    (KeyboardInterrupt, 130),
    (ValueError, 1),
    (lambda why: OSError(28, why), 8),
    (lambda why: PermissionError(13, why, "there"), 7),
]


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_each_error_has_its_exit_code_and_is_one_line(command, run: Path, monkeypatch, error, code) -> None:
    def fail(place: object, all_lines: bool) -> None:
        raise error("it went wrong")

    monkeypatch.setattr(ls, "look", fail)
    ended = command("ls", run)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("holdfast: ")
    assert ended.err.count("\n") == 1


def test_a_traceback_is_shown_on_request_only(command, run: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOLDFAST_DEBUG", "1")
    ended = command("ls", f"{run}@11")
    assert ended.code == 3
    assert "Traceback" in ended.err
    monkeypatch.setenv("HOLDFAST_DEBUG", "0")
    assert "Traceback" not in command("ls", f"{run}@11").err


def test_tables_and_progress_are_drawn_on_a_terminal(command, run: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    ended = command("ls", run)
    assert "lineage" in ended.out
    assert "loss=0.05" in ended.out
    assert command("verify", run).code == 0
    assert command("diff", f"{run}@10", f"{run}@20").code == 5
    assert command("verify", run, "--json").json["intact"]


@pytest.mark.parametrize(
    ("words", "code"),
    [(["ls", "{run}"], 0), (["ls"], 2), (["verify", "{run}"], 4)],
)
def test_the_process_ends_with_the_exit_code(run: Path, flip, words, code) -> None:
    flip(run, 30)
    done = python("-m", "holdfast", *(word.format(run=run) for word in words))
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_it_with_130_and_one_line(run: Path) -> None:
    code = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in its background with it ignored
from holdfast.cli import ls, main
ls.find_run = lambda address: (print("ready", flush=True), time.sleep(60))
sys.exit(main(["ls", "x"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "holdfast: interrupted\n")


def test_a_reader_that_goes_away_is_no_error_to_tell_of(run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "holdfast", "inspect", str(run)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def loaded_by(names: set[str], *commands: list[str]) -> list[str]:
    """Which of these modules a process has loaded after it ran these commands, one after the other."""
    code = f"""
import sys
from holdfast.cli import main
codes = [main(words) for words in {list(commands)!r}]
assert set(codes) <= {{0, 5}}, codes
print("loaded", *sorted({names!r} & set(sys.modules)))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


HEAVY = {"torch", "numpy", "rich", "pydantic"}


def test_ls_loads_neither_torch_nor_numpy_nor_what_draws_tables(run: Path) -> None:
    assert loaded_by(HEAVY, ["ls", str(run)], ["ls", str(run), "--json"], ["pin", str(run)]) == []


def test_inspect_loads_numpy_alone(run: Path) -> None:
    assert loaded_by(HEAVY, ["inspect", str(run)], ["inspect", str(run), "model.layer.10"]) == ["numpy"]


def test_no_command_loads_torch_but_the_demo_and_exports_that_convert(run: Path, tmp_path: Path) -> None:
    commands = [
        ["verify", f"{run}"],
        ["diff", f"{run}@10", f"{run}@20"],
        ["cp", f"{run}", f"{tmp_path}/copy"],
        ["pin", f"{run}@10", "name"],
        ["prune", f"{run}", "--last", "2"],
        ["doctor", f"{run}", "--quick"],
        ["report", f"{run}", "-o", f"{tmp_path}/page.html", "--trace", f"{tmp_path}/trace.json"],
        ["top", f"{run}", "--once"],
        ["rollback", f"{run}@20"],
        ["export", f"{run}", f"{tmp_path}/out"],
    ]
    assert loaded_by({"torch", "rich"}, *commands) == []
