"""What the crash tests share: the recordings of all scenarios, made once, and a judge with a place to rebuild in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from .judge import Judge, scratch_place
from .recorder import Recording
from .scenarios import record_all


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    return record_all(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    directory = scratch_place()
    yield Judge(directory)
    shutil.rmtree(directory, ignore_errors=True)
