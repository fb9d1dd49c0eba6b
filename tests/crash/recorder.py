"""Recorder: the system calls by which the local store changes a disk, in the order in which they were complete.

While it is entered it stands between holdfast and `holdfast.store.posix` and notes each call that changes something
under a root: what it did, to which inode, and for an fsync from where in the code it came. Files and directories are
numbered by the recorder, for a filesystem gives the number of a removed inode to the next one. Nothing here knows
what a crash is: that is `disk`.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

ROOT = 0
"""The inode of the root directory; the others are counted from 1."""


@dataclass(frozen=True, slots=True)
class Create:
    """A new empty file got its first name: open(2) with O_CREAT where nothing was."""

    path: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Write:
    path: str
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    path: str
    inode: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Allocate:
    """Zeros up to `nbytes`, where the file was shorter."""

    path: str
    inode: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fsync:
    path: str
    inode: int
    covers: int
    """The operations before this one in the recording were complete when the fsync began; those after it were not, even
    if they were complete when it ended, and it promises nothing about them."""
    stack: tuple[str, ...]
    """Where it was called, innermost first, as `file:line function`: the frames of the package, without posix.py."""


@dataclass(frozen=True, slots=True)
class Link:
    path: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Rename:
    path: str
    """The new path."""
    old_directory: int
    old_name: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Unlink:
    path: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    path: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class RemoveDirectory:
    path: str
    directory: int
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Mark:
    """What the program said between two operations, for example that a save has returned."""

    label: str
    payload: Any


Operation = Create | Write | Truncate | Allocate | Fsync | Link | Rename | Unlink | MakeDirectory | RemoveDirectory | Mark


@dataclass(frozen=True, slots=True)
class Tree:
    """Directories and files under a root, by inode."""

    directories: dict[int, dict[str, int]]
    """Directory to the inodes it names."""
    files: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Recording:
    base: Tree
    """What was there when recording began, all of it durable."""
    operations: list[Operation]
    strangers: list[str] = field(default_factory=list)
    """Paths under the root that were used but whose creation was not seen: something went around posix.py."""


class Recorder:
    """Records what is done under `root` from entering to leaving, in any number of threads; only one at a time.

    `posix` is the module whose functions are replaced meanwhile, and `package` the directory whose frames are kept as
    the call site of an fsync.
    """

    WRAPPED = (
        "open_fd", "close_fd", "pwrite", "fsync", "truncate", "allocate", "link", "rename", "unlink", "mkdir", "rmdir",
    )  # fmt: skip

    def __init__(self, root: Path | str, posix: ModuleType, package: Path | str | None = None) -> None:
        self.root = os.path.realpath(root)
        self.posix = posix
        self.package = os.path.realpath(package or Path(posix.__file__ or "").parents[1])
        self._real: dict[str, Callable[..., Any]] = {}
        self._lock = threading.RLock()
        self._inodes: dict[tuple[int, int], int] = {}
        self._last = ROOT
        self.recording = Recording(Tree({}, {}), [])

    def __enter__(self) -> Recorder:
        self.recording = Recording(self._survey(), [])
        for name in self.WRAPPED:
            self._real[name] = getattr(self.posix, name)
            setattr(self.posix, name, getattr(self, name))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, real in self._real.items():
            setattr(self.posix, name, real)

    def announce(self, label: str, payload: Any = None) -> None:
        """Note that the program has come to this point: all that it did before is complete."""
        with self._lock:
            self.recording.operations.append(Mark(label, payload))

    # What stands in for the functions of posix.py. Changes of names hold the lock, so that their order is that of the
    # kernel; writes and fsyncs run side by side as without the recorder.

    def open_fd(self, path: str, flags: int, mode: int = 0o644) -> int:
        with self._lock:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            fd: int = self._real["open_fd"](path, flags, mode)
            place = self._place(path)
            if place is not None and is_new:
                self._log(Create(self._relative(path), *place, self._number(os.fstat(fd))))
            elif place is not None and flags & os.O_TRUNC:
                self._log(Truncate(self._relative(path), self._known(os.fstat(fd), path), 0))
            return fd

    def close_fd(self, fd: int) -> None:
        self._real["close_fd"](fd)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        taken: int = self._real["pwrite"](fd, data, offset)
        if file := self._open_file(fd):
            self._log(Write(*file, offset, bytes(memoryview(data).cast("B")[:taken])))
        return taken

    def fsync(self, fd: int) -> None:
        covers = len(self.recording.operations)
        self._real["fsync"](fd)
        stack = tuple(self._stack(sys._getframe(1)))
        if file := self._open_file(fd):
            self._log(Fsync(*file, covers, stack))

    def truncate(self, fd: int, nbytes: int) -> None:
        self._real["truncate"](fd, nbytes)
        if file := self._open_file(fd):
            self._log(Truncate(*file, nbytes))

    def allocate(self, fd: int, nbytes: int) -> bool:
        is_reserved: bool = self._real["allocate"](fd, nbytes)
        if is_reserved and (file := self._open_file(fd)):
            self._log(Allocate(*file, nbytes))
        return is_reserved

    def link(self, source: str, target: str) -> None:
        with self._lock:
            self._real["link"](source, target)
            if place := self._place(target):
                self._log(Link(self._relative(target), *place, self._known(os.lstat(target), source)))

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            old, new = self._place(source), self._place(target)
            replaced = os.lstat(target) if new and os.path.lexists(target) else None
            self._real["rename"](source, target)
            if old and new:
                inode = self._known(os.lstat(target), source)
                self._log(Rename(self._relative(target), *old, *new, inode))
            elif old or new:
                raise AssertionError(f"{source} -> {target} crosses the border of {self.root}: record from higher up")
            if replaced:
                self._forget(replaced)

    def unlink(self, path: str) -> None:
        with self._lock:
            place, gone = self._place(path), os.lstat(path) if os.path.lexists(path) else None
            self._real["unlink"](path)
            if place and gone:
                self._log(Unlink(self._relative(path), *place, self._known(gone, path)))
                self._forget(gone)

    def mkdir(self, path: str) -> None:
        with self._lock:
            self._real["mkdir"](path)
            if place := self._place(path):
                self._log(MakeDirectory(self._relative(path), *place, self._number(os.lstat(path))))

    def rmdir(self, path: str) -> None:
        with self._lock:
            place, gone = self._place(path), os.lstat(path) if os.path.lexists(path) else None
            self._real["rmdir"](path)
            if place and gone:
                self._log(RemoveDirectory(self._relative(path), *place, self._known(gone, path)))
                self._inodes.pop((gone.st_dev, gone.st_ino), None)

    # Numbers of inodes.

    def _survey(self) -> Tree:
        """What lies under the root now; hard links share a number."""
        tree = Tree({}, {})
        root = os.stat(self.root)
        self._inodes[root.st_dev, root.st_ino] = ROOT
        for directory, _, _ in os.walk(self.root):
            names = tree.directories.setdefault(self._known(os.stat(directory), directory), {})
            for entry in os.scandir(directory):
                status = entry.stat(follow_symlinks=False)
                inode = self._inodes.get((status.st_dev, status.st_ino)) or self._number(status)
                names[entry.name] = inode
                if entry.is_dir(follow_symlinks=False):
                    tree.directories[inode] = {}
                else:
                    tree.files[inode] = Path(entry.path).read_bytes()
        return tree

    def _number(self, status: os.stat_result) -> int:
        self._last += 1
        self._inodes[status.st_dev, status.st_ino] = self._last
        return self._last

    def _known(self, status: os.stat_result, path: str) -> int:
        inode = self._inodes.get((status.st_dev, status.st_ino))
        if inode is None:
            self.recording.strangers.append(path)
            return self._number(status)
        return inode

    def _forget(self, gone: os.stat_result) -> None:
        """The kernel may give the number of a file that lost its last name to another one."""
        if gone.st_nlink == 1:
            self._inodes.pop((gone.st_dev, gone.st_ino), None)

    def _place(self, path: str) -> tuple[int, str] | None:
        """The directory that holds the last part of `path`, and that part; None outside the root."""
        parent, name = os.path.split(os.path.abspath(path))
        parent = os.path.realpath(parent)
        if parent != self.root and not parent.startswith(self.root + os.sep):
            return None
        return self._known(os.stat(parent), parent), name

    def _relative(self, path: str) -> str:
        return os.path.relpath(os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path)), self.root)

    def _open_file(self, fd: int) -> tuple[str, int] | None:
        """The path and the number of an open file; None outside the root, and for a file that has no name left."""
        status = os.fstat(fd)
        with self._lock:
            path = os.readlink(f"/proc/self/fd/{fd}")
            if status.st_nlink and (path + os.sep).startswith(self.root + os.sep):
                return os.path.relpath(path, self.root), self._known(status, path)
            return None

    def _log(self, operation: Operation) -> None:
        with self._lock:
            self.recording.operations.append(operation)

    def _stack(self, frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(self.package + os.sep) and code.co_filename != self.posix.__file__:
                yield f"{os.path.relpath(code.co_filename, self.package)}:{frame.f_lineno} {code.co_name}"
            frame = frame.f_back


def functions_of(module: ModuleType) -> list[str]:
    """The public functions defined in `module`: what a recorder has to stand in for."""
    return sorted(name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_")
