"""A rank's line to the engine that saves for it: an agent's, over a socket, or one in a thread of this process.

Whoever sends returns at once: messages go through a thread, so that an agent that hangs holds up nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ..errors import Deadline, HoldfastError, Unavailable
from ..run.identity import this_process
from ..store.base import Store
from .engine import Engine
from .messages import VERSION, Adopt, Bye, Flush, Flushed, Hello, Joined, Message, Welcome
from .place import socket_path, starting
from .serve import listen
from .wire import Wire
from .writer import Writer

log = logging.getLogger("holdfast")
_CONNECT_SECONDS = 30.0
_BYE_SECONDS = 5.0

Hear = Callable[[Message, list[int]], None]
_Outgoing = tuple[Message, Callable[[], None] | None]
"""A message, and what to call when it is sent."""


class Link(Protocol):
    """Where a rank sends its captures.

    Attributes:
        is_up: messages reach an engine of this attempt.
    """

    is_up: threading.Event

    def send(self, message: Message, sent: Callable[[], None] | None = None) -> None:
        """Returns at once. `sent` is called, in a thread, when the engine has the message, or will have it for sure."""
        ...

    def flush(self, seconds: float) -> bool:
        """Whether all that was captured is durable, or has failed, within so many seconds."""
        ...

    def close(self, seconds: float) -> None: ...


class ThreadLink:
    """An engine of this process's own: the same one, without another process to survive this one.

    Args:
        hear: called, in threads of the engine, with what it says.
    """

    def __init__(self, rank: int, writer: Writer, hear: Hear, store: Store, attempt: int) -> None:
        self._rank, self._hear = rank, hear
        self._engine = Engine((rank,), writer, self._tell, store, attempt)
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self.is_up = threading.Event()
        self.is_up.set()
        self._sender = threading.Thread(target=self._send_all, name="holdfast-link", daemon=True)
        self._sender.start()

    def send(self, message: Message, sent: Callable[[], None] | None = None) -> None:
        self._outbox.put((message, sent))

    def flush(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self._outbox.empty() and time.monotonic() < until:
            time.sleep(0.001)
        return self._engine.flush(max(0.0, until - time.monotonic()))

    def close(self, seconds: float) -> None:
        self._outbox.put(None)
        self._sender.join(seconds)
        self._engine.close(seconds)

    def _tell(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        self._hear(message, [os.dup(fd) for fd in fds])

    def _send_all(self) -> None:
        while (outgoing := self._outbox.get()) is not None:
            message, sent = outgoing
            try:
                self._engine.receive(self._rank, message)
                if sent is not None:
                    sent()
            except Exception:
                log.exception("the engine failed on %s", type(message).__name__)


class AgentLink:
    """A line to the agent of this node, which is started where there is none, and again when it dies.

    Args:
        hear: called, in a thread, with what the agent says. lost: called, in a thread, with why the line broke.
        adopt: what the leader says first; None for other ranks. attempt: of this job.
    """

    def __init__(
        self, url: str, node: str, rank: int, attempt: int, adopt: Callable[[], Adopt] | None, hear: Hear,
        lost: Callable[[str], None], idle: float, nice: int,
    ) -> None:  # fmt: skip
        self._url, self._node, self._rank, self._attempt = url, node, rank, attempt
        self._adopt, self._hear, self._lost = adopt, hear, lost
        self._idle, self._nice = idle, nice
        self.is_up = threading.Event()
        self.pid = 0
        """Of the agent."""
        self._flushed: queue.SimpleQueue[Flushed] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._live, name="holdfast-link", daemon=True)
        self._thread.start()

    def send(self, message: Message, sent: Callable[[], None] | None = None) -> None:
        self._outbox.put((message, sent))

    def flush(self, seconds: float) -> bool:
        if not self.is_up.is_set():
            return False
        self.send(Flush(seconds))
        until = time.monotonic() + seconds + 1.0
        while time.monotonic() < until and self.is_up.is_set():
            with contextlib.suppress(queue.Empty):
                return self._flushed.get(timeout=0.2).is_done
        return False

    def close(self, seconds: float) -> None:
        """Say goodbye. What was not flushed, the agent goes on with."""
        self._is_closing = True
        self.send(Bye())
        self.send_end()
        self._thread.join(min(seconds, _BYE_SECONDS))

    def send_end(self) -> None:
        self._outbox.put(None)

    def _live(self) -> None:
        """Connect, and serve the connection until it breaks; then again, until the end."""
        while not self._is_closing:
            try:
                wire = self._connected()
            except (OSError, HoldfastError) as error:
                self._lost(f"no agent can be reached: {error}")
                time.sleep(0.5)
                continue
            sender = threading.Thread(target=self._send_all, args=(wire,), name="holdfast-send", daemon=True)
            sender.start()
            why = self._receive_all(wire)
            self.is_up.clear()
            wire.close()
            if not self._is_closing:
                self._outbox.put(None)
                sender.join()
                self._drop_outbox()
                self._lost(why)

    def _connected(self) -> Wire:
        path = socket_path(self._url, self._node)
        end = reach(path) or self._start(path)
        wire = Wire(end)
        try:
            wire.send(Hello(VERSION, self._rank, this_process(), self._attempt))
            answer, _ = wire.receive()
            if not isinstance(answer, Welcome) or answer.version != VERSION:
                raise Unavailable(f"the agent at {path} is of another version of holdfast: `holdfast agent stop` ends it")
            end.settimeout(None)
            self.pid = answer.process.pid
            if self._adopt is not None:
                wire.send(self._adopt())
        except BaseException:
            wire.close()
            raise
        return wire

    def _start(self, path: Path) -> socket.socket:
        """Start an agent, unless somebody has meanwhile, and connect to it."""
        with starting(path):
            if (end := reach(path)) is not None:
                return end
            with listen(path) as listener:
                _spawn(self._url, path, listener, self._idle, self._nice)
            end = reach(path)
        if end is None:
            raise Unavailable(f"the agent at {path} went away at once")
        return end

    def _send_all(self, wire: Wire) -> None:
        while (outgoing := self._outbox.get()) is not None:
            message, sent = outgoing
            try:
                wire.send(message)
            except OSError:
                wire.close()
                return
            if sent is not None:  # what the socket has taken, the agent will read
                sent()
        if self._is_closing:
            wire.close()

    def _drop_outbox(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()

    def _receive_all(self, wire: Wire) -> str:
        """Hand on what the agent says, until the line breaks; returns why."""
        while True:
            try:
                message, fds = wire.receive()
            except OSError as error:
                return f"the agent (process {self.pid}) is gone: {error}"
            if isinstance(message, Joined):
                if message.attempt == self._attempt:
                    self._hear(message, fds)
                    self.is_up.set()
            elif isinstance(message, Flushed):
                self._flushed.put(message)
            else:
                self._hear(message, fds)


def ask(url: str, node: str, question: Message, seconds: float) -> Message | None:
    """As `ask_for`, for what comes without descriptors."""
    message, fds = ask_for(url, node, question, seconds)
    for fd in fds:
        os.close(fd)
    return message


def ask_for(url: str, node: str, question: Message, seconds: float) -> tuple[Message | None, list[int]]:
    """Ask the agent of a run, if there is one, as no rank; None where there is none, or it ends.

    Returns the answer, and the descriptors that came with it, which the caller owns.

    Raises:
        Deadline: it does not answer within so many seconds.
    """
    try:
        end = reach(socket_path(url, node))
    except OSError:
        return None, []
    if end is None:
        return None, []
    end.settimeout(seconds)
    wire = Wire(end)
    try:
        wire.send(question)
        return wire.receive()
    except TimeoutError:
        raise Deadline(f"the agent of {url} does not answer within {seconds:g} s: does it hang?") from None
    except OSError:
        return None, []
    finally:
        wire.close()


def reach(path: Path) -> socket.socket | None:
    """A connection to whoever listens at `path`, with a timeout until it has answered; None where nobody does.

    Raises:
        OSError: somebody listens, who has not taken connections for long. It must not be replaced while it may come back.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(_CONNECT_SECONDS)
    try:
        end.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        end.close()
        return None
    except OSError:
        end.close()
        raise
    return end


def _spawn(url: str, path: Path, listener: socket.socket, idle: float, nice: int) -> None:
    """Start the agent's process: in a session of its own, with nothing of ours but the socket."""
    command = [sys.executable, "-m", "holdfast.agent.serve", url, "--fd", str(listener.fileno()), "--socket", str(path)]
    command += ["--idle", str(idle), "--nice", str(nice)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        start_new_session=True, pass_fds=(listener.fileno(),), env=environment, close_fds=True,
    )  # fmt: skip
    # it is nobody's child to wait for: whoever started it reaps it if it is still there then
    threading.Thread(target=process.wait, name="holdfast-reap", daemon=True).start()
