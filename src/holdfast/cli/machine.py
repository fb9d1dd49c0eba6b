"""What the machine gives a job: the filesystem of a directory and its room, memory, limits, versions. Linux; else unknown."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
from dataclasses import dataclass

from ..version import VERSION

LIBRARIES = ("torch", "numpy", "safetensors", "msgspec", "xxhash", "zstandard", "typer", "rich")
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Filesystem:
    """Where a directory lies."""

    kind: str
    """ext4, xfs, nfs4, overlay, ...; `unknown`."""
    source: str
    """What is mounted."""
    mount: str
    """Where."""


@dataclass(frozen=True)
class Room:
    free_bytes: int
    """For this user."""
    total_bytes: int
    free_files: int
    """Inodes; 0 where the filesystem does not count them."""


def filesystem(path: str) -> Filesystem:
    """The mount that `path` lies in, by the kernel's table: the last one that holds it."""
    found, path = Filesystem("unknown", "", ""), os.path.realpath(path)
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as table:
        for line in table:
            left, _, right = line.partition(" - ")
            mount = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
            is_above = path == mount or path.startswith(mount.rstrip("/") + "/")
            if is_above and len(mount) >= len(found.mount):
                kind, source = right.split()[:2]
                found = Filesystem(kind, source, mount)
    return found


def room(path: str) -> Room:
    info = os.statvfs(path)
    return Room(info.f_bavail * info.f_frsize, info.f_blocks * info.f_frsize, info.f_favail)


def available_memory() -> int | None:
    """Bytes that a process could still take, within the machine and its control group; None where nothing says so."""
    amounts = []
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        amounts += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError):
        limit, used = (_number(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        amounts.append(max(0, limit - used))
    return min(amounts, default=None)


def limit(which: int) -> int | None:
    """The soft limit of this process; None where there is none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def versions() -> dict[str, str]:
    """Of holdfast, Python, the kernel and the libraries that are installed; imports none of them."""
    found = {"holdfast": VERSION, "python": platform.python_version(), "kernel": platform.release()}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _number(path: str) -> int:
    """Raises:
    ValueError: `max`, no limit.
    """
    with open(path) as file:
        return int(file.read())
