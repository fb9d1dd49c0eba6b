"""How the ranks of a node tell each other how far they have come: a socket between each two of them.

What lies in shared memory is told of by a message through the kernel, not by a flag beside it. A message is received after
it was sent on every CPU, strongly ordered or not, and so is all that its sender wrote before; whoever waits sleeps; and a
process that dies closes its sockets, so that the others know of it at once, and by name.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import Deadline, HoldfastError, Unavailable
from ..format.records import Process
from ..run.identity import is_gone
from ..run.team import Call, error_of

_FAILED, _ENDED = "failed", "ended"
_LONGEST_MESSAGE = 64 << 10
_LONGEST_TEXT = 8 << 10
_LOOK_SECONDS = 1.0
"""How often a rank that waits looks whether the others live: a child that they forked may keep their sockets open."""


class Links:
    """The links of one rank to the others of its node. What is posted under a topic is a count that only grows.

    Args:
        call: under which they met; it has the deadline. ends: the sockets, by rank. processes: by rank.
        hear: called with (rank, topic, data) in a thread of its own, for messages that carry data.
    """

    def __init__(
        self,
        call: Call,
        ends: Mapping[int, socket.socket],
        processes: Mapping[int, Process],
        hear: Callable[[int, str, Any], None] = lambda rank, topic, data: None,
    ) -> None:
        self._call, self._ends, self._processes = call, dict(ends), dict(processes)
        self.hear = hear
        self._lock = threading.Lock()
        self._changed: dict[str, threading.Condition] = defaultdict(lambda: threading.Condition(self._lock))
        """By topic: a post wakes only those that wait for it."""
        self._sending = threading.Lock()
        self._counts: dict[str, dict[int, int]] = defaultdict(dict)
        self._error: list[str] | None = None
        """As a message carries it: an error raised in several threads would keep what their frames hold."""
        self._has_told = False
        self._has_ended: set[int] = set()
        self._is_closed = False
        self._wake, wakened = socket.socketpair()
        self._listener = threading.Thread(target=self._listen, args=(wakened,), name="holdfast-links", daemon=True)
        self._listener.start()

    def post(self, topic: str, count: int, data: Any = None) -> None:
        """Tell all the others. What was written to shared memory before is seen by whoever has waited for the count."""
        message = msgspec.msgpack.encode([topic, count, data])
        with self._sending:
            for end in self._ends.values():
                with contextlib.suppress(OSError):  # who is gone is noticed by whoever waits
                    end.send(message)
        self.post_here(topic, count)

    def post_here(self, topic: str, count: int) -> None:
        """Tell the other threads of this process only."""
        with self._lock:
            if count > self._counts[topic].get(self._call.team.rank, 0):
                self._counts[topic][self._call.team.rank] = count
                self._changed[topic].notify_all()

    def wait_here(self, topic: str, count: int, doing: str) -> None:
        """Wait until a thread of this process has posted at least `count`; raises as `wait` does."""
        self.wait(topic, count, doing, (self._call.team.rank,))

    def wait(self, topic: str, count: int, doing: str, ranks: Sequence[int] | None = None) -> None:
        """Wait until all ranks have posted at least `count`, or some of them.

        Args:
            doing: what for, for the error.
        Raises:
            What another rank, or another thread of this one, has failed with.  Unavailable: a rank died.  Deadline: naming ranks.
        """
        ranks = self._call.team.ranks if ranks is None else ranks
        looked = time.monotonic()
        with self._lock:
            while True:
                self.check()
                counts = self._counts[topic]
                missing = [rank for rank in ranks if counts.get(rank, 0) < count]
                if not missing:
                    return
                if left := self._has_ended.intersection(missing):  # who failed has said so before it left
                    raise Unavailable(f"{self._call.name}: rank {min(left)} has left the load; others still wait for it {doing}")
                if not self._call.left:
                    names = ", ".join(f"rank {rank} (process {self._processes[rank].pid})" for rank in missing)
                    seconds = time.monotonic() - self._call.start
                    raise Deadline(f"{self._call.name}: waited {seconds:.1f} s for {names} {doing}")
                self._changed[topic].wait(min(self._call.left, _LOOK_SECONDS))
                if time.monotonic() - looked >= _LOOK_SECONDS:
                    looked = time.monotonic()
                    for rank in missing:
                        if rank in self._ends and is_gone(self._processes[rank]):
                            self._lost(rank)

    def check(self) -> None:
        """Raise what any rank of the node has failed with."""
        if self._error is not None:
            raise error_of(self._error)

    def fail(self, error: BaseException) -> None:
        """Have every wait of all ranks end with this error, in this process too. Never raises."""
        text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
        if not text.startswith("rank "):
            text = f"rank {self._call.team.rank}: {text}"
        said = [type(error).__name__, text[:_LONGEST_TEXT]]
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
            self._failed(said)
        self.post(_FAILED, 1, said)

    def close(self) -> None:
        """Leave. The others take it for the end of this rank's part if it was posted as such, else for its death."""
        if self._is_closed:
            return
        self._is_closed = True
        self.post(_ENDED, 1)
        self._wake.close()
        self._listener.join()
        for end in self._ends.values():
            end.close()

    def _listen(self, wakened: socket.socket) -> None:
        with selectors.DefaultSelector() as selector, wakened:
            selector.register(wakened, selectors.EVENT_READ)
            for rank, end in self._ends.items():
                selector.register(end, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    if not self._receive(key.data):
                        selector.unregister(key.fileobj)

    def _receive(self, rank: int) -> bool:
        """Take one message; returns whether more may come."""
        message = self._next_of(rank)
        with self._lock:
            if not message:
                if rank not in self._has_ended:
                    self._lost(rank)
                return False
            topic, count, data = msgspec.msgpack.decode(message)
            if topic == _ENDED:
                self._has_ended.add(rank)
                self._wake_all()
            elif topic == _FAILED:
                self._failed(data)
            elif data is not None:
                self.hear(rank, topic, data)
            self._counts[topic][rank] = max(count, self._counts[topic].get(rank, 0))
            self._changed[topic].notify_all()
        return True

    def _next_of(self, rank: int) -> bytes:
        """The next message of a rank; empty if none comes any more."""
        end = self._ends[rank]
        try:
            try:
                return end.recv(_LONGEST_MESSAGE)
            except ConnectionResetError:  # it left with something of ours unread; what it said before is still there
                return end.recv(_LONGEST_MESSAGE)
        except OSError:
            return b""

    def _lost(self, rank: int) -> None:
        pid, seconds = self._processes[rank].pid, time.monotonic() - self._call.start
        when = f"{seconds:.1f} s after {self._call.name} began"
        text = f"rank {rank} (process {pid}) died {when}, while the ranks of its node were reading for each other"
        self._failed([Unavailable.__name__, text])

    def _failed(self, said: list[str]) -> None:
        self._error = self._error or said
        self._wake_all()

    def _wake_all(self) -> None:
        for changed in self._changed.values():
            changed.notify_all()


class Listening:
    """A socket that waits for the ranks of the node to connect; its name is in no directory."""

    def __init__(self, others: int) -> None:
        self.name, self.secret = secrets.token_hex(16), secrets.token_bytes(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0holdfast-{self.name}")
        self._socket.listen(max(1, others))

    def accept(self, ranks: Sequence[int], left: Callable[[], float]) -> dict[int, socket.socket]:
        """The connections of these ranks, all of which have connected already."""
        found: dict[int, socket.socket] = {}
        while missing := set(ranks) - found.keys():
            self._socket.settimeout(max(left(), 0.001))
            try:
                end, _ = self._socket.accept()
                end.settimeout(max(left(), 0.001))
                rank = _greeted(end, self.secret)
            except TimeoutError:
                raise Deadline(f"waited for the connection of ranks {sorted(missing)} of this node") from None
            if rank in missing:
                found[rank] = end
            else:
                end.close()
        return found

    def close(self) -> None:
        self._socket.close()


def connect(name: str, secret: bytes, rank: int, left: float) -> socket.socket:
    """Connect to a rank that listens.

    Raises:
        OSError: it cannot be reached from here.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        end.settimeout(max(left, 0.001))
        end.connect(f"\0holdfast-{name}")
        end.send(secret + struct.pack("<q", rank))
    except BaseException:
        end.close()
        raise
    return end


def _greeted(end: socket.socket, secret: bytes) -> int:
    """The rank that has connected; -1 for a stranger."""
    _, uid, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    greeting = end.recv(len(secret) + 8) if uid == os.getuid() else b""
    if len(greeting) != len(secret) + 8 or not secrets.compare_digest(greeting[:-8], secret):
        return -1
    return int(struct.unpack("<q", greeting[-8:])[0])
