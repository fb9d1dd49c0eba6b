"""The system calls by which the local store changes a disk, in one place.

Every create, write, fsync, link, rename, unlink and truncate that holdfast makes in a run goes through this module and
is called as `posix.NAME`, so that a test can put itself between and know the complete order of what reached the kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os

_libc = ctypes.CDLL(None, use_errno=True)
DIRECT = getattr(os, "O_DIRECT", 0)


def open_fd(path: str, flags: int, mode: int = 0o644) -> int:
    """open(2) with O_CLOEXEC; returns the descriptor."""
    return os.open(path, flags | os.O_CLOEXEC, mode)


def close_fd(fd: int) -> None:
    os.close(fd)


def pwrite(fd: int, data: memoryview | bytes, offset: int) -> int:
    """One pwrite(2): returns how many bytes were taken, which may be fewer than given."""
    return os.pwrite(fd, data, offset)


def fsync(fd: int) -> None:
    os.fsync(fd)


def truncate(fd: int, nbytes: int) -> None:
    os.ftruncate(fd, nbytes)


def allocate(fd: int, nbytes: int) -> bool:
    """Reserve `nbytes` from the start of the file, so that a full disk is known before the first write.

    The system call itself, not posix_fallocate(3), which writes to every block where the filesystem has no such call.
    Returns False there; raises OSError (ENOSPC, EDQUOT, EFBIG) where there is no room.
    """
    if nbytes <= 0 or not hasattr(_libc, "fallocate"):
        return False
    while _libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def link(source: str, target: str) -> None:
    """link(2): makes `target` a second name of `source`; FileExistsError if `target` exists."""
    os.link(source, target)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def unlink(path: str) -> None:
    os.unlink(path)


def mkdir(path: str) -> None:
    os.mkdir(path, 0o755)


def rmdir(path: str) -> None:
    os.rmdir(path)
