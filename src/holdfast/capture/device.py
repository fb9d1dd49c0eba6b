"""Copies out of a device's memory: enqueued behind what computes, on a stream of their own; only the device waits for them.

A kind of device is an entry of KINDS. What torch calls a stream is a queue of work on the device, and an event a mark in it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..agent.arena import Arena, Bytes
from ..tensors import as_flat

log = logging.getLogger("holdfast")
_PORTABLE = 1
_COMPARED_BYTES = 64 << 20


class Mark(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Return when the device has got there; this thread waits."""
        ...


class Streams(Protocol):
    """One device: the stream in which the calling thread computes, and one that copies beside it. Other tensors than those that
    are set aside are 1-D, of bytes."""

    def now(self) -> Mark:
        """A mark behind all that the computing stream was given."""
        ...

    def aside(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The bytes of some tensors, row-major, one tensor after the other, in device memory of their own, as they are at this
        place of the computing stream."""
        ...

    def start_behind(self, mark: Mark) -> None:
        """Have the copying stream wait for a mark."""
        ...

    def room(self, nbytes: int) -> Bytes:
        """Host memory that the device reaches by itself."""
        ...

    def copy(self, source: torch.Tensor, out: Bytes) -> None:
        """Enqueue a copy into host memory; returns at once where the device reaches that by itself."""
        ...

    def read(self, work: Callable[[], None]) -> None:
        """Do what reads tensors of the device, in the copying stream; it is done on return."""
        ...

    def copied(self) -> Mark:
        """A mark behind all copies so far."""
        ...

    def hold_up(self, mark: Mark) -> None:
        """Have the computing stream wait for a mark; this thread does not."""
        ...

    def differ(self, pairs: Sequence[tuple[torch.Tensor, Bytes]]) -> list[bool]:
        """Whether tensors differ from host memory, at this place of the computing stream; this thread waits."""
        ...

    def pin(self, memory: Bytes) -> bool:
        """Have the device reach host memory by itself; returns whether it can."""
        ...

    def unpin(self, memory: Bytes) -> None:
        """Undo `pin`, when all copies into it have ended."""
        ...


class Cuda:
    """A CUDA device, or a ROCm one, which torch calls so, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def now(self) -> Mark:
        return self._mark(torch.cuda.current_stream(self._device))

    def aside(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        found = torch.cat([as_bytes(piece) for piece in pieces])
        found.record_stream(self._copies)
        return found

    def start_behind(self, mark: Any) -> None:
        self._copies.wait_event(mark)

    def room(self, nbytes: int) -> Bytes:
        found: Bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        return found

    def copy(self, source: torch.Tensor, out: Bytes) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._copies):  # in this order: see `read`
            torch.from_numpy(out).copy_(source, non_blocking=True)

    def read(self, work: Callable[[], None]) -> None:
        # a stream's context alone would go back to device 0 in a thread that has used none, and take memory there
        with torch.cuda.device(self._device), torch.cuda.stream(self._copies):
            work()
        self._copies.synchronize()

    def copied(self) -> Mark:
        return self._mark(self._copies)

    def hold_up(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def differ(self, pairs: Sequence[tuple[torch.Tensor, Bytes]]) -> list[bool]:
        flags = []
        for live, copied in pairs:
            found = torch.zeros((), dtype=torch.bool, device=self._device)
            for start in range(0, len(live), _COMPARED_BYTES):
                part = torch.from_numpy(copied[start : start + _COMPARED_BYTES]).to(self._device, non_blocking=True)
                found |= (part != live[start : start + _COMPARED_BYTES]).any()
            flags.append(found)
        return torch.stack(flags).tolist() if flags else []

    def pin(self, memory: Bytes) -> bool:
        with torch.cuda.device(self._device):
            return int(_runtime().cudaHostRegister(memory.ctypes.data, len(memory), _PORTABLE)) == 0

    def unpin(self, memory: Bytes) -> None:
        self._copies.synchronize()
        with torch.cuda.device(self._device):
            _runtime().cudaHostUnregister(memory.ctypes.data)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits leaves its core to others
        event.record(stream)
        return event


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


KINDS: dict[str, Callable[[torch.device], Streams]] = {"cuda": Cuda}
_made: dict[torch.device, Streams] = {}
_making = threading.Lock()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The row-major bytes of a tensor; a copy where they do not lie so."""
    if tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.is_contiguous():
        return tensor
    return as_flat(tensor.resolve_conj().resolve_neg().contiguous()).view(torch.uint8)


def device_of(tensor: torch.Tensor | None) -> torch.device | None:
    """The device whose streams copy a tensor; None for what lies in host memory, or where only the host can copy."""
    return tensor.device if tensor is not None and tensor.device.type in KINDS else None


def streams_of(device: torch.device) -> Streams:
    """The streams of a device, the same ones each time."""
    with _making:
        if device not in _made:
            _made[device] = KINDS[device.type](device)
        return _made[device]


class Pins:
    """Slots of an arena that a device reaches by itself, which makes copies into them twice as fast and asynchronous."""

    def __init__(self) -> None:
        self._pinned: list[tuple[Streams, Bytes]] = []
        self._arena: Arena | None = None
        self._slots: set[int] = set()

    def take(self, arena: Arena, slot: int, devices: Sequence[torch.device]) -> None:
        """Pin a slot, once, for the process; nothing is lost where that fails."""
        if not devices or not arena.slot_bytes or (arena is self._arena and slot in self._slots):
            return
        if arena is not self._arena:
            self.drop()
            self._arena = arena
        self._slots.add(slot)
        streams, memory = streams_of(devices[0]), arena.slot(slot)
        if streams.pin(memory):
            self._pinned.append((streams, memory))
        else:
            log.warning("%d MiB of snapshots could not be pinned: copies from %s are slower", len(memory) >> 20, devices[0])

    def drop(self) -> None:
        """Unpin everything, before the memory goes. Nothing more may be enqueued into it."""
        pinned, self._pinned, self._arena, self._slots = self._pinned, [], None, set()
        for streams in list(_made.values()) if pinned else ():  # all devices copy into it, whichever pinned it
            streams.copied().synchronize()
        for streams, memory in pinned:
            streams.unpin(memory)
