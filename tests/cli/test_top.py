"""`holdfast top`: a run at a glance, from its agent where one answers, else from its records."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import Unavailable
from holdfast.cli import top
from holdfast.cli.glance import Table, blocks, glance
from holdfast.cli.place import find_run
from holdfast.run.status import ErrorStatus, RankStatus, SaveStatus, Status
from holdfast.run.timings import keep_times
from holdfast.store.locate import open_store

from .times import BEGAN, INTERVAL, save_times

NOW = BEGAN + 10 * INTERVAL

STATUS = Status(
    pid=41, version="1", node="node-a", attempt=1, uptime_seconds=3600, resident_bytes=10**8, arena_bytes=3 * 10**9,
    memory_budget_bytes=4 * 10**9, versions_held=2, ranks=(RankStatus(0, 7, True, 300, 1.25), RankStatus(1, 8, False)),
    saves=(SaveStatus(1000, "writing", 25, 100, NOW - 3), SaveStatus(1100, "filling")), committed_step=900, committed_saves=9,
    written_bytes=10**9, phase_seconds={"write": 9.5}, errors=(ErrorStatus(BEGAN, "no\x1b[2J room\n<left>"),),
)  # fmt: skip


@pytest.fixture
def timed(run: Path) -> Path:
    """The run with records of nine saves, the eighth of which failed."""
    for number in range(1, 10):
        fields = {"outcome": "failed", "reason": "disk\x1b[2J\ngone", "new_bytes": 0} if number == 8 else {}
        keep_times(open_store(run), save_times(number, **fields))
    return run


def shown(run: Path, status: Status | None = None) -> str:
    """What a glance says, as text."""
    lines = []
    for block in blocks(glance(find_run(str(run)), lambda url: status, NOW)):
        lines += [" | ".join(row) for row in (block.titles, *block.rows)] if isinstance(block, Table) else [block]
    return "\n".join(lines)


# --- from records -----------------------------------------------------------------------------------------------------


def test_without_an_agent_the_records_tell_what_they_can(command, timed: Path) -> None:
    ended = command("top", timed, "--once")
    lines = ended.out.splitlines()
    assert (ended.code, ended.err) == (0, "")
    assert lines[0].startswith(f"{timed}: step 30 (")
    assert f"process {os.getpid()} on " in lines[1]
    assert lines[2] == "agent: none; this is from the records"
    rows = [line.split() for line in lines if re.match(r" *\d", line)]
    assert [(row[0], row[1]) for row in rows[:3]] == [("900", "committed"), ("800", "failed"), ("700", "committed")]
    assert "571 MB/s" in lines[5]
    assert "write 1 s" in lines[5]


def test_a_run_without_records_shows_its_last_steps(command, run: Path) -> None:
    out = command("top", run, "--once").out
    assert [line.split()[0] for line in out.splitlines() if re.match(r" *\d", line)] == ["30", "20", "10"]


def test_a_run_without_steps_is_shown(command, tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": 1}, 1)
    (commit,) = (tmp_path / "run" / "steps").glob("*/commit.json")
    commit.unlink()
    assert command("top", tmp_path / "run", "--once").out.startswith(f"{tmp_path / 'run'}: nothing is committed\n")


def test_nothing_that_a_reason_holds_moves_the_cursor(command, timed: Path) -> None:
    out = command("top", timed, "--once").out
    assert "\x1b" not in out
    assert "disk [2J gone" in out


def test_json_has_the_same(command, timed: Path) -> None:
    found = command("top", timed, "--json").json
    assert (found["agent"], found["silence"]) == (None, "")
    assert [step["step"] for step in found["steps"]] == [10, 20, 30]
    assert [(save["step"], save["outcome"]) for save in found["saves"]][-2:] == [(800, "failed"), (900, "committed")]
    assert found["saves"][-1]["phase_seconds"]["write"] == pytest.approx(1)
    assert found["writer"]["pid"] == os.getpid()


def test_only_the_newest_saves_are_read_and_shown(command, run: Path) -> None:
    for number in range(1, 101):
        keep_times(open_store(run), save_times(number))
    steps = [save["step"] for save in command("top", run, "--json").json["saves"]]
    assert steps == [100 * n for n in range(89, 101)]


def test_without_a_terminal_it_looks_once(command, timed: Path) -> None:
    assert command("top", timed).code == 0


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "1e9"])
def test_an_interval_is_some_seconds(command, timed: Path, interval: str) -> None:
    ended = command("top", timed, "--interval", interval)
    assert (ended.code, ended.out) == (2, "")


def test_where_there_is_no_run_it_says_so(command, tmp_path: Path) -> None:
    assert command("top", tmp_path, "--once").code == 3


def test_it_is_of_a_run_not_of_a_step(command, run: Path) -> None:
    assert command("top", f"{run}@20").code == 2


# --- from an agent ----------------------------------------------------------------------------------------------------


def test_an_agent_says_what_it_does(timed: Path) -> None:
    text = shown(timed, STATUS)
    assert "agent: process 41 on node-a, up 60 min; 100 MB and an arena of 3 GB of 4 GB, 2 versions held" in text
    assert "since then: 9 committed, 0 skipped, 0 failed; 1 GB written" in text
    assert "time: write 9.5 s" in text
    assert "no [2J room <left>" in text
    assert "1000 | writing | 25% | 100 B | 3 s" in text
    assert "1100 | filling | - | 0 B | -" in text
    assert "0 | 7 | yes | 300 | 1.25 s" in text
    assert "1 | 8 | no | - | 0 s" in text
    assert "900 | committed" in text


def test_of_very_many_ranks_some_are_shown_and_the_rest_are_counted(timed: Path) -> None:
    text = shown(timed, Status(pid=1, ranks=tuple(RankStatus(n) for n in range(100))))
    assert "\n31 | " in text
    assert "\n32 | " not in text
    assert "and 68 ranks more" in text


def test_an_agent_that_does_not_answer_is_named_with_the_reason(command, timed: Path, monkeypatch) -> None:
    def refuse(url: str) -> None:
        raise Unavailable("its socket is closed")

    monkeypatch.setattr(top, "_agent_of", lambda: refuse)
    assert "agent: does not answer: its socket is closed" in command("top", timed, "--once").out
    assert command("top", timed, "--json").json["silence"] == "its socket is closed"


def test_the_agent_is_asked_by_the_url_of_the_run(command, timed: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(top, "_agent_of", lambda: lambda url: asked.append(url) or STATUS)
    assert command("top", timed, "--json").json["agent"]["committed_step"] == 900
    assert asked == [str(timed)]


# --- live -------------------------------------------------------------------------------------------------------------


def test_on_a_terminal_it_goes_on_until_it_is_interrupted(timed: Path) -> None:
    """It shows a save that ends while it runs, and survives a moment in which the run cannot be read."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "140", "LINES": "60"}
    words = [sys.executable, "-m", "holdfast", "top", str(timed), "--interval", "0.1"]
    process = subprocess.Popen(words, stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    try:
        seen = until(ours, "900")
        keep_times(open_store(timed), save_times(77))
        seen += until(ours, "7700")
        (timed / "attempts" / "0002.json").write_text("half of a rec")
        seen += until(ours, "the last look failed")
        (timed / "attempts" / "0002.json").unlink()
        keep_times(open_store(timed), save_times(78))
        seen += until(ours, "7800")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert (process.returncode, err) == (0, b"")
    assert "Traceback" not in seen


def until(terminal: int, words: str) -> str:
    """What a terminal shows until it has shown `words`."""
    seen, deadline = "", time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < deadline, f"{words!r} never came: {seen[-2000:]}"
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 1 << 16).decode("utf-8", "replace")
    return seen
