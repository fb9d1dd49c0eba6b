"""The sequel: what another process does with a run after the first was killed, recorded as one sequence with the first.

The second process sees all that the first one had done, durable or not. A power cut then may lose what the first one
had not made durable, unless the second one did that.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.store import posix

from .disk import Disk
from .recorder import ROOT, Fsync, Mark, Operation, Recorder, Recording, Tree
from .scenarios import Stage

NEW_INODES = 1 << 20
"""The numbers of inodes that the second process makes begin here."""


def with_sequel(first: Recording, killed_at: int, play: Callable[[Stage], None], directory: Path) -> Recording:
    """The recording of `first` up to the kill, and of what `play` does afterwards, below `directory`."""
    disk = Disk(first.base)
    for index, operation in enumerate(first.operations[:killed_at]):
        disk.apply(index, operation)
    state = disk.state(disk.everything())
    state.materialize(directory)
    try:
        stage = Stage(directory)
        with Recorder(directory, posix) as stage.recorder:
            play(stage)
        second = stage.recorder.recording
    finally:
        shutil.rmtree(directory)
    numbers = same_inodes(second.base, state.tree)
    later = [renumbered(operation, numbers, killed_at) for operation in second.operations]
    return Recording(first.base, [*first.operations[:killed_at], *later], second.strangers)


def same_inodes(found: Tree, known: Tree, here: int = ROOT, there: int = ROOT) -> dict[int, int]:
    """The inodes of `found` to those of `known`, which has the same names."""
    numbers = {here: there}
    for name, inode in found.directories[here].items():
        if inode in found.directories:
            numbers |= same_inodes(found, known, inode, known.directories[there][name])
        else:
            numbers[inode] = known.directories[there][name]
    return numbers


def renumbered(operation: Operation, numbers: dict[int, int], before: int) -> Operation:
    """The operation as one that follows `before` others, on the inodes of those."""
    if isinstance(operation, Mark):
        return operation
    names = [f.name for f in dataclasses.fields(operation) if f.name in ("inode", "directory", "old_directory")]
    new: dict[str, Any] = {}
    for name in names:
        inode = getattr(operation, name)
        new[name] = numbers.get(inode, NEW_INODES + inode)
    if isinstance(operation, Fsync):
        new["covers"] = operation.covers + before
    return dataclasses.replace(operation, **new)
