"""Everything here needs a GPU, and skips itself where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")
