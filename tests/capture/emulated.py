"""A device that computes and copies late: two queues of work, each with a thread, where a real one has two streams.

Tensors in host memory stand for those of the device; whatever changes them goes through `Device.compute`, as it would on a GPU.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.agent.arena import Bytes
from holdfast.capture import device as devices


class Late:
    """Does one thing after the other, each a little later than it could. Has a thread until `close`."""

    def __init__(self, rng: random.Random, most: float) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._rng, self._most = rng, most
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], Any]) -> None:
        self._work.put(work)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._rng.random() < 0.2:
                time.sleep(self._rng.random() * self._most)
            work()


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self.reached = device, threading.Event()

    def synchronize(self) -> None:
        self._device.host_waits()
        self.reached.wait(60)


class Device:
    """Both queues, and `Streams` of them."""

    def __init__(self, seed: int) -> None:
        self.waits = 0
        """How often the thread that made it has waited for the device."""
        self.pinned: list[Bytes] = []
        self.rooms: list[Bytes] = []
        self._main = threading.current_thread()
        self._computing, self._copying = Late(random.Random(seed), 0.002), Late(random.Random(seed + 1), 0.01)

    def compute(self, work: Callable[[], Any]) -> None:
        """What a kernel does: some time later."""
        self._computing.put(work)

    def add(self, tensor: torch.Tensor, more: float) -> None:
        """Enqueue `tensor += more`; torch counts it as changed at once."""
        torch.autograd.graph.increment_version(tensor)
        self._computing.put(lambda: np.add(array := tensor.detach().numpy(), more, out=array))

    def settle(self) -> None:
        """Return when all that was enqueued is done."""
        for late in (self._computing, self._copying):
            done = threading.Event()
            late.put(done.set)
            assert done.wait(60)

    def host_waits(self) -> None:
        self.waits += threading.current_thread() is self._main

    def close(self) -> None:
        self._computing.close()
        self._copying.close()

    def now(self) -> Event:
        return self._event(self._computing)

    def aside(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        kept, found = list(pieces), torch.full((sum(piece.nbytes for piece in pieces),), 0xEE, dtype=torch.uint8)
        self._computing.put(lambda: torch.cat(list(map(devices.as_bytes, kept)), out=found))
        return found

    def start_behind(self, mark: Event) -> None:
        self._copying.put(mark.reached.wait)

    def room(self, nbytes: int) -> Bytes:
        found = np.full(nbytes, 0xEE, np.uint8)
        self.rooms.append(found)
        return found

    def copy(self, source: torch.Tensor, out: Bytes) -> None:
        self._copying.put(lambda: np.copyto(out, source.numpy()))
        if not any(np.may_share_memory(out, one) for one in (*self.pinned, *self.rooms)):
            self.copied().synchronize()  # a device does not reach such memory by itself

    def read(self, work: Callable[[], None]) -> None:
        self._copying.put(work)
        self.copied().synchronize()

    def copied(self) -> Event:
        return self._event(self._copying)

    def hold_up(self, mark: Event) -> None:
        self._computing.put(mark.reached.wait)

    def differ(self, pairs: Sequence[tuple[torch.Tensor, Bytes]]) -> list[bool]:
        found: list[bool] = []
        self._computing.put(lambda: found.extend(not np.array_equal(live.numpy(), copied) for live, copied in pairs))
        self.now().synchronize()
        return found

    def pin(self, memory: Bytes) -> bool:
        self.pinned.append(memory)
        return True

    def unpin(self, memory: Bytes) -> None:
        self.copied().synchronize()
        self.pinned = [one for one in self.pinned if one is not memory]

    def _event(self, late: Late) -> Event:
        event = Event(self)
        late.put(event.reached.set)
        return event


def install(monkeypatch: pytest.MonkeyPatch, seed: int) -> Device:
    """From now on, all host memory is that of a device."""
    device = Device(seed)
    monkeypatch.setitem(devices.KINDS, "cpu", lambda _: device)
    monkeypatch.setattr(devices, "_made", {})
    return device
