"""What is loaded onto a device arrives whole, though the device fetches it late and the memory it fetches from is used again."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import bit_differences, build_awkward_state
from ranks import pool

import holdfast
from holdfast.loading import landing
from holdfast.loading.reading import Bytes


class Device:
    """Fetches what it is given a little later, in a thread; host memory stands for its own."""

    def __init__(self) -> None:
        self.fetched = 0
        self._rooms: set[int] = set()
        self._rng = random.Random(7)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def room(self, nbytes: int) -> Bytes:
        found = np.empty(nbytes, np.uint8)
        self._rooms.add(found.ctypes.data)
        return found

    def put(self, copy: Callable[[], None], raw: Bytes) -> None:
        def fetch() -> None:
            if self._rng.random() < 0.1:
                time.sleep(self._rng.random() * 0.005)
            copy()
            self.fetched += len(raw)
            if raw.ctypes.data in self._rooms:
                raw[:] = 0xEE  # whoever has it next

        self._work.put(fetch)

    def settle(self) -> None:
        done = threading.Event()
        self._work.put(done.set)
        assert done.wait(60)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setitem(landing.KINDS, "cpu", lambda _: made)
    yield made
    made.close()


def awkward(seed: int) -> dict[str, Any]:
    model, optimizer, extras = build_awkward_state(seed=seed, large=True)
    del extras["tensors"]["expanded"]  # can be saved, not filled
    return {"model": model, "optimizer": optimizer, "extras": extras}


@pytest.mark.parametrize("coding", ["raw", "zstd"])
def test_all_bits_arrive(tmp_path: Path, device: Device, coding: str) -> None:
    state, other = awkward(1), awkward(2)
    with holdfast.Checkpointer(tmp_path, state, save=holdfast.Every(steps=1), coding=coding) as ckpt:
        ckpt.resume()
        ckpt.step(1)
    for _ in range(3):
        holdfast.restore(tmp_path, other)
        assert bit_differences(state, other) == []
        other = awkward(3)
    assert device.fetched > 3 * 64 << 20


def load_late(run: str) -> list[str]:
    device = Device()
    landing.KINDS["cpu"] = lambda _: device
    try:
        state = awkward(4)
        holdfast.restore(run, state)
        assert device.fetched > 64 << 20
        return bit_differences(awkward(1), state)
    finally:
        del landing.KINDS["cpu"]
        device.close()


def test_all_bits_arrive_on_ranks_that_read_for_each_other(tmp_path: Path) -> None:
    holdfast.save(tmp_path, awkward(1), 1)
    assert pool(2).run(load_late, str(tmp_path)) == [[], []]
