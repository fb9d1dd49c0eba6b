"""Where the agent of a run listens: a socket in a directory that is this user's alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..errors import Refused
from ..format.digest import hex_digest

_ENVIRONMENT = "HOLDFAST_AGENT_DIR"


def directory() -> Path:
    """The private directory for sockets: HOLDFAST_AGENT_DIR, or one below XDG_RUNTIME_DIR or the temporary directory.

    Raises:
        Refused: it belongs to somebody else, or others may write there.
    """
    given = os.environ.get(_ENVIRONMENT)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    base = Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())
    path = Path(given) if given else base / f"holdfast-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise Refused(f"{path} is not a directory of this user alone: remove it, or set {_ENVIRONMENT} to one that is")
    return path


def node_name() -> str:
    """HOLDFAST_NODE: what tells agents of several nodes apart that share a directory; empty where it is not set."""
    return os.environ.get("HOLDFAST_NODE", "")


def socket_path(url: str, node: str = "") -> Path:
    """The socket of the agent of a run. `node` tells apart what on one machine is treated as several nodes."""
    return directory() / f"{hex_digest(f'{url}|{node}'.encode())[:20]}.sock"


@contextlib.contextmanager
def starting(path: Path) -> Iterator[None]:
    """Only one process at a time starts an agent, or ends one, at a socket. The lock is on the directory: it leaves no file."""
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
