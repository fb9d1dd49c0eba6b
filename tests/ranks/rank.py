"""One rank: joins its world, then answers one request after another until its socket is closed."""

from __future__ import annotations

import atexit
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

WHERE = signal.SIGRTMAX
"""Asks a rank to write to its log where its threads are."""
SETTINGS = "HOLDFAST_"
"""Of a variable that is as it is for whoever asks: the server's own are those of the test that happened to start it."""
GROUP_SECONDS = 120
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, which forked it, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(rank: int, world: int, port: int, connection: Connection, log: int) -> None:
    """Be a rank. `log` takes what it prints."""
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    faulthandler.enable(file=2)
    faulthandler.register(WHERE, file=2, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    connection.send_bytes(_answer(lambda: _join(rank, world, port)))
    environment = dict(os.environ)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            break
        reply = _answer(lambda request=request: _call(request, environment))  # type: ignore[misc]
        try:
            connection.send_bytes(reply)
        except BrokenPipeError:
            break
    _leave()


def host_store(world: int, port: int, listening: int, connection: Connection) -> None:
    """Hold the store of a world until the socket is closed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, world, is_master=True, wait_for_workers=False, master_listen_fd=listening)
    connection.poll(None)
    del store


def _join(rank: int, world: int, port: int) -> int:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=False)
    seconds = datetime.timedelta(seconds=GROUP_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)
    return os.getpid()


def _call(request: bytes, environment: dict[str, str]) -> Any:
    module, name, directory, settings, arguments, keywords = pickle.loads(request)
    _begin(directory, {k: v for k, v in environment.items() if not k.startswith(SETTINGS)} | settings)
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    return function(*pickle.loads(arguments), **pickle.loads(keywords))


def _begin(directory: str, environment: dict[str, str]) -> None:
    """Put back what a run before may have changed."""
    import numpy
    import torch

    gc.collect()
    os.chdir(directory)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)


def _answer(work: Callable[[], Any]) -> bytes:
    """(True, value) or (False, exception, traceback), pickled; whatever cannot be pickled is told of in words."""
    from .errors import RankError

    try:
        return pickle.dumps((True, work()))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            answer = pickle.dumps((False, error, text))
            pickle.loads(answer)
            return answer
        except Exception:
            return pickle.dumps((False, RankError(f"{type(error).__name__}: {error}"), text))


def _leave() -> None:
    import torch.distributed as dist

    try:
        if dist.is_initialized():
            dist.destroy_process_group()
        atexit._run_exitfuncs()
    finally:
        os._exit(0)
