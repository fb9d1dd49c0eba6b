"""One thread for the small tensors here: on a busy machine more of them only wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from ranks.fixture import no_ranks_left  # noqa: F401


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
