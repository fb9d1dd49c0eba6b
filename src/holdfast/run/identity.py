"""Which process wrote a record, and whether it still lives."""

from __future__ import annotations

import functools
import os
import socket

from ..format.records import Process


def this_process() -> Process:
    """This process, as records name it."""
    return Process(host=_host(), boot=_boot(), pid=os.getpid(), started=_start_time(os.getpid()) or "")


def is_gone(process: Process) -> bool:
    """Whether the process is known to have ended: only ever true for one of this machine."""
    if process.host != _host() or not process.pid:
        return False
    if process.boot != _boot():
        return True
    started = _start_time(process.pid)
    return started is None or started != process.started


@functools.cache
def _host() -> str:
    """The machine and the pid namespace, since pids mean nothing beyond both."""
    try:
        return f"{socket.gethostname()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


@functools.cache
def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """Clock ticks since boot at which `pid` started; None if there is no such process, or only its corpse."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
        return _start_without_proc(pid)
    return None if fields[0] in "ZX" else fields[19]


def _start_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""
