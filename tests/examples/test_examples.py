"""Each example is a whole program: it runs in a process of its own, and does what its first lines say."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def run_example(name: str, *argv: object) -> str:
    """What it printed; it must succeed."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def latest_step(run: Path) -> int:
    latest = holdfast.Run(run).latest()
    assert latest is not None
    return latest.step


def test_every_example_is_tested_here() -> None:
    tested = set(re.findall(r"""run_example\("(\w+\.py)\"""", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_goes_on_where_it_was_and_ends_as_if_never_stopped(tmp_path: Path) -> None:
    whole = run_example("train.py", tmp_path / "whole", "--steps", 90)
    assert "starting at step 0 of 90" in whole
    run_example("train.py", tmp_path / "parts", "--steps", 50)
    parts = run_example("train.py", tmp_path / "parts", "--steps", 90)
    assert "starting at step 50 of 90" in parts
    assert parts.splitlines()[-1] == whole.splitlines()[-1]
    assert latest_step(tmp_path / "parts") == 90


def test_train_survives_sigkill(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "train.py"), str(run), "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            committed = holdfast.Run(run).wait(after=100, timeout=40).step
            time.sleep(0.3)
        finally:
            process.send_signal(signal.SIGKILL)
    resumed_at = latest_step(run)
    assert resumed_at >= committed
    assert f"starting at step {resumed_at} of" in run_example("train.py", run, "--steps", resumed_at + 1)


def test_lora_begins_with_the_base_and_stores_it_once(tmp_path: Path) -> None:
    told = run_example("lora.py", tmp_path / "run")
    assert "starting at step 0: 12 names filled, 12 waived" in told
    megabytes = [float(size) for size in re.findall(r"([\d.]+) MB written", told)]
    assert len(megabytes) == 4
    assert megabytes[0] > 6
    assert max(megabytes[1:]) < megabytes[0] / 10
    assert "0.bias, 0.lora_a, 0.lora_b, 0.weight" in told
    assert latest_step(tmp_path / "run") == 40


def test_evaluate_scores_new_steps_and_notes_them(tmp_path: Path) -> None:
    told = run_example("evaluate.py", tmp_path / "run")
    scored = [int(step) for step in re.findall(r"^step (\d+): 4 tensors loaded", told, re.MULTILINE)]
    assert scored == sorted(set(scored))
    assert scored[-1] == 60
    assert len(scored) >= 3
    assert "held_out" in holdfast.Run(tmp_path / "run").steps()[-1].metrics
    assert "the best of the steps still there" in told
