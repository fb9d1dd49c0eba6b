"""The sequel: what another process does with a run after the first was killed, recorded as one sequence with the first.

The second process sees all that the first one had done, durable or not. A power cut then may lose what the first one
had not made durable, unless the second one did that.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.store import posix

from .disk import Disk
from .judge import announced
from .recorder import ROOT, Fsync, Mark, Operation, Recorder, Recording, Tree
from .scenarios import RUN, Stage
from .truth import Facts, Window, observe

NEW_INODES = 1 << 20
"""The numbers of inodes that the second process makes begin here."""

Deed = Callable[[Stage], None]


def prune(stage: Stage) -> None:
    stage.prune(1, recycle=True)


def save(stage: Stage) -> None:
    lineage = stage.facts[RUN].lineage
    stage.save(lineage[-1].step + 1 if lineage else 1, 500)


def prune_and_save(stage: Stage) -> None:
    prune(stage)
    save(stage)


def pin_again(stage: Stage) -> None:
    stage.pin(2, "again")
    prune(stage)


def prune_to_weights_again(stage: Stage) -> None:
    stage.prune(2, weights=1)


def sequels(first: Recording, then: Deed, directory: Path) -> Iterator[tuple[int, Recording]]:
    """For each fsync, the recording of a process that is killed before it, and of what another does `then`."""
    for killed_at, operation in enumerate(first.operations):
        if isinstance(operation, Fsync):
            place = directory.with_name(f"{directory.name}-{killed_at}")  # a path of its own, as for a new process
            yield killed_at, with_sequel(first, killed_at, then, place)


def with_sequel(first: Recording, killed_at: int, then: Deed, directory: Path) -> Recording:
    """The recording of `first` up to the kill, and of what another process does `then`.

    `directory`, which must not exist, is where the second one works. What it finds without having been promised may be
    lost; what the first one had announced, and what itself announces, may not.
    """
    disk = Disk(first.base)
    for index, operation in enumerate(first.operations[:killed_at]):
        disk.apply(index, operation)
    state = disk.state(disk.everything())
    state.materialize(directory)
    try:
        found = observe(directory / RUN).facts()
        stage = Stage(directory)
        stage.facts[RUN] = found
        with Recorder(directory, posix) as stage.recorder:
            then(stage)
        second = stage.recorder.recording
    finally:
        shutil.rmtree(directory)
    numbers = same_inodes(second.base, state.tree)
    promised = announced(first, killed_at)[RUN]
    later: list[Operation] = []
    for operation in second.operations:
        if isinstance(operation, Mark):
            later.append(Mark(operation.label, {RUN: weakened(operation.payload[RUN], found, promised)}))
        else:
            later.append(renumbered(operation, numbers, killed_at))
    return Recording(first.base, [*first.operations[:killed_at], *later], second.strangers)


def weakened(window: Window, found: Facts, promised: Window) -> Window:
    """What was found without having been promised may be lost, but not all that was promised with it."""
    own = window.may - {*found.lineage, *found.abandoned}
    return dataclasses.replace(
        window,
        latest=window.latest if window.latest <= own else window.latest | promised.latest,
        must=window.must & (promised.must | own),
        may=window.may | promised.may,
        pins_must=window.pins_must & promised.pins_must,
        pins_may=window.pins_may | promised.pins_may,
        notes_must=window.notes_must & promised.notes_must,
        notes_may=window.notes_may | promised.notes_may,
    )


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
    assert not isinstance(operation, Mark)
    names = [f.name for f in dataclasses.fields(operation) if f.name in ("inode", "directory", "old_directory")]
    new: dict[str, Any] = {}
    for name in names:
        inode = getattr(operation, name)
        new[name] = numbers.get(inode, NEW_INODES + inode)
    if isinstance(operation, Fsync):
        new["covers"] = operation.covers + before
    return dataclasses.replace(operation, **new)
