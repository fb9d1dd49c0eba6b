"""The fork server: imports torch and holdfast once, then forks the processes of pools on request.

It detaches itself, because the watch for what a test leaves behind must not see pools, which outlive tests on purpose. It ends
when the test process closes its socket or dies in any way, and its ranks end with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection

from .rank import die_with_parent, host_store, serve

PRELOADED = (
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "torch.distributed.checkpoint.state_dict", "torch.nn.parallel", "numpy", "pytest",
    "holdfast", "holdfast.api", "holdfast.state", "holdfast.checkpointer", "holdfast.loading.fill",
)  # fmt: skip
REQUEST = struct.Struct("<II")
"""World size and port of its store. With it come descriptors: the store's listening socket and its lifeline, then for each
rank its socket and its log."""
MOST_RANKS = 8


def main(control: int, parent: int) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    channel = socket.socket(fileno=control)
    channel.send(str(os.getpid()).encode())
    try:
        watch = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # what a rank cannot import, its run tells of
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        ready, _, _ = select.select([channel, watch], [], [])
        if watch in ready:
            return
        message, descriptors, _, _ = socket.recv_fds(channel, REQUEST.size, 2 + 2 * MOST_RANKS)
        if not message:
            return
        world, port = REQUEST.unpack(message)
        _start(world, port, descriptors, [control, watch])


def _start(world: int, port: int, descriptors: list[int], ours: list[int]) -> None:
    listening, lifeline, *pairs = descriptors
    _fork(lambda: host_store(world, port, listening, Connection(lifeline)), {listening, lifeline}, [*descriptors, *ours])
    for rank in range(world):
        end, log = pairs[2 * rank : 2 * rank + 2]
        work = lambda rank=rank, end=end, log=log: serve(rank, world, port, Connection(end), log)  # noqa: E731
        _fork(work, {end, log}, [*descriptors, *ours])
    for descriptor in descriptors:
        os.close(descriptor)


def _fork(work: Callable[[], None], kept: set[int], all_descriptors: list[int]) -> None:
    server = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent(server)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in set(all_descriptors) - kept:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        work()
    finally:
        os._exit(0)
