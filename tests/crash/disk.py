"""Disk: every state in which a crash may leave a recorded sequence of system calls.

The disk is the strictest that a journaled filesystem may be. An fsync of a file makes durable its bytes and its size,
and no name; an fsync of a directory makes durable the changes of names in that directory, and nothing of the files.
What is not durable may be there after a crash or not, each change by itself and in any order; a write may also be
torn, at sectors of 4096 bytes and, where the file grew, at any byte. Two rules join changes, as the journals do: a
rename never loses both names (the old one goes only where the new one came), and a directory is removed only after
what was removed from it.

What the states of a recording cover: at each prefix, everything applied and only the durable applied; where it ends
with a write, that write torn; and where it ends before an fsync, before a mark or with the recording, the last write
torn at several points, and the subsets of what is not durable: all of them up to `EXHAUSTIVE` changes, beyond that
each one dropped, each one kept, and seeded random ones. The subsets at any other prefix are among those of the next,
for no change is made durable between.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .recorder import (
    ROOT,
    Allocate,
    Create,
    Fsync,
    Link,
    MakeDirectory,
    Mark,
    Operation,
    Recording,
    RemoveDirectory,
    Rename,
    Tree,
    Truncate,
    Unlink,
    Write,
)

SECTOR = 4096
EXHAUSTIVE = 6

Kept = tuple[tuple[int, int], ...]
"""Of a change that is not durable, what the crash left: () is nothing, `WHOLE` all, and for a write the ranges of its
bytes that arrived. The file grows to the end of the last range, also where that is empty."""

NOTHING: Kept = ()
WHOLE: Kept = ((0, -1),)


@dataclass(frozen=True, slots=True)
class Data:
    """A change of a file's bytes or size."""

    index: int
    """Of the operation in the recording."""
    operation: Write | Truncate | Allocate

    @property
    def inode(self) -> int:
        return self.operation.inode


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a directory comes to mean `inode`, or, where `is_removal`, ceases to."""

    index: int
    directory: int
    name: str
    inode: int
    is_removal: bool = False
    needs: tuple[Name, ...] = ()
    """Is there after a crash only if these are."""
    takes_along: bool = False
    """Where this becomes durable, so does what it needs; else it becomes durable only after that."""


@dataclass(frozen=True, slots=True)
class CrashState:
    """What a crash left."""

    tree: Tree
    """The inodes that no name reaches do not matter and may be among them."""
    key: int
    """Equal for equal trees."""

    def materialize(self, directory: Path) -> None:
        """Build the tree in `directory`, which must not exist. Files of one inode are hard links of each other."""
        first: dict[int, str] = {}

        def build(inode: int, path: str) -> None:
            os.mkdir(path)
            for name, child in self.tree.directories[inode].items():
                target = f"{path}/{name}"
                if child in self.tree.directories:
                    build(child, target)
                elif child in first:
                    os.link(first[child], target)
                else:
                    fd = os.open(target, os.O_CREAT | os.O_WRONLY, 0o644)
                    os.write(fd, self.tree.files[child])
                    os.close(fd)
                    first[child] = target

        build(ROOT, str(directory))


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash state and how it came about."""

    prefix: int
    """How many operations were complete."""
    how: str
    """all, durable, torn, subset, lost fsync, or lost after a kill."""
    changes: tuple[Data | Name, ...]
    """What was not durable, in order."""
    choice: tuple[Kept, ...]
    """What the crash left of each."""
    state: CrashState

    def describe(self, recording: Recording) -> str:
        last = _phrase(recording.operations[self.prefix - 1]) if self.prefix else "nothing"
        lines = [f"crash after operation {self.prefix} of {len(recording.operations)} ({last}); {self.how}"]
        for change, kept in zip(self.changes, self.choice, strict=True):
            fate = {NOTHING: "dropped", WHOLE: "kept"}.get(kept, f"torn, kept {list(kept)}")
            operation = recording.operations[change.index]
            what = _phrase(operation)
            if isinstance(operation, Rename) and isinstance(change, Name) and change.is_removal:
                what = f"{what}: the old name goes"
            lines.append(f"  {fate:8} {change.index}: {what}")
        return "\n".join(lines)


class Disk:
    """A disk that applies operations one by one and tells in which states a crash could leave it now."""

    def __init__(self, base: Tree) -> None:
        self.directories = {inode: dict(names) for inode, names in base.directories.items()}
        self.files = dict(base.files)
        self.pending: list[Data | Name] = []
        self._synced_late: set[Name] = set()
        """Removals whose directory was fsynced while what they need was not durable."""
        self._contents: dict[tuple[bytes, tuple[tuple[int, Kept], ...]], bytes] = {}

    def apply(self, index: int, operation: Operation) -> None:
        """Operation `index` of the recording is complete."""
        match operation:
            case Mark():
                pass
            case Write() | Truncate() | Allocate():
                self.pending.append(Data(index, operation))
            case Create() | Link():
                self.files.setdefault(operation.inode, b"")
                self.pending.append(Name(index, operation.directory, operation.name, operation.inode))
            case MakeDirectory():
                self.directories[operation.inode] = {}
                self.pending.append(Name(index, operation.directory, operation.name, operation.inode))
            case Unlink():
                self.pending.append(Name(index, operation.directory, operation.name, operation.inode, is_removal=True))
            case RemoveDirectory():
                inside = tuple(c for c in self.pending if isinstance(c, Name) and c.directory == operation.inode)
                gone = Name(index, operation.directory, operation.name, operation.inode, True, inside, takes_along=True)
                self.pending.append(gone)
            case Rename():
                new = Name(index, operation.directory, operation.name, operation.inode)
                old = Name(index, operation.old_directory, operation.old_name, operation.inode, True, (new,))
                self.pending += [new, old]
            case Fsync():
                self._sync(operation)

    def _sync(self, fsync: Fsync) -> None:
        durable: set[Data | Name] = set()
        for change in self.pending:
            if change.index >= fsync.covers:
                continue
            if isinstance(change, Data):
                if change.inode == fsync.inode:
                    durable.add(change)
            elif change.directory == fsync.inode or change in self._synced_late:
                needed = [need for need in change.needs if need in self.pending and need not in durable]
                if change.takes_along:
                    durable |= _with_needs(change)
                elif needed:
                    self._synced_late.add(change)
                else:
                    durable.add(change)
        ordered = [change for change in self.pending if change in durable]
        self.directories, self.files = self._applied([(change, WHOLE) for change in ordered])
        self.pending = [change for change in self.pending if change not in durable]

    def state(self, choice: Sequence[Kept]) -> CrashState:
        """What is left where a crash keeps `choice` of the pending changes."""
        tree = Tree(*self._applied(list(zip(self.pending, choice, strict=True))))
        return CrashState(tree, hash(tuple(_items(tree, ROOT, ""))))

    def _applied(self, changes: list[tuple[Data | Name, Kept]]) -> tuple[dict[int, dict[str, int]], dict[int, bytes]]:
        directories, files = dict(self.directories), dict(self.files)
        copied: set[int] = set()
        writes: dict[int, list[tuple[int, Data, Kept]]] = {}
        lost = {change for change, kept in changes if isinstance(change, Name) and not kept}
        for change, kept in changes:
            if isinstance(change, Data):
                if kept:
                    writes.setdefault(change.inode, []).append((change.index, change, kept))
                continue
            if change in lost or any(need in lost for need in change.needs):
                lost.add(change)
                continue
            if change.directory not in copied:
                directories[change.directory] = dict(directories[change.directory])
                copied.add(change.directory)
            names = directories[change.directory]
            if not change.is_removal:
                names[change.name] = change.inode
            elif names.get(change.name) == change.inode:
                del names[change.name]
        for inode, kept_writes in writes.items():
            before = files[inode]
            known = (before, tuple((index, kept) for index, _, kept in kept_writes))
            if known not in self._contents:
                self._contents[known] = _written(before, [(c.operation, kept) for _, c, kept in kept_writes])
            files[inode] = self._contents[known]
        return directories, files

    # Choices: what a crash may keep of the pending changes.

    def everything(self) -> tuple[Kept, ...]:
        return (WHOLE,) * len(self.pending)

    def only_the_durable(self) -> tuple[Kept, ...]:
        return (NOTHING,) * len(self.pending)

    def torn_last_write(self, *, at_many_points: bool) -> Iterator[tuple[Kept, ...]]:
        """The last write that is not durable is torn; the other changes are all there or all lost."""
        for last, change in reversed(list(enumerate(self.pending))):
            if isinstance(change, Data) and isinstance(change.operation, Write):
                tears = _tears(change.operation)
                for kept in tears if at_many_points else tears[len(tears) // 2 :][:1]:
                    for others in (self.everything(), self.only_the_durable()):
                        yield (*others[:last], kept, *others[last + 1 :])
                return

    def losses(self, lost: Callable[[Data | Name], bool]) -> Iterator[tuple[Kept, ...]]:
        """What is `lost` is dropped: all of it, each change of a name, each file's data; everything else is kept."""
        groups: dict[object, list[int]] = {}
        for index, change in enumerate(self.pending):
            if lost(change):
                groups.setdefault("all", []).append(index)
                groups.setdefault(index if isinstance(change, Name) else ("data", change.inode), []).append(index)
        for group in groups.values():
            yield tuple(NOTHING if index in group else WHOLE for index in range(len(self.pending)))

    def subsets(self, count: int, rng: random.Random) -> Iterator[tuple[Kept, ...]]:
        """All subsets of what is pending where that is little; else each dropped, each kept, `count` random ones."""
        pending = len(self.pending)
        if pending <= EXHAUSTIVE:
            yield from itertools.product((WHOLE, NOTHING), repeat=pending)
            return
        for index in range(pending):
            yield tuple(NOTHING if index == other else WHOLE for other in range(pending))
            yield tuple(WHOLE if index == other else NOTHING for other in range(pending))
        for _ in range(count):
            share = rng.choice((0.2, 0.5, 0.8))
            yield tuple(self._random(change, share, rng) for change in self.pending)

    @staticmethod
    def _random(change: Data | Name, share: float, rng: random.Random) -> Kept:
        if isinstance(change, Data) and isinstance(change.operation, Write) and rng.random() < 0.25:
            return _random_sectors(change.operation, rng)
        return WHOLE if rng.random() < share else NOTHING


def crashes(recording: Recording, *, subsets: int = 16, seed: int = 0) -> Iterator[Crash]:
    """Every crash of `recording` that the module's description names; equal states at one prefix are given once."""
    rng = random.Random(seed)
    disk = Disk(recording.base)
    for prefix, following in enumerate([*recording.operations, None]):
        is_last = following is None or isinstance(following, Fsync | Mark)
        yield from _distinct(disk, prefix, _choices(disk, is_last, subsets, rng))
        if following is not None:
            disk.apply(prefix, following)


def crashes_without(recording: Recording, missing: Callable[[Fsync], bool]) -> Iterator[Crash]:
    """The crashes that are possible only because the code lacks the fsyncs that are `missing`."""
    disk, whole = Disk(recording.base), Disk(recording.base)
    for prefix, following in enumerate([*recording.operations, None]):
        durable_else = set(disk.pending) - set(whole.pending)
        if durable_else:
            lost = disk.losses(durable_else.__contains__)
            yield from _distinct(disk, prefix, (("lost fsync", choice) for choice in lost))
        if following is not None:
            whole.apply(prefix, following)
            if not (isinstance(following, Fsync) and missing(following)):
                disk.apply(prefix, following)


def crashes_after_kill(recording: Recording, killed_at: int) -> Iterator[Crash]:
    """Power cuts that lose what a process had done which was killed after so many operations, or nothing.

    What comes later in the recording was done by another process, which saw all that the first one had done.
    """
    disk = Disk(recording.base)
    for prefix, following in enumerate([*recording.operations, None]):
        if prefix >= killed_at and (following is None or isinstance(following, Fsync | Mark)):
            lost = disk.losses(lambda change: change.index < killed_at)
            choices = itertools.chain([disk.everything()], lost)
            yield from _distinct(disk, prefix, (("lost after a kill", choice) for choice in choices))
        if following is not None:
            disk.apply(prefix, following)


def _distinct(disk: Disk, prefix: int, choices: Iterator[tuple[str, tuple[Kept, ...]]]) -> Iterator[Crash]:
    seen: set[int] = set()
    for how, choice in choices:
        state = disk.state(choice)
        if state.key not in seen:
            seen.add(state.key)
            yield Crash(prefix, how, tuple(disk.pending), choice, state)


def _choices(disk: Disk, is_last: bool, subsets: int, rng: random.Random) -> Iterator[tuple[str, tuple[Kept, ...]]]:
    yield "all", disk.everything()
    yield "durable", disk.only_the_durable()
    if is_last or (disk.pending and isinstance(disk.pending[-1], Data)):
        for choice in disk.torn_last_write(at_many_points=is_last):
            yield "torn", choice
    if is_last:
        for choice in disk.subsets(subsets, rng):
            yield "subset", choice


def _with_needs(change: Name) -> set[Data | Name]:
    found: set[Data | Name] = {change}
    for need in change.needs:
        found |= _with_needs(need)
    return found


def _items(tree: Tree, directory: int, path: str) -> Iterator[tuple[str, int, int]]:
    """What a tree consists of; the inode tells which names are one file, and a bytes object keeps its hash."""
    for name, inode in sorted(tree.directories[directory].items()):
        below = f"{path}/{name}"
        if inode in tree.directories:
            yield below, -1, -1
            yield from _items(tree, inode, below)
        else:
            yield below, inode, hash(tree.files[inode])


def _written(before: bytes, operations: list[tuple[Write | Truncate | Allocate, Kept]]) -> bytes:
    content = bytearray(before)
    for operation, kept in operations:
        match operation:
            case Truncate():
                del content[operation.nbytes :]
                content.extend(bytes(operation.nbytes - len(content)))
            case Allocate():
                content.extend(bytes(max(operation.nbytes - len(content), 0)))
            case Write():
                for start, stop in ((0, len(operation.data)),) if kept == WHOLE else kept:
                    end = operation.offset + stop
                    content.extend(bytes(max(end - len(content), 0)))
                    content[operation.offset + start : end] = operation.data[start:stop]
    return bytes(content)


def _sector_bounds(write: Write) -> list[int]:
    """Where sectors of the file begin and end within the bytes of `write`, and its own ends."""
    size = len(write.data)
    first = -write.offset % SECTOR
    return sorted({0, *range(first, size, SECTOR), size})


def _tears(write: Write) -> list[Kept]:
    """A write cut at bytes, cut at sectors, arrived without its beginning, and arrived only as a size."""
    size, bounds = len(write.data), _sector_bounds(write)
    cuts = {1, size // 2, size - 1, bounds[1], bounds[len(bounds) // 2], bounds[-2]} - {0, size}
    heads: list[Kept] = [((0, cut),) for cut in sorted(cuts) if 0 < cut < size]
    tails: list[Kept] = [((bounds[1], size),)] if len(bounds) > 2 else []
    return [*heads, *tails, ((size, size),)]


def _random_sectors(write: Write, rng: random.Random) -> Kept:
    bounds = _sector_bounds(write)
    return tuple(pair for pair in itertools.pairwise(bounds) if rng.random() < 0.5)


def _phrase(operation: Operation) -> str:
    match operation:
        case Mark():
            return f"mark {operation.label}"
        case Write():
            return f"write {operation.path} [{operation.offset}, {operation.offset + len(operation.data)})"
        case Truncate() | Allocate():
            return f"{type(operation).__name__.lower()} {operation.path} to {operation.nbytes}"
        case Rename():
            return f"rename {operation.old_name} to {operation.path}"
        case Fsync():
            return f"fsync {operation.path} at {operation.stack[0] if operation.stack else '?'}"
        case _:
            return f"{type(operation).__name__.lower()} {operation.path}"
