"""Workload: a process that saves, prunes, rolls back and pins for ever, and says in a line what it begins and has done.

It is forked from a server that has torch and holdfast imported, so that a new one starts in milliseconds. `Server` is
the side of the test: it starts children, reads their lines, follows the facts, and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import holdfast

from .scenarios import search_path
from .truth import FAMILY, Facts, Version, Window, between, contents

LINE_SECONDS = 30.0
"""How long a line may take before the test says that the child hangs."""
DIES_WITH_PARENT = 1


class Child:
    """A process at work on a run, as seen by the test."""

    def __init__(self, server: Server, pid: int, facts: Facts) -> None:
        self.pid = pid
        self.facts = facts
        """What was announced so far."""
        self.begun: list[Any] | None = None
        """What is under way: the name of a method of `Facts` and its arguments."""
        self.done = 0
        self.errors: list[str] = []
        self.is_gone = False
        self.story: list[str] = []
        """Its lines."""
        self._server = server

    @property
    def window(self) -> Window:
        return between(self.facts, self._after() if self.begun else self.facts)

    def run_for(self, seconds: float) -> None:
        """Follow the child for that long, or until it ends by itself."""
        until = time.monotonic() + seconds
        while (line := self._server.line(until)) is not None:
            if not self._follow(line):
                return

    def end(self) -> None:
        """Kill it, wait until it is gone, and follow what it had said."""
        if self.is_gone:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        until = time.monotonic() + LINE_SECONDS
        while (line := self._server.line(until)) is not None:
            if not self._follow(line):
                return
        raise AssertionError(f"the child {self.pid} did not end within {LINE_SECONDS:.0f} s")

    def _follow(self, line: dict[str, Any]) -> bool:
        """Take note of a line; False when it says that the child is gone."""
        self.story.append(json.dumps(line))
        match line:
            case {"begin": begun}:
                self.begun = begun
            case {"done": _}:
                self.facts, self.begun = self._after(), None
                self.done += 1
            case {"error": error}:
                self.errors.append(error)
            case {"reaped": _}:
                self.is_gone = True
        return not self.is_gone

    def _after(self) -> Facts:
        assert self.begun is not None
        name, *arguments = self.begun
        if name == "saved":
            arguments = [Version(*arguments)]
        after: Facts = getattr(self.facts, name)(*arguments)
        return after


class Server:
    """The process from which children are forked."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", f"{__package__}.workload"]
        environment = os.environ | {"PYTHONPATH": search_path()}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._buffer = b""
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        assert self.line(time.monotonic() + 60) == {"server": "ready"}

    def start(self, path: Path, seed: int, facts: Facts) -> Child:
        """A child that goes on with the run at `path`, of which `facts` are known."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(path), seed]).encode() + b"\n")
        self._process.stdin.flush()
        line = self.line(time.monotonic() + LINE_SECONDS)
        assert line, "no child was forked"
        return Child(self, line["child"], facts)

    def line(self, until: float) -> dict[str, Any] | None:
        """The next line of the server or its child; None when the time has come."""
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, until - time.monotonic())):
                return None
            data = os.read(self._output, 65536)
            assert data, "the server has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        decoded: dict[str, Any] = json.loads(line)
        return decoded

    def close(self) -> None:
        """End the server; a child that still runs dies with it."""
        self._selector.close()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.close()


# The side of the server and its children.


def say(**line: Any) -> None:
    """One write, so that no line is torn by a kill."""
    os.write(1, json.dumps(line).encode() + b"\n")


def serve() -> None:
    """Fork a child for each line of input, and wait for it."""
    die_with_parent()
    say(server="ready")
    for line in sys.stdin:
        path, seed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            try:
                say(child=os.getpid())
                work(Path(path), random.Random(seed))
            except BaseException as error:
                say(error=f"{type(error).__name__}: {error}")
            os._exit(1)
        os.waitpid(pid, 0)
        say(reaped=pid)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def work(path: Path, rng: random.Random) -> None:
    """Do one operation after the other until something ends it."""
    while True:
        steps = holdfast.Run(path).steps() if (path / "holdfast.json").exists() else []
        choice = rng.random()
        if len(steps) < 2 or choice < 0.6:
            step = steps[-1].step + 1 if steps else 1
            content = FAMILY * rng.randrange(3) + rng.randrange(FAMILY)
            with said("saved", step, content):
                holdfast.save(path, contents(content), step)
        elif choice < 0.85:
            last = rng.randint(1, 2)
            with said("pruned", last):
                holdfast.Run(path).prune(holdfast.Keep(last=last), recycle=rng.random() < 0.7)
        elif choice < 0.93:
            step = rng.choice(steps).step
            with said("rolled_back", step):
                holdfast.Run(path).rollback(step)
        elif pins := [name for step in steps for name in step.pins]:
            name = rng.choice(pins)
            with said("unpinned", name):
                holdfast.Run(path).unpin(name)
        else:
            step, name = rng.choice(steps).step, f"pin{rng.randrange(1 << 30)}"
            with said("pinned", name, step):
                holdfast.Run(path).pin(step, name)


@contextlib.contextmanager
def said(*operation: Any) -> Iterator[None]:
    say(begin=operation)
    yield
    say(done=operation[0])


if __name__ == "__main__":
    serve()
