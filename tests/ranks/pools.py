"""Pools, as tests see them: one world of ranks for each size, its requests, and its end."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .errors import RankDied, RanksFailed, RankTimeout
from .rank import SETTINGS, WHERE
from .server import REQUEST

TESTS = Path(__file__).parents[1]
START_SECONDS = 60.0
END_SECONDS = 5.0
GRACE_SECONDS = 10.0
"""How long the other ranks may go on after one has failed: mostly they wait for it."""


class Pool:
    """A world of ranks that waits for work. `is_usable` says whether it can take more."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.is_usable = False
        self._running: str | None = None
        self._pidfds: list[int] = []
        self._logs = [os.memfd_create(f"rank{rank}") for rank in range(world)]
        ours, theirs = zip(*(socket.socketpair() for _ in range(world + 1)), strict=True)
        self._lifeline = ours[world]
        self._connections = [Connection(end.detach()) for end in ours[:world]]
        with socket.create_server(("127.0.0.1", 0), backlog=4 * world) as listening:
            pairs = [fd for rank in range(world) for fd in (theirs[rank].fileno(), self._logs[rank])]
            request = REQUEST.pack(world, listening.getsockname()[1])
            socket.send_fds(_serving(), [request], [listening.fileno(), theirs[world].fileno(), *pairs])
        for end in theirs:
            end.close()
        self.is_usable, self._running = True, "joining the world"
        self.pids: list[int] = self.results(START_SECONDS)
        self._pidfds = [os.pidfd_open(pid) for pid in self.pids]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60, catch: bool = False, **keywords: Any
    ) -> list[Any]:
        """Call `function` on every rank; returns what each returned, by rank.

        Args:
            timeout: seconds; ranks that run longer are killed. catch: give exceptions in place of values; do not raise.
        Raises:
            RanksFailed: some rank raised, died or ran too long.
        """
        return self.start(function, *args, **keywords).results(timeout, catch)

    def start(self, function: Callable[..., Any], *args: Any, **keywords: Any) -> Pool:
        """Begin a run; `results` ends it."""
        if not self.is_usable or self._running:
            raise RuntimeError(f"this pool {'is busy with ' + self._running if self._running else 'is at its end'}")
        name = f"{function.__module__}.{function.__qualname__}"
        packed = pickle.dumps(args), pickle.dumps(keywords)
        settings = {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)}
        request = pickle.dumps((function.__module__, function.__qualname__, os.getcwd(), settings, *packed))
        for log in self._logs:
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
        self._running = name
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # killed already; `results` says so
                connection.send_bytes(request)
        return self

    def kill(self, rank: int) -> None:
        """SIGKILL. The pool ends with this run."""
        signal.pidfd_send_signal(self._pidfds[rank], signal.SIGKILL)

    def results(self, timeout: float = 60, catch: bool = False) -> list[Any]:
        """Wait for the run that `start` began; see `run`."""
        what, self._running = self._running, None
        try:
            values, errors, texts = self._gather(timeout, catch)
        except BaseException:  # the test's own timeout, or an interrupt
            self.close(at_once=True)
            raise
        if not self.is_usable or (errors and not catch):
            self.close(at_once=True)
        if errors and not catch:
            raise RanksFailed(str(what), self.world, errors, texts)
        return [errors.get(rank, values.get(rank)) for rank in range(self.world)]

    def _gather(self, timeout: float, catch: bool) -> tuple[dict[int, Any], dict[int, BaseException], dict[int, str]]:
        began = time.monotonic()
        end = began + timeout
        values: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        texts: dict[int, str] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    is_value, result, *text = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.is_usable = False
                    is_value, result, text = False, RankDied(f"rank {rank} died after {time.monotonic() - began:.1f} s"), [""]
                if is_value:
                    values[rank] = result
                else:
                    errors[rank], texts[rank] = result, text[0] or f"{result}\n{self._log(rank)}"
            if errors and not catch:
                end = min(end, time.monotonic() + GRACE_SECONDS)
            if not ready and waiting:
                late = self._kill_late(sorted(waiting.values()), time.monotonic() - began)
                errors |= late
                texts |= {rank: str(error) for rank, error in late.items()}
                break
        for rank in range(self.world):
            for line in self._log(rank).splitlines():
                print(f"rank {rank}: {line}")
        return values, errors, texts

    def _kill_late(self, ranks: list[int], seconds: float) -> dict[int, BaseException]:
        self.is_usable = False
        for rank in ranks if self._pidfds else []:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[rank], WHERE)
        time.sleep(0.3)  # they write where they are
        return {
            rank: RankTimeout(f"rank {rank} was still running after {seconds:.1f} s and was killed\n{self._log(rank)}")
            for rank in ranks
        }

    def _log(self, rank: int) -> str:
        return os.pread(self._logs[rank], 1 << 20, 0).decode(errors="replace")

    def close(self, at_once: bool = False) -> None:
        """End the ranks, and wait until they are gone. Ranks that do not leave in time, or `at_once`, are killed."""
        self.is_usable = False
        for connection in self._connections:
            connection.close()
        _await_end(self._pidfds, 0 if at_once else END_SECONDS)
        for pidfd in self._pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        _await_end(self._pidfds, END_SECONDS)
        self._lifeline.close()
        for descriptor in (*self._pidfds, *self._logs):
            os.close(descriptor)
        self._pidfds, self._logs = [], []


_pools: dict[int, Pool] = {}
_server: tuple[socket.socket, int] | None = None
"""The fork server's socket and pidfd."""


def pool(world: int, *, fresh: bool = False) -> Pool:
    """The pool of `world` ranks; a new one where there is none, where the last is at its end, or where `fresh`."""
    held = _pools.get(world)
    if held is None or not held.is_usable or fresh:
        if held is not None:
            held.close()
        held = _pools[world] = Pool(world)
    return held


@atexit.register
def close_all() -> None:
    """End all pools and the fork server, and wait until all their processes are gone."""
    global _server
    while _pools:
        _pools.popitem()[1].close()
    if _server is not None:
        channel, pidfd = _server
        channel.close()
        _await_end([pidfd], END_SECONDS)
        os.close(pidfd)
        _server = None


def _serving() -> socket.socket:
    """The fork server's socket; it is started when the first pool is asked for."""
    global _server
    if _server is not None and select.select([_server[1]], [], [], 0)[0]:
        close_all()  # it has died
    if _server is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        begin = f"from ranks.server import main; main({theirs.fileno()}, {os.getpid()})"
        path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with theirs:
            subprocess.run(
                [sys.executable, "-c", begin], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, check=True
            )
        _server = ours, os.pidfd_open(int(ours.recv(64)))
    return _server[0]


def _await_end(pidfds: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    for pidfd in pidfds:
        select.select([pidfd], [], [], max(0.0, end - time.monotonic()))
