"""Nothing goes around posix.py: what strace sees under a run is what the recorder saw.

One process, under strace and with the recorder in it, does every kind of operation. The changing system calls on each
path must be the same in both accounts, in order; only writes into one file, which come from several threads, are
compared as a set. A writable shared mapping would be a way around both, so there must be none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .recorder import (
    Allocate,
    Create,
    Fsync,
    Link,
    MakeDirectory,
    Operation,
    RemoveDirectory,
    Rename,
    Truncate,
    Unlink,
    Write,
)
from .scenarios import Stage, search_path

pytestmark = pytest.mark.slow

CALLS = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,splice,fsync,fdatasync,sync_file_range,"
    "sync,syncfs,truncate,ftruncate,fallocate,link,linkat,symlink,symlinkat,rename,renameat,renameat2,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir,mknod,mknodat,mmap"
)

Event = tuple[str, str, int]
"""What was done, to which path below the root, and a size or an offset."""


def play(stage: Stage) -> None:
    """Every kind of operation, all of it recorded."""
    with stage.recorded():
        stage.save(1, 101)
        stage.save(2, 202)
        stage.save(3, 303)
        stage.note(3, "loss", 0.5)
        stage.pin(2, "kept")
        stage.prune(1)
        stage.unpin("kept")
        stage.prune(1, recycle=True)
        stage.save(4, 404)
        stage.rollback(3)
        stage.save_that_fails(5, 505, after_bytes=30_000)
        stage.save(6, 606)
        stage.copy(6, "copy")


def strace(*options: str) -> list[str]:
    return ["strace", "-f", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={CALLS}", *options]


def test_what_strace_sees_is_what_the_recorder_saw(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace not found")
    probe = subprocess.run([*strace("-o", os.devnull), "true"], capture_output=True, text=True, timeout=30)
    if probe.returncode:
        pytest.skip(f"strace is not permitted here: {probe.stderr.strip()}")
    root, log, account = tmp_path / "disk", tmp_path / "strace.log", tmp_path / "recorder.json"
    root.mkdir()
    child = [sys.executable, "-m", __name__, str(root), str(account)]
    subprocess.run([*strace("-o", str(log)), *child], check=True, timeout=100, env=os.environ | {"PYTHONPATH": search_path()})
    seen = list(events_of_strace(log.read_text(errors="replace"), str(root)))
    recorded = [(kind, path, number) for kind, path, number in json.loads(account.read_text())]
    assert {kind for kind, _, _ in recorded} >= {"create", "write", "fsync", "link", "rename", "unlink", "mkdir"}
    ours, theirs = by_path(recorded), by_path(seen)
    different = [path for path in sorted({*ours, *theirs}) if ours.get(path) != theirs.get(path)]
    assert not different, "\n".join(f"{path}: the recorder saw {ours.get(path)}, strace {theirs.get(path)}" for path in different)


def by_path(events: list[Event]) -> dict[str, tuple[list[Event], Counter[Event]]]:
    """For each path, its changes in order, and its writes as a multiset."""
    found: dict[str, tuple[list[Event], Counter[Event]]] = {}
    for event in events:
        ordered, writes = found.setdefault(event[1], ([], Counter()))
        if event[0] == "write":
            writes[event] += 1
        else:
            ordered.append(event)
    return found


def events_of_recorder(operations: list[Operation]) -> Iterator[Event]:
    for operation in operations:
        match operation:
            case Write():
                yield "write", operation.path, operation.offset
            case Truncate():
                yield "truncate", operation.path, operation.nbytes
            case Allocate():
                yield "allocate", operation.path, operation.nbytes
            case Create():
                yield "create", operation.path, 0
            case Fsync():
                yield "fsync", operation.path, 0
            case Link():
                yield "link", operation.path, 0
            case Rename():
                yield "rename", operation.path, 0
            case Unlink():
                yield "unlink", operation.path, 0
            case MakeDirectory():
                yield "mkdir", operation.path, 0
            case RemoveDirectory():
                yield "rmdir", operation.path, 0


_CALL = re.compile(r"^(?P<pid>\d+) +(?P<name>\w+)\((?P<arguments>.*)\) += (?P<result>-?\d+)(?:<.*>)?.*$")
_UNFINISHED = re.compile(r"^(?P<pid>\d+) +(?P<start>\w+\(.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"^(?P<pid>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)$")
_DESCRIPTOR = re.compile(r"\d+<(/[^>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def whole_lines(log: str) -> Iterator[str]:
    """The lines of strace, with those that another thread interrupted put together where they ended."""
    open_calls: dict[str, str] = {}
    for line in log.splitlines():
        if match := _UNFINISHED.match(line):
            open_calls[match["pid"]] = match["start"]
        elif match := _RESUMED.match(line):
            yield f"{match['pid']} {open_calls.pop(match['pid'], '')}{match['rest']}"
        else:
            yield line


def events_of_strace(log: str, root: str) -> Iterator[Event]:
    """The successful changes under `root`; a call that the recorder does not know is named as itself."""
    there: set[str] = set()
    for line in whole_lines(log):
        call = _CALL.match(line)
        if call is None or root not in line or int(call["result"]) < 0:
            continue
        name, arguments = call["name"], call["arguments"]
        paths = [p for p in _DESCRIPTOR.findall(arguments) + _QUOTED.findall(arguments) if p.startswith(root)]
        if not paths:
            continue
        path = os.path.relpath(paths[-1], root)
        numbers = [int(word) for word in re.findall(r"(?<=, )-?\d+(?=[,)]|$)", arguments)]
        match name:
            case "open" | "openat" | "creat":
                if "O_CREAT" in arguments and path not in there:
                    there.add(path)
                    yield "create", path, 0
                elif "O_TRUNC" in arguments:
                    yield "truncate", path, 0
            case "pwrite64":
                if not paths[-1].endswith(" (deleted)"):
                    yield "write", path, numbers[-1]
            case "fsync" | "fdatasync":
                yield "fsync", path, 0
            case "ftruncate":
                yield "truncate", path, numbers[-1]
            case "fallocate":
                yield "allocate", path, numbers[-1]
            case "link" | "linkat":
                there.add(path)
                yield "link", path, 0
            case "rename" | "renameat" | "renameat2":
                there.discard(os.path.relpath(paths[0], root))
                there.add(path)
                yield "rename", path, 0
            case "unlink" | "unlinkat" | "rmdir":
                there.discard(path)
                yield "rmdir" if name == "rmdir" or "AT_REMOVEDIR" in arguments else "unlink", path, 0
            case "mkdir" | "mkdirat":
                yield "mkdir", path, 0
            case "mmap":
                if "MAP_SHARED" in arguments and "PROT_WRITE" in arguments:
                    yield "writable mapping", path, 0
            case _:
                yield name, path, 0


def main() -> None:
    root, account = Path(sys.argv[1]), Path(sys.argv[2])
    stage = Stage(root)
    play(stage)
    assert stage.recorder is not None
    recording = stage.recorder.recording
    assert recording.strangers == [], recording.strangers
    events: list[Any] = list(events_of_recorder(recording.operations))
    account.write_text(json.dumps(events))


if __name__ == "__main__":
    main()
