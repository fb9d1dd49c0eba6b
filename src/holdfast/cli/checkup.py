"""The checkup of a place and a machine: runs the probes and judges what they found."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict

from ..errors import HoldfastError
from ..store.local import LocalStore
from . import probes
from .amounts import size
from .findings import FAILED, OK, WARNING, Finding
from .machine import available_memory, filesystem, limit, room

UNAVAILABLE, NO_SPACE = 7, 8
_LEAST_OPEN_FILES = 1024
_SLOW_FSYNC_SECONDS = 0.1
_FILESYSTEMS = {
    "tmpfs": "is memory: a power cut or a restart of the machine loses all of it",
    "ramfs": "is memory: a power cut or a restart of the machine loses all of it",
    "overlay": "is the layer of a container and goes away with it: mount a volume",
    "nfs": "is only as durable as its server: it must export with `sync`",
    "nfs4": "is only as durable as its server: it must export with `sync`",
    "fuse": "is only as durable as the program behind it: try a power cut before you trust it",
}


def check_place(directory: str, probe_bytes: int | None) -> Iterator[Finding]:
    """What the filesystem does when a save uses it.

    Args:
        probe_bytes: of the file by which the speed is measured; None leaves that out.
    """
    place = filesystem(directory)
    warning = _FILESYSTEMS.get(place.kind) or _FILESYSTEMS.get(place.kind.partition(".")[0])
    detail = f"{place.kind} from {place.source} at {place.mount}" + (f"; it {warning}" if warning else "")
    yield Finding("filesystem", WARNING if warning else OK, detail, asdict(place))
    try:
        with probes.scratch(directory) as store:
            yield _tried("create-once", lambda: _create_once(store))
            yield _tried("fsync", lambda: _fsync(store))
            yield _direct_io(store)
            if probe_bytes is not None:
                yield _tried("speed", lambda: _speed(store, min(probe_bytes, room(directory).free_bytes // 4)))
    except (HoldfastError, OSError) as error:
        yield _failure("write", error)


def check_room(directory: str, next_bytes: int | None, recycled_bytes: int = 0) -> Finding:
    """Whether the next checkpoint fits.

    Args:
        next_bytes: of it; None where nobody knows. recycled_bytes: of retired files, which it may be written over.
    """
    found = room(directory)
    facts = {**asdict(found), "next_bytes": next_bytes, "recycled_bytes": recycled_bytes}
    text = f"{size(found.free_bytes)} free of {size(found.total_bytes)}"
    if next_bytes is None:
        return Finding("room", OK, text, facts)
    times = (found.free_bytes + recycled_bytes) // max(next_bytes, 1)
    text += f"; the next checkpoint needs up to {size(next_bytes)}"
    if times == 0:
        return Finding("room", FAILED, f"{text}: it does not fit. Free space, or `holdfast prune`", facts, NO_SPACE)
    return Finding("room", OK if times > 1 else WARNING, f"{text}" + ("" if times > 1 else ": it fits once"), facts)


def check_machine(next_bytes: int | None) -> Iterator[Finding]:
    """Memory and limits, against a checkpoint of `next_bytes`."""
    memory = available_memory()
    is_short = memory is not None and next_bytes is not None and memory < next_bytes
    text = "unknown" if memory is None else f"{size(memory)} available"
    if is_short:
        text += f"; `load` of a whole checkpoint needs {size(next_bytes or 0)}: `open` and `restore` need less"
    yield Finding("memory", WARNING if is_short else OK, text, {"available_bytes": memory})
    files, locked = limit(resource.RLIMIT_NOFILE), limit(resource.RLIMIT_MEMLOCK)
    few = files is not None and files < _LEAST_OPEN_FILES
    text = f"open files {files if files is not None else 'unlimited'}" + (": raise `ulimit -n`" if few else "")
    text += f", locked memory {size(locked) if locked is not None else 'unlimited'}"
    yield Finding("limits", WARNING if few else OK, text, {"nofile": files, "memlock_bytes": locked})


def _tried(name: str, probe: Callable[[], Finding]) -> Finding:
    try:
        return probe()
    except (HoldfastError, OSError) as error:
        return _failure(name, error)


def _failure(name: str, error: Exception) -> Finding:
    code = error.exit_code if isinstance(error, HoldfastError) else UNAVAILABLE
    return Finding(name, FAILED, str(error), exit_code=code)


def _create_once(store: LocalStore) -> Finding:
    if probes.is_create_once(store):
        return Finding("create-once", OK, "the second of two creates of one name fails")
    detail = "a second create of a name succeeded: two jobs could both commit a step. Use another filesystem"
    return Finding("create-once", FAILED, detail, exit_code=UNAVAILABLE)


def _fsync(store: LocalStore) -> Finding:
    found = probes.fsync_latency(store)
    detail = f"{found.median_seconds * 1e3:.2f} ms, at most {found.max_seconds * 1e3:.2f} ms"
    is_slow = found.median_seconds > _SLOW_FSYNC_SECONDS
    return Finding("fsync", WARNING if is_slow else OK, detail + ("; a save waits for several" if is_slow else ""), asdict(found))


def _direct_io(store: LocalStore) -> Finding:
    if probes.has_direct_io(store):
        return Finding("direct-io", OK, "works", {"works": True})
    return Finding("direct-io", WARNING, "does not work here; saves go through the page cache, slower", {"works": False})


def _speed(store: LocalStore, nbytes: int) -> Finding:
    found = probes.speed(store, nbytes)
    fresh, over, read = (f"{size(x)}/s" for x in (found.fresh, found.over_existing, found.read))
    detail = f"writes {fresh} to new blocks, {over} over existing ones; reads {read}"
    return Finding("speed", OK, detail, {f"{name}_bytes_per_second": value for name, value in asdict(found).items()})
