"""Lines between nodes that need the same: over each, a rank sends what it has read, and gets what its twin has read.

Twins are ranks at the same place in their nodes. A line is a TCP connection, no process group: it is made for one load, and
whoever waits on it has the load's deadline. Both ends prove by secrets from the team's board that they are who they seem.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from ..errors import Deadline, Unavailable
from ..run.team import Call
from .reading import Bytes

_HEADER = struct.Struct("<qq")
_SECRET = 16
_GREETING = struct.Struct(f"<{_SECRET}sq")
_CONNECT_SECONDS = 5.0
_ADDRESS_OF = 0x8915  # SIOCGIFADDR


class Address(msgspec.Struct, array_like=True):
    """Where a rank can be reached from other nodes."""

    rank: int
    hosts: list[str]
    """To be tried in this order."""
    port: int
    secret: bytes
    """What who connects must say."""
    proof: bytes
    """What it must hear."""


class Line:
    """A connection to a twin, used by one thread for each direction. What is sent is [window, note, bytes], in order.

    Args:
        call: under which both ends load.
    """

    def __init__(self, end: socket.socket, rank: int, call: Call) -> None:
        self.rank = rank
        self._end, self._call = end, call
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, window: int, note: Any, data: Bytes) -> None:
        """Send a part of a window.

        Raises:
            Unavailable: the twin has gone.  What it says it has failed with.  Deadline: it did not take the part in time.
        """
        text = msgspec.msgpack.encode(note)
        with self._told("take", window):
            self._end.sendall(_HEADER.pack(window, len(text)) + text)
            self._end.sendall(data.data)

    def receive(self, window: int, target: Bytes) -> Any:
        """Receive a part of a window into its place; returns the note that came with it.

        Raises:
            Unavailable: the twin has gone.  What it says it has failed with.  Deadline: it did not send the part in time.
        """
        with self._told("send", window):
            came, length = _HEADER.unpack(self._exactly(_HEADER.size))
            if came != window:
                raise Unavailable(f"rank {self.rank} sent its part of window {came} where that of {window} was due")
            note = msgspec.msgpack.decode(self._exactly(length))
            self._receive_into(target.data)
        return note

    def close(self, error: BaseException | None = None) -> None:
        """End the connection, and whatever waits on it. Never raises.

        Args:
            error: why, if its work is not done: the twin raises the same, as nobody else tells it.
        """
        if error is not None:
            self._call.excuse(error)
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self._receive_into(memoryview(data))
        return bytes(data)

    def _receive_into(self, view: memoryview) -> None:
        while len(view):
            got = self._end.recv_into(view)
            if not got:
                raise ConnectionResetError("it closed the connection")
            view = view[got:]

    @contextlib.contextmanager
    def _told(self, doing: str, window: int) -> Iterator[None]:
        """Errors of the socket as ours. A little time is left for telling them."""
        seconds = 0.95 * self._call.left
        self._end.settimeout(max(0.001, seconds))
        try:
            yield
        except TimeoutError:
            raise Deadline(f"rank {self.rank} of another node did not {doing} its part of window {window} in time") from None
        except OSError as error:
            raise self._call.excuse_of(self.rank) or self._gone(window, error) from error

    def _gone(self, window: int, error: OSError) -> Unavailable:
        return Unavailable(f"rank {self.rank} of another node is gone before its part of window {window}: {error}")


class Door:
    """Where the twins of other nodes connect, and how this rank connects to them."""

    def __init__(self, rank: int) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=64)
        self.address = Address(
            rank, _hosts(), self._socket.getsockname()[1], secrets.token_bytes(_SECRET), secrets.token_bytes(_SECRET)
        )

    def close(self) -> None:
        self._socket.close()

    def lines(self, twins: Sequence[Address], call: Call) -> dict[int, Line]:
        """Lines to all the others of `twins`, by their place among them; those before this rank are called, the others call.

        Raises:
            OSError: naming a rank that could not be reached, or did not call.
        """
        mine = next(i for i, twin in enumerate(twins) if twin.rank == self.address.rank)
        with contextlib.ExitStack() as stack:
            found: dict[int, socket.socket] = {}
            errors: list[OSError] = []

            def answer() -> None:
                try:
                    for number, end in self._callers({t.rank: i for i, t in enumerate(twins) if i > mine}, lambda: call.left):
                        found[number] = stack.enter_context(end)
                except OSError as error:
                    errors.append(error)

            answering = threading.Thread(target=answer, name="holdfast-door")
            answering.start()
            try:
                called = {i: stack.enter_context(self._call(twin, lambda: call.left)) for i, twin in enumerate(twins) if i < mine}
            finally:
                answering.join()
            if errors:
                raise errors[0]
            stack.pop_all()
        return {number: Line(end, twins[number].rank, call) for number, end in {**found, **called}.items()}

    def _call(self, twin: Address, left: Callable[[], float]) -> socket.socket:
        why: OSError = OSError("it gave no address")
        for host in twin.hosts:
            try:
                end = socket.create_connection((host, twin.port), min(_CONNECT_SECONDS, max(0.001, left())))
            except OSError as error:
                why = error
                continue
            try:
                end.sendall(_GREETING.pack(twin.secret, self.address.rank))
                if secrets.compare_digest(_exactly(end, _SECRET), twin.proof):
                    return end
                why = OSError("somebody else answers there")
            except OSError as error:
                why = error
            end.close()
        raise OSError(f"rank {twin.rank} cannot be reached at port {twin.port} of {' or '.join(twin.hosts)}: {why}")

    def _callers(self, expected: dict[int, int], left: Callable[[], float]) -> Iterator[tuple[int, socket.socket]]:
        """Each twin that calls, by its place; `expected` are places by rank."""
        missing, end_at = dict(expected), time.monotonic() + min(2 * _CONNECT_SECONDS, left())
        while missing:
            self._socket.settimeout(max(0.001, end_at - time.monotonic()))
            try:
                end, _ = self._socket.accept()
            except TimeoutError:
                raise OSError(f"ranks {sorted(missing)} of other nodes did not connect") from None
            try:
                end.settimeout(_CONNECT_SECONDS)
                secret, rank = _GREETING.unpack(_exactly(end, _GREETING.size))
                if not secrets.compare_digest(secret, self.address.secret) or rank not in missing:
                    raise ConnectionRefusedError("not a twin")
                end.sendall(self.address.proof)
            except OSError:  # a stranger, or one that has gone again
                end.close()
                continue
            yield missing.pop(rank), end


def _exactly(end: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = end.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return data


def _hosts() -> list[str]:
    """Addresses of this machine, the most likely first: of the interface that gloo is told to use, towards the job's store."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
            with contextlib.suppress(OSError):
                packed = fcntl.ioctl(probe.fileno(), _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(packed[20:24]))
    with contextlib.suppress(OSError, KeyError):
        family, kind, _, _, where = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing: it only picks the way
            found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]
