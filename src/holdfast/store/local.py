"""The local store: a directory. Durable by fsync of files and of every directory on the path, create-once by link(2).

Large files go around the page cache in aligned blocks (`O_DIRECT`), several in flight, where the filesystem takes that.
Retired files wait in `.recycle/` to be written over. Readers hold a shared lock, so that nobody writes over what is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import NoSpace, Unavailable
from . import posix
from .base import BLOCK, Capabilities, pieces

_RECYCLE = ".recycle"
_TEMPORARY = ".tmp-"
_STALE_SECONDS = 3600.0
_VECTORS = 512
_Files = list[tuple[str, os.stat_result]]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HINTS = {
    errno.EACCES: "check the permissions of the directory",
    errno.EPERM: "check the permissions of the directory",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.EIO: "the disk failed; look at the kernel's log",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EMFILE: "too many open files: raise `ulimit -n`",
}


@contextlib.contextmanager
def _translated(doing: str, path: str) -> Iterator[None]:
    """Turn OSError into the errors of a store; missing and taken names pass as they are."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except ValueError as error:
        raise Unavailable(f"cannot {doing} {path!r}: {error}") from error
    except OSError as error:
        what = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _FULL:
            raise NoSpace(f"no room to {doing} {path}: {what}; free space or quota, nothing committed was harmed") from error
        hint = _HINTS.get(error.errno or 0, "")
        raise Unavailable(f"cannot {doing} {path}: {what}" + (f"; {hint}" if hint else "")) from error


class LocalStore:
    """A store in a directory of a local or network filesystem.

    Args:
        root: made with the first write, parents included.
        direct: whether to try O_DIRECT.
    """

    capabilities = Capabilities(is_durable=True, is_create_once=True, has_recycling=True, has_locks=True)

    def __init__(self, root: str | os.PathLike[str], direct: bool = True) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.url = self.root
        self._direct = direct
        self._durable_dirs: set[str] = set()

    @property
    def is_default(self) -> bool:
        """Whether another process has the same store by its URL."""
        return self._direct

    def read(self, path: str) -> bytes:
        with _translated("read", self._at(path)), open(self._at(path), "rb") as file:
            return file.read()

    def map(self, path: str) -> Any:
        with _translated("read", self._at(path)), open(self._at(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b""

    def open(self, path: str) -> LocalReader:
        with _translated("open", self._at(path)):
            return LocalReader(self._at(path))

    def size(self, path: str) -> int:
        with _translated("look at", self._at(path)):
            return os.stat(self._at(path)).st_size

    def list(self, path: str) -> list[str]:
        with _translated("list", self._at(path)):
            try:
                with os.scandir(self._at(path)) as entries:
                    return sorted(e.name + ("/" if e.is_dir() else "") for e in entries if not e.name.startswith("."))
            except FileNotFoundError:
                return []

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        target = self._at(path)
        folder = os.path.dirname(target)
        temporary = os.path.join(folder, f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(6)}")
        with _translated("write", target):
            self._ensure_dir(folder)
            try:
                fd = posix.open_fd(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                try:
                    at = 0
                    for piece in pieces(data):
                        at = _write_all(fd, piece, at)
                    if sync:
                        posix.fsync(fd)
                finally:
                    posix.close_fd(fd)
                self._publish(temporary, target)
            finally:
                with contextlib.suppress(OSError):
                    posix.unlink(temporary)
            if sync:
                self._sync_dir(folder)

    def _publish(self, temporary: str, target: str) -> None:
        try:
            posix.link(temporary, target)
        except FileExistsError:
            # a network filesystem may have made the link and lost the answer (NFS, see open(2) on O_EXCL)
            if os.stat(temporary).st_nlink != 2:
                raise

    def write(self, path: str, bound: int, recycle: bool = True) -> LocalWriter:
        target = self._at(path)
        with _translated("write", target):
            self._ensure_dir(os.path.dirname(target))
            fd = self._take_recycled(target, bound) if recycle else None
            if fd is None:
                fd = posix.open_fd(target, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            writer = LocalWriter(target, fd, self._direct)
            try:
                posix.allocate(fd, bound)
            except BaseException:
                writer.abort()
                raise
            return writer

    def delete(self, path: str, sync: bool = False) -> None:
        with _translated("delete", self._at(path)), contextlib.suppress(FileNotFoundError):
            posix.unlink(self._at(path))
        if sync:  # also where it was missing: whoever removed it may have died before this
            self.sync(os.path.dirname(path))

    def sync(self, path: str) -> None:
        with _translated("sync", self._at(path)), contextlib.suppress(FileNotFoundError):
            self._sync_dir(self._at(path))

    def delete_dir(self, path: str) -> None:
        if not path:
            raise ValueError("a store does not delete its own root")
        folder = self._at(path)
        self._durable_dirs.discard(folder)
        with _translated("delete", folder), contextlib.suppress(FileNotFoundError):
            with os.scandir(folder) as entries:
                names = [(e.name, e.is_dir(follow_symlinks=False)) for e in entries]
            for name, is_dir in names:
                if is_dir:
                    self.delete_dir(f"{path}/{name}")
                else:
                    with contextlib.suppress(FileNotFoundError):
                        posix.unlink(os.path.join(folder, name))
            posix.rmdir(folder)

    def retire(self, path: str, keep_bytes: int) -> int:
        source, pool = self._at(path), self._at(_RECYCLE)
        with _translated("recycle", source):
            try:
                info = os.stat(source)
                held = sum(s.st_size for _, s in self._recycled())
                if info.st_nlink == 1 and held + info.st_size <= keep_bytes and self.is_unused(path):
                    self._ensure_dir(pool)
                    posix.rename(source, os.path.join(pool, secrets.token_hex(8)))
                    return 0
                posix.unlink(source)
            except FileNotFoundError:
                return 0
            return info.st_size

    def is_unused(self, path: str) -> bool:
        """Whether no reader has the file open."""
        try:
            fd = posix.open_fd(self._at(path), os.O_RDWR)  # NFS locks for one alone only what may be written
        except PermissionError:
            fd = posix.open_fd(self._at(path), os.O_RDONLY)
        try:
            return _lock(fd, fcntl.LOCK_EX)
        finally:
            posix.close_fd(fd)

    def sweep(self, keep_bytes: int = 0) -> int:
        freed = 0
        for folder in ("", *(n[:-1] for n in self.list("") if n.endswith("/") and n != "steps/")):
            with contextlib.suppress(FileNotFoundError), os.scandir(self._at(folder)) as entries:
                for entry in entries:
                    if entry.name.startswith(_TEMPORARY) and time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                        freed += entry.stat().st_size
                        posix.unlink(entry.path)
        held = 0
        for path, info in self._recycled():
            held += info.st_size
            if held > keep_bytes:
                freed += info.st_size
                with contextlib.suppress(FileNotFoundError):
                    posix.unlink(path)
        return freed

    def _at(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _recycled(self) -> _Files:
        try:
            with os.scandir(self._at(_RECYCLE)) as entries:
                return [(e.path, e.stat()) for e in entries]
        except FileNotFoundError:
            return []

    def _take_recycled(self, target: str, bound: int) -> int | None:
        """A retired file, locked for us alone, under its new name; the one whose size is nearest, or None."""
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        for path, _ in sorted(self._recycled(), key=lambda item: abs(item[1].st_size - bound)):
            try:
                fd = posix.open_fd(path, os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                info = os.fstat(fd)
                if _lock(fd, fcntl.LOCK_EX) and info.st_nlink == 1 and os.stat(path).st_ino == info.st_ino:
                    posix.rename(path, target)
                    return fd
            except FileNotFoundError:
                pass
            posix.close_fd(fd)
        return None

    def _ensure_dir(self, folder: str) -> None:
        """Make `folder`, and have the names of it and of everything above it, up to the root's parent, on the disk."""
        if folder in self._durable_dirs:
            return
        parent = os.path.dirname(folder)
        is_above = not folder.startswith(self.root)
        if is_above and os.path.isdir(folder):
            return
        if parent != folder:
            self._ensure_dir(parent)
        with contextlib.suppress(FileExistsError):
            posix.mkdir(folder)
        if not os.path.isdir(folder):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
        self._sync_dir(parent)
        self._durable_dirs.add(folder)

    def _sync_dir(self, folder: str) -> None:
        fd = posix.open_fd(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            posix.fsync(fd)
        except OSError as error:
            if error.errno not in (
                errno.EINVAL,
                errno.EBADF,
                errno.ENOTSUP,
            ):  # some network filesystems have no such call
                raise
        finally:
            posix.close_fd(fd)


class LocalReader:
    """An open file under a shared lock, which keeps it from being written over while it is read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = posix.open_fd(path, os.O_RDONLY)
        try:
            is_ours = _lock(self._fd, fcntl.LOCK_SH)
            info = os.fstat(self._fd)
            if not is_ours or os.stat(path).st_ino != info.st_ino:
                raise FileNotFoundError(errno.ENOENT, "pruned while it was being opened", path)
        except BaseException:
            self.close()
            raise
        self.nbytes = info.st_size

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        total = 0
        with _translated("read", self.path):
            for low in range(0, len(targets), _VECTORS):
                total += self._read_batch(offset + total, list(targets[low : low + _VECTORS]))
        return total

    def _read_batch(self, offset: int, targets: list[Any]) -> int:
        wanted = sum(len(t) for t in targets)
        got = os.preadv(self._fd, targets, offset)
        if got == wanted:
            return got
        views = [memoryview(t).cast("B") for t in targets]
        done = got
        while got and done < wanted:  # a signal or the end of a page run cut the read short
            skip, rest = done, []
            for view in views:
                if skip < len(view):
                    rest.append(view[skip:])
                skip = max(0, skip - len(view))
            got = os.preadv(self._fd, rest, offset + done)
            done += got
        return done

    def close(self) -> None:
        if self._fd >= 0:
            posix.close_fd(self._fd)
            self._fd = -1


class LocalWriter:
    """A file being written by aligned blocks."""

    def __init__(self, path: str, fd: int, direct: bool) -> None:
        self.path = path
        self._fd = fd
        self._is_direct = False
        self._switch = threading.Lock()
        _lock(fd, fcntl.LOCK_EX)
        if direct and posix.DIRECT:
            self._set_direct(True)

    def write(self, offset: int, data: memoryview) -> None:
        with _translated("write", self.path):
            if self._is_direct:
                try:
                    _write_all(self._fd, data, offset, BLOCK)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                with self._switch:  # the filesystem took the flag but not the write
                    self._set_direct(False)
            _write_all(self._fd, data, offset)

    def finish(self, nbytes: int) -> None:
        with _translated("write", self.path):
            posix.truncate(self._fd, nbytes)
            posix.fsync(self._fd)
            self._close()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            posix.unlink(self.path)
        self._close()

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | posix.DIRECT if on else flags & ~posix.DIRECT)
            self._is_direct = on
        except OSError:
            self._is_direct = False

    def _close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                posix.close_fd(self._fd)
            self._fd = -1


def _write_all(fd: int, data: Any, offset: int, unit: int = 1) -> int:
    """pwrite all of `data`, in steps of `unit` bytes whatever a call takes; returns the offset after it."""
    view = memoryview(data)
    while len(view):
        taken = posix.pwrite(fd, view, offset)
        if taken < len(view):
            taken -= taken % unit
        if taken <= 0:
            raise OSError(errno.EIO, "write took nothing")
        offset += taken
        view = view[taken:]
    return offset


def _lock(fd: int, kind: int) -> bool:
    """flock(2) without waiting; True also where the filesystem has no locks."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    return True
