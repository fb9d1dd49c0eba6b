"""The agent's process: it accepts the ranks of its node, and hands what they say to an engine. Without torch.

It belongs to no trainer: it has a session of its own, and goes on when trainers are killed. It ends when all ranks have said
goodbye, when it is told to, or when nobody has been connected for the idle time, and flushes before.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..coding import coder_of
from ..errors import HoldfastError, Unavailable
from ..run.contents import Contents
from ..run.identity import this_process
from ..run.session import Session
from ..run.status import Status
from ..store.locate import open_store
from .contents import Taken, contents_of
from .engine import Engine
from .gate import said_of
from .marks import Marks
from .messages import (
    VERSION,
    Adopt,
    Ask,
    Bye,
    Flush,
    Flushed,
    Hello,
    Joined,
    Message,
    Outcome,
    Recall,
    Recalled,
    Stop,
    Told,
    Welcome,
)  # fmt: skip
from .node import node_contents
from .place import starting
from .status import status_of_engine
from .together import NodeWriter, short_name
from .wire import Wire, peer_uid
from .writer import SessionWriter, Writer

log = logging.getLogger("holdfast")
_LOOK_SECONDS = 0.5
_LAST_FLUSH_SECONDS = 600.0
_ADOPT_FLUSH_SECONDS = 600.0
_OUTSIDE_SECONDS = 15.0
"""How long a job waits for agents of nodes that have no part in it: their nodes may be gone, or be about to finish."""
_AGAIN_SECONDS = 1.0


class Agent:
    """Args:
    listener: a bound socket, listening. path: its name, removed at the end. url: of the run. idle: seconds.
    stays: it does not end with the job.
    """

    def __init__(self, listener: socket.socket, path: Path, url: str, idle: float, stays: bool) -> None:
        self._listener, self._path, self.url = listener, path, url
        self._inode = os.stat(path).st_ino
        self._idle, self._stays = idle, stays
        self._store = Marks(open_store(url))
        self._engine: Engine | None = None
        self._adopted: Adopt | None = None
        self._ranks: dict[int, Wire] = {}
        self._hellos: dict[int, Hello] = {}
        self._left: set[int] = set()
        self._lock = threading.RLock()
        self._adopting = threading.Lock()
        self._connections = 0
        self._alone_since = time.monotonic()
        self._is_ending = threading.Event()
        self._began = time.time()

    def run(self) -> None:
        """Serve until the end."""
        self._listener.settimeout(_LOOK_SECONDS)
        while not self._is_over():
            try:
                end, _ = self._listener.accept()
            except TimeoutError:
                continue
            if peer_uid(end) != os.getuid():
                end.close()
                continue
            end.settimeout(None)
            with self._lock:
                self._connections += 1
            threading.Thread(target=self._serve, args=(Wire(end),), name="holdfast-rank", daemon=True).start()
        self._end()

    def stop(self) -> None:
        """Have `run` end soon."""
        self._is_ending.set()

    def _is_over(self) -> bool:
        with self._lock:
            is_idle = not self._connections and time.monotonic() - self._alone_since >= self._idle
            attempt = self._adopted.claim.attempt if self._adopted is not None else 0
            came = {rank for rank, hello in self._hellos.items() if hello.attempt >= attempt}
            is_done = bool(came) and not self._ranks and self._left >= came and not self._stays
        return is_idle or is_done or self._is_ending.is_set()

    def _end(self) -> None:
        """No new ranks from here on; what was captured is finished first."""
        if self._engine is not None:  # while it can still be found: a job that comes back waits for what was captured
            self._engine.flush(_LAST_FLUSH_SECONDS)
        with contextlib.suppress(OSError), starting(self._path):
            if os.stat(self._path).st_ino == self._inode:  # another agent may have taken its place
                os.unlink(self._path)
        self._listener.close()
        if self._engine is not None:
            self._engine.close(_LAST_FLUSH_SECONDS)

    def _serve(self, wire: Wire) -> None:
        rank: int | None = None
        try:
            while True:
                message, fds = wire.receive()
                for fd in fds:
                    os.close(fd)
                if isinstance(message, Hello):
                    rank = self._hello(wire, message)
                elif rank is None:
                    self._answer(wire, message)
                else:
                    self._hear(wire, rank, message)
        except OSError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            wire.close()
            with self._lock:
                self._connections -= 1
                self._alone_since = time.monotonic()
                is_current = rank is not None and self._ranks.get(rank) is wire
                if is_current and rank is not None:
                    del self._ranks[rank]
            if is_current and rank is not None and self._engine is not None and rank in self._engine.ranks:
                self._engine.leave(rank)

    def _hello(self, wire: Wire, message: Hello) -> int:
        wire.send(Welcome(VERSION, this_process()))
        if message.version != VERSION:
            raise ConnectionError("another version")
        with self._lock:
            earlier = self._ranks.get(message.rank)
            self._ranks[message.rank], self._hellos[message.rank] = wire, message
            self._left.discard(message.rank)
            adopted, engine = self._adopted, self._engine
        if adopted is None or engine is None or message.rank not in adopted.ranks:
            return message.rank
        if earlier is not None:  # its end was not noticed yet
            engine.leave(message.rank)
        if message.attempt == adopted.claim.attempt:
            engine.join(message.rank)
        self._tell(
            message.rank, Joined(adopted.claim.attempt), ()
        )  # it may have left again: then its goodbye is still to be read
        return message.rank

    def _answer(self, wire: Wire, message: Message) -> None:
        """What a command asks, which is no rank."""
        if isinstance(message, Ask):
            wire.send(Told(self.status()))
        elif isinstance(message, Flush):
            wire.send(Flushed(self._flush_for(message)))
        elif isinstance(message, Recall):
            self._recall(wire)
        elif isinstance(message, Stop):
            is_done = self._engine.flush(_LAST_FLUSH_SECONDS) if self._engine is not None else True
            wire.send(Flushed(is_done))
            self.stop()

    def _recall(self, wire: Wire) -> None:
        held = self._engine.held() if self._engine is not None else None
        if held is None:
            wire.send(Recalled(-1))
            return
        version, arenas = held
        ranks = sorted(arenas)
        attempt = version.written.attempt if version.written is not None else 0
        wire.send(
            Recalled(
                version.step,
                attempt,
                [version.tables[rank] for rank in ranks],
                [version.at[rank] for rank in ranks],
                [(arenas[rank].slots, arenas[rank].slot_bytes) for rank in ranks],
            ),
            [arenas[rank].fd for rank in ranks],
        )

    def _hear(self, wire: Wire, rank: int, message: Message) -> None:
        if isinstance(message, Adopt):
            self._adopt(wire, message)
        elif isinstance(message, Flush):  # other messages of the rank may be needed for it
            threading.Thread(target=self._flush, args=(wire, message), name="holdfast-flush", daemon=True).start()
        elif isinstance(message, Bye):
            with self._lock:
                self._left.add(rank)
        elif isinstance(message, (Ask, Stop)):
            self._answer(wire, message)
        elif self._engine is not None and rank in self._engine.ranks:
            self._engine.receive(rank, message)

    def _flush_for(self, message: Flush) -> bool:
        """Flush, and wait for no node that is gone, and not for long for one that may be; returns whether all was done."""
        engine, left = self._engine, message.seconds
        if engine is None:
            return True
        nodes = {node.name for node in self._adopted.nodes} if self._adopted is not None else set()
        if message.present is not None and not nodes <= {*message.present, *message.absent}:
            if engine.flush(min(left, _OUTSIDE_SECONDS)):
                return True
            left = max(0.0, left - _OUTSIDE_SECONDS)
            engine.writer.give_up()
        elif nodes & set(message.absent):
            engine.writer.give_up()
        return engine.flush(left)

    def _flush(self, wire: Wire, message: Flush) -> None:
        is_done = self._engine.flush(message.seconds) if self._engine is not None else True
        with contextlib.suppress(OSError):
            wire.send(Flushed(is_done))

    def _adopt(self, wire: Wire, message: Adopt) -> None:
        """Finish what an earlier attempt has left, and go on under a new one."""
        with self._adopting:
            if self._adopted is not None and self._adopted.claim.attempt == message.claim.attempt:
                return  # its leader is back; all ranks of it were told so when they said hello
            arenas = {}
            if self._engine is not None:
                self._engine.writer.give_up()  # under an older attempt nothing can be committed any more
                self._engine.flush(_ADOPT_FLUSH_SECONDS)
                arenas = self._engine.release()
            try:
                writer = self._writer(message)
            except HoldfastError as error:
                wire.send(Outcome(-1, message.claim.attempt, said_of(error)))
                if isinstance(error, Unavailable):
                    raise ConnectionError("the job could not be adopted") from error  # the rank comes again
                return
            for rank in arenas.keys() - set(message.ranks):
                arenas.pop(rank).close()
            with self._lock:
                self._idle = self._idle if self._stays else message.idle_seconds
                self._engine = Engine(
                    message.ranks,
                    writer,
                    self._tell,
                    self._store,
                    message.claim.attempt,
                    arenas,
                    _united(message),
                    next((short_name(node) for node in message.nodes if node.ranks == message.ranks), ""),
                )
                self._adopted = message
            for rank in message.ranks:
                self._tell(rank, Joined(message.claim.attempt), ())

    def _writer(self, message: Adopt) -> Writer:
        """Who writes for a job: its session alone, or with the agents of its other nodes."""
        session = Session(self._store, message.libraries, claim=message.claim)
        if not message.nodes:
            return SessionWriter(session, message.keep, message.recycle, coder_of(message.coding))
        until = time.monotonic() + message.seconds
        while True:
            try:
                return NodeWriter(self._store, message, session)
            except Unavailable:
                if time.monotonic() >= until or self._is_ending.wait(_AGAIN_SECONDS):
                    raise

    def _tell(self, rank: int, message: Message, fds: Sequence[int]) -> None:
        with self._lock:
            wire = self._ranks.get(rank)
        if wire is not None:
            with contextlib.suppress(OSError):  # it is gone; its thread notices
                wire.send(message, fds)

    def status(self) -> Status:
        """How things are."""
        with self._lock:
            pids = {rank: (hello.process.pid, rank in self._ranks) for rank, hello in self._hellos.items()}
            attempt = self._adopted.claim.attempt if self._adopted else 0
        return status_of_engine(self._engine, self.url, attempt, self._began, pids)


def _united(message: Adopt) -> Callable[[Sequence[Taken]], Contents]:
    if not message.nodes:
        return contents_of
    ranks = sorted(rank for node in message.nodes for rank in node.ranks)
    return partial(node_contents, positions={rank: position for position, rank in enumerate(ranks)})


def main(argv: Sequence[str] | None = None) -> int:
    """Serve on a socket that is inherited: what a rank starts."""
    parser = argparse.ArgumentParser(prog="holdfast.agent.serve")
    parser.add_argument("run")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--idle", type=float, default=600.0)
    parser.add_argument("--nice", type=int, default=5)
    given = parser.parse_args(argv)
    serve(socket.socket(fileno=given.fd), Path(given.socket), given.run, given.idle, given.nice, stays=False)
    return 0


def serve(listener: socket.socket, path: Path, url: str, idle: float, nice: int, *, stays: bool) -> None:
    """Be the agent of a run until it is over.

    Args:
        stays: do not end with the job, only when told to, or idle.
    """
    where = os.environ.get("HOLDFAST_AGENT_LOG")
    logging.basicConfig(filename=where, level=logging.INFO if where else logging.CRITICAL, format="%(asctime)s %(message)s")
    with contextlib.suppress(OSError):
        os.nice(nice)
    agent = Agent(listener, path, url, idle, stays)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.run()


def listen(path: Path) -> socket.socket:
    """A socket at `path`, for this user alone."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        before = os.umask(0o077)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


if __name__ == "__main__":
    raise SystemExit(main())
