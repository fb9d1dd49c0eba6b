"""The command line in this process: `command(...)` runs one and gives its exit code and what it printed; runs to try it on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli import main


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed, which must be one JSON object and nothing else."""
        found = json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert isinstance(found, dict)
        return found


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("ls", run)`: what becomes of `holdfast ls RUN`."""

    def run(*words: object) -> Ended:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ended(code, *capsys.readouterr())

    return run


def weights(step: int) -> torch.Tensor:
    return torch.arange(12, dtype=torch.float32).reshape(3, 4) + step


@pytest.fixture(scope="session")
def built_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 10, 20, 30 of a small state in which `frozen` never changes; smaller losses are later."""
    path = tmp_path_factory.mktemp("built") / "run"
    for step in (10, 20, 30):
        model = {"layer.2": weights(step), "layer.10": weights(step).bfloat16(), "frozen": torch.ones(300)}
        state = {"model": model, "progress": {"samples": step * 8, "name": "naïve"}}
        holdfast.save(path, state, step, metrics={"loss": 1 / step})
    return path


@pytest.fixture
def run(built_run: Path, tmp_path: Path) -> Path:
    """A copy of `built_run`, for one test to do with what it likes."""
    return shutil.copytree(built_run, tmp_path / "run")


def step_path(run: Path, step: int) -> Path:
    """The directory of a step."""
    (found,) = (run / "steps").glob(f"{step:010d}-a*")
    return found


@pytest.fixture
def flip() -> Callable[..., Path]:
    """`flip(run, step)` changes one bit of the last byte of a step's data file, or of another file of the run."""

    def change(run: Path, step: int | None = None, name: str = "n*-00.safetensors", at: int = -1) -> Path:
        (path,) = (step_path(run, step) if step is not None else run).glob(name)
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        return path

    return change


@pytest.fixture
def interrupted() -> Callable[[Path, int], Path]:
    """`interrupted(run, step)`: what a save leaves that was killed before it committed, from the step before it."""

    def leave(run: Path, step: int) -> Path:
        newest = max((run / "steps").iterdir())
        left = run / "steps" / f"{step:010d}-a0001"
        shutil.copytree(newest, left)
        (left / "commit.json").unlink()
        return left

    return leave
