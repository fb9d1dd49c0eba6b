"""A command and all processes that come of it, which can be killed as one.

`torchrun` puts each rank into a session of its own, so there is no process group to signal. The processes are found by a mark
in their environment instead, which every process inherits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

MARK = "HOLDFAST_DEMO_JOB"
GONE_SECONDS = 10.0
"""How long a process may take to go away after SIGKILL."""


class Job:
    """A running command. Its output, and that of all its processes, goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._mark = f"{MARK}={uuid.uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        one_node = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(log.parent)}
        with log.open("a") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, **one_node, name: value},
            )  # fmt: skip
        self._known = [self._process.pid]

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def find(self) -> None:
        """Learn its processes now, so that `kill` need not search before it strikes."""
        self._known = self._all()

    def kill(self) -> None:
        """Send SIGKILL to every process of the job, and return when all are gone."""
        end = time.monotonic() + GONE_SECONDS
        left = [process for process in self._known if self._is_ours(process)]
        while time.monotonic() < end:
            for process in left:  # the oldest first: torchrun must not see its ranks die
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if not (left := self._all()):
                break
            time.sleep(0.005)
        self._process.wait()

    def _all(self) -> list[int]:
        """Live processes with our mark, in the order of their numbers."""
        numbers = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
        return [process for process in numbers if self._is_ours(process)]

    def _is_ours(self, process: int) -> bool:
        """A process that has ended has no environment any more, even if nobody has waited for it."""
        try:
            return self._mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:
            return False


@contextlib.contextmanager
def tidy_end() -> Iterator[None]:
    """Let SIGTERM end this process as an exception does, so that the jobs of the demo are killed first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
