"""The process in which one method lives: it answers the driver's commands, one at a time, with values or a reason.

What is timed is only the call of the library and the syncing of what it left; everything around it (the previous
checkpoint, the page cache, zeroing the state, comparing it) happens outside.
"""

import gc
import logging
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from bench import measure
from bench.channel import serve
from bench.methods import Method
from bench.state import SIZES, Segment, TrainingState


class Turn:
    """The commands. Each returns a dict of values; any exception takes the method out of the comparison."""

    def __init__(self, method: Method, state: TrainingState, digest: str) -> None:
        self._method = method
        self._state = state
        self._digest = digest

    def save(self) -> dict[str, float]:
        """Seconds until the trainer may go on (`stall`), until complete (`done`), until durable; bytes and files."""
        method = self._method
        method.prepare()
        self._digest = self._state.advance()
        gc.collect()
        os.sync()
        start = time.perf_counter()
        method.save()
        stall = time.perf_counter() - start
        method.finish()
        done = time.perf_counter() - start
        measure.make_durable(method.directory)
        durable = time.perf_counter() - start
        return {
            "stall": stall,
            "done": done,
            "durable": durable,
            "stored_bytes": measure.nbytes_below(method.checkpoint),
            "files": len(measure.files_below(method.checkpoint)),
        }

    def load(self, cold: bool) -> dict[str, float]:
        """Seconds until every value is back in its tensor.

        Cold: the page cache is dropped before. Else it is as the method's own last use of the files left it; what a
        plain sequential read leaves there would suit some methods far better than what they leave themselves.

        Raises:
            ValueError: a bit differs, or the values are not in the tensors that were there.

        After any error the shared state is undefined; the driver fills it again.
        """
        if not self._method.loads:
            return {}
        self._state.clear()
        gc.collect()
        if cold:
            measure.drop_caches()
        start = time.perf_counter()
        self._method.load()
        seconds = time.perf_counter() - start
        if self._state.digest() != self._digest:
            raise ValueError("the loaded state is not bit-equal to the saved one")
        return {"load_cold" if cold else "load_warm": seconds}

    def load_one(self, cold: bool) -> dict[str, float]:
        if not self._method.reads_one_tensor:
            return {}
        gc.collect()
        if cold:
            measure.drop_caches()
        start = time.perf_counter()
        loaded = self._method.load_one(self._state.probe)
        seconds = time.perf_counter() - start
        if not torch.equal(loaded, self._state.tensors[self._state.probe]):
            raise ValueError(f"{self._state.probe}, read alone, is not bit-equal to the saved one")
        return {"one_cold" if cold else "one_warm": seconds}

    def discard(self) -> dict[str, float]:
        self._method.discard()
        return {}


def main(channel: Connection, method: type[Method], size: str, segment: Segment, digest: str, directory: Path, log: Path) -> None:
    """Serve `method` until the driver closes the channel. The library's own output goes to `log`.

    `digest` is that of the state as the driver filled it: at this moment another method may be loading into it.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.disable(logging.WARNING)
    state = TrainingState(SIZES[size], segment)
    serve(channel, lambda: Turn(method(state, directory), state, digest))
    # Not by returning: threads and processes that a library has left must not keep this one alive.
    os._exit(0)
