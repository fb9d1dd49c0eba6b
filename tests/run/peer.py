"""A process that does what it is told by lines of JSON: play an actor and stop where told, or call a function of `writers`.

`Peer` is the side of the test; `python -m run.peer` is the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import holdfast
from holdfast.store.base import Store
from holdfast.testing import faults

from .actors import ACTORS
from .schedules import END, Make, Operation, in_two_parts
from .writers import call

TESTS = Path(__file__).parent.parent


class Peer:
    """The process, as seen by the test."""

    def __init__(self) -> None:
        search = [str(TESTS), str(Path(holdfast.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "run.peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self.pid = self._process.pid

    def ask(self, **command: Any) -> Any:
        """Send a command, and wait for its answer."""
        self.tell(**command)
        return self.hear()

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer died"
        return json.loads(line)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.kill()
        self._process.wait()


class Remote:
    """An actor that a peer plays; see `schedules.Actor`."""

    def __init__(self, peer: Peer, store: Store, name: str, make: Make) -> None:
        del make  # the peer finds it by its name
        self._peer = peer
        self.operations: list[Operation] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        peer.ask(play=name, path=store.url)

    def advance(self, to: float = END) -> int:
        said = self._peer.ask(advance=min(to, END), seen=len(self.operations))
        self.operations += [(operation, path) for operation, path in said["operations"]]
        self.is_done, self.result = said["is_done"], said["result"]
        if said["error"]:
            kind, text = said["error"]
            self.error = getattr(holdfast, kind, AssertionError)(f"{kind}: {text}")
        return len(self.operations)

    def stop(self) -> None:
        self._peer.ask(stop=True)


def serve() -> None:
    """The peer's side: one answer for each line."""
    from holdfast.store.local import LocalStore

    actor: faults.Actor | None = None
    for line in sys.stdin:
        answer: Any = None
        match json.loads(line):
            case {"play": name, "path": path}:
                actor = faults.Actor(LocalStore(path), in_two_parts(ACTORS[name]))
            case {"advance": to, "seen": seen} if actor:
                actor.advance(to)
                error = actor.error and [type(actor.error).__name__, str(actor.error)]
                answer = {
                    "operations": actor.operations[seen:],
                    "is_done": actor.is_done,
                    "result": actor.result if not error else None,
                    "error": error,
                }
            case {"stop": _} if actor:
                actor.stop()
            case {"call": name, **options}:
                answer = call(name, options)
        print(json.dumps(answer, default=str), flush=True)


if __name__ == "__main__":
    serve()
