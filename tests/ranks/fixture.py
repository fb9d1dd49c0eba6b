"""The end of the pools, for a conftest to import: `from ranks.fixture import no_ranks_left  # noqa: F401`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .pools import close_all


@pytest.fixture(scope="session", autouse=True)
def no_ranks_left() -> Iterator[None]:
    yield
    close_all()
