"""Loading onto a device: each reading thread has a stream, in which the device fetches what was read while more is read.

A kind of device is an entry of KINDS; what is not one of them is written to by the host.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from .reading import Bytes

_LEAST_BYTES = 64 << 10
"""What is smaller is not worth memory that the device reaches by itself."""
_MOST_BYTES = 32 << 20
"""Of one thread that the device has not fetched yet; then the thread waits."""


class Landing(Protocol):
    """How bytes come onto one device."""

    def room(self, nbytes: int) -> Bytes:
        """Host memory that the device fetches from by itself."""
        ...

    def put(self, copy: Callable[[], None], raw: Bytes) -> None:
        """Enqueue what `copy` does, which reads `raw` and writes tensors of the device."""
        ...

    def settle(self) -> None:
        """Return when the device has done all that it was given, by whomever."""
        ...


class Cuda:
    """A CUDA device, or a ROCm one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_thread = threading.local()
        self._under_way: list[deque[tuple[Any, Bytes]]] = []
        """Of all threads: what the device may still have to fetch outlives the thread that has read it."""

    def room(self, nbytes: int) -> Bytes:
        found: Bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return found

    def put(self, copy: Callable[[], None], raw: Bytes) -> None:
        stream, under_way = self._mine()
        with torch.cuda.device(self._device), torch.cuda.stream(stream):  # a stream's context alone goes back to device 0
            copy()
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        under_way.append((event, raw))
        while under_way and (sum(len(one) for _, one in under_way) > _MOST_BYTES or under_way[0][0].query()):
            under_way.popleft()[0].synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def _mine(self) -> tuple[torch.cuda.Stream, deque[tuple[Any, Bytes]]]:
        """This thread's stream, and what of its memory the device may still have to fetch."""
        mine = self._of_thread
        if not hasattr(mine, "stream"):
            mine.stream, mine.under_way = torch.cuda.Stream(self._device), deque()  # type: ignore[no-untyped-call]
            self._under_way.append(mine.under_way)
        return mine.stream, mine.under_way


KINDS: dict[str, Callable[[torch.device], Landing]] = {"cuda": Cuda}


class Landings:
    """The devices of one load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[torch.device, Landing] = {}

    def of(self, tensor: torch.Tensor) -> Landing | None:
        """Where a tensor's bytes land; None for host memory."""
        if tensor.device.type not in KINDS:
            return None
        with self._lock:
            if tensor.device not in self._made:
                self._made[tensor.device] = KINDS[tensor.device.type](tensor.device)
            return self._made[tensor.device]

    def room(self, tensor: torch.Tensor, nbytes: int) -> Bytes:
        """Memory for bytes that are read for a tensor."""
        landing = self.of(tensor) if nbytes >= _LEAST_BYTES else None
        return np.empty(nbytes, np.uint8) if landing is None else landing.room(nbytes)

    def put(self, tensor: torch.Tensor, copy: Callable[[], None], raw: Bytes) -> None:
        """Do what copies `raw` into a tensor, now or, on its device, soon."""
        landing = self.of(tensor)
        if landing is None:
            copy()
        else:
            landing.put(copy, raw)

    def settle(self) -> None:
        """Return when all has landed."""
        for landing in list(self._made.values()):
            landing.settle()
