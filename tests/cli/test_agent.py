"""`holdfast agent`: the process that saves, run by hand, asked, flushed and ended."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

import holdfast
from holdfast.agent.client import status_of
from holdfast.agent.place import socket_path

from .conftest import Command

pytestmark = pytest.mark.usefixtures("in_background")


def train(run: Path, steps: int, leave: bool = True) -> holdfast.Checkpointer:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = holdfast.Checkpointer(run, {"model": model, "optimizer": optimizer}, save=holdfast.Every(steps=1), on_full="wait")
    first = ckpt.resume()
    for step in range(first + 1, first + 1 + steps):
        model(torch.randn(3, 64)).sum().backward()
        optimizer.step()
        ckpt.step(step)
    if leave:
        ckpt.close()
    return ckpt


def await_end(pid: int) -> None:
    end = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_where_no_agent_is_that_is_said(command: Command, run: Path) -> None:
    for action in ("status", "flush", "stop"):
        ended = command("agent", action, run)
        assert ended.code == 3
        assert "no agent saves for" in ended.err


def test_an_agent_tells_how_it_is_and_never_loads_torch(command: Command, tmp_path: Path) -> None:
    ckpt = train(tmp_path / "run", 3, leave=False)
    assert command("agent", "flush", tmp_path / "run").code == 0
    told = command("agent", "status", tmp_path / "run", "--json").json
    assert told["committed_saves"] == 3
    assert told["ranks"][0]["is_connected"]
    maps = Path(f"/proc/{told['pid']}/maps").read_text()
    assert "libtorch" not in maps
    assert "holdfast-arena" in maps
    assert told["resident_bytes"] < 80e6, "beyond the arena"
    text = command("agent", "status", tmp_path / "run").out
    assert f"agent {told['pid']} of {tmp_path / 'run'}, attempt 1" in text
    assert "3 committed, 0 left out, 0 failed" in text
    metrics = command("agent", "status", tmp_path / "run", "--prometheus").out
    assert "# TYPE" in metrics
    assert command("agent", "status", tmp_path / "run", "--prometheus", "--json").code == 2
    ckpt.close()
    await_end(told["pid"])
    assert not socket_path(str(tmp_path / "run")).exists()


def test_stop_finishes_and_ends_it(command: Command, tmp_path: Path) -> None:
    ckpt = train(tmp_path / "run", 4, leave=False)
    status = status_of(str(tmp_path / "run"))
    assert status is not None
    ended = command("agent", "stop", tmp_path / "run", "--json")
    assert ended.code == 0
    assert ended.json["done"] is True
    assert [step.step for step in holdfast.Run(tmp_path / "run").steps()][-1] == 4
    await_end(status.pid)
    ckpt.close()


def test_an_agent_that_serves_stays_when_the_job_has_gone(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-m", "holdfast", "agent", "serve", str(run), "--idle", "60s"]
    serving = subprocess.Popen(words)
    try:
        end = time.monotonic() + 20
        while not socket_path(str(run)).exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        for life in (1, 2):
            train(run, 3)
            status = status_of(str(run))
            assert status is not None
            assert status.pid == serving.pid
            assert status.attempt == life
        assert command("agent", "serve", run).code == 6
        assert command("agent", "stop", run).code == 0
        assert serving.wait(20) == 0
    finally:
        serving.kill()
        serving.wait()
    assert holdfast.Run(run).latest().step == 6  # type: ignore[union-attr]
    assert not socket_path(str(run)).exists()
