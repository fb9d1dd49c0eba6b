"""One saved run for all tests that damage it, and a copy of it for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .wreck import copy_of, make_run


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A run of three steps, and what each holds; never to be changed."""
    path = tmp_path_factory.mktemp("saved") / "run"
    return path, make_run(path)


@pytest.fixture
def fresh(saved: tuple[Path, Any], tmp_path: Path) -> Callable[[], Path]:
    """`fresh()` gives another copy of the run, to be damaged."""
    made: list[Path] = []

    def make() -> Path:
        made.append(copy_of(saved[0], tmp_path / f"run{len(made)}"))
        return made[-1]

    return make


@pytest.fixture
def run(fresh: Callable[[], Path]) -> Path:
    return fresh()
