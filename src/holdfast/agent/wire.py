"""A connection between a rank and its agent: messages of any length over a local socket, some with a descriptor."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence

import msgspec

from .messages import Message

_HEADER = struct.Struct("<q")
_LONGEST = 1 << 30
_MOST_FDS = 64
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Wire:
    """One end. Sending may be done by several threads, receiving by one.

    Args:
        end: a connected stream socket of the local family; owned by this object.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Raises:
        OSError: the other end is gone.
        """
        data = _encoder.encode(message)
        with self._sending:
            header = _HEADER.pack(len(data))
            if fds:
                socket.send_fds(self._end, [header], list(fds))
                self._end.sendall(data)
            else:
                self._end.sendall(header + data)

    def receive(self) -> tuple[Message, list[int]]:
        """The next message, and the descriptors that came with it, which the caller owns.

        Raises:
            ConnectionError: the other end is gone, or does not speak this language.
        """
        data, fds, _, _ = socket.recv_fds(self._end, _HEADER.size, _MOST_FDS)
        try:
            if not data:
                raise ConnectionResetError("the connection was closed")
            data += self._exactly(_HEADER.size - len(data))
            (length,) = _HEADER.unpack(data)
            if not 0 <= length <= _LONGEST:
                raise ConnectionError(f"a message of {length} bytes: no holdfast at the other end")
            return _decoder.decode(self._exactly(length)), fds
        except msgspec.DecodeError as error:
            _close_all(fds)
            raise ConnectionError(f"a message that this version does not know: {error}") from error
        except BaseException:
            _close_all(fds)
            raise

    def close(self) -> None:
        """End the connection, and whoever waits for it. Never raises."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        view = memoryview(data)
        while len(view):
            got = self._end.recv_into(view)
            if not got:
                raise ConnectionResetError("the connection was closed")
            view = view[got:]
        return bytes(data)


def peer_uid(end: socket.socket) -> int:
    """The user at the other end of a local socket, as the kernel tells it."""
    return int(struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1])


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
