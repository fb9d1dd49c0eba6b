"""Copying in the background that takes a while, so that whatever does not wait for it is early."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from holdfast.tensors import TensorSource

_SECONDS = 0.01


@pytest.fixture
def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor that the thread behind `step` copies takes it so long. Who waits and helps is as fast as ever."""
    copy_into = TensorSource.copy_into

    def slowly(self: TensorSource, start: int, out: np.ndarray) -> None:
        if threading.current_thread().name == "holdfast-capture":
            time.sleep(_SECONDS)
        copy_into(self, start, out)

    monkeypatch.setattr(TensorSource, "copy_into", slowly)
