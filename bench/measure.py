"""The instruments: durability, the page cache, bytes on disk, memory of a process tree. No torch."""

import os
import shutil
import threading
from pathlib import Path
from types import TracebackType

import psutil

DROP_CACHES = "/proc/sys/vm/drop_caches"
SAMPLE_SECONDS = 0.05


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def make_durable(directory: Path) -> None:
    """fsync every file below `directory`, then each directory up to and including its parent.

    The libraries differ in what they sync themselves; after this call they are equal.
    """
    for path in files_below(directory):
        sync_path(path)
    inner = [path for path in directory.rglob("*") if path.is_dir()]
    for path in [*reversed(inner), directory, directory.parent]:
        sync_path(path)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(directory: Path) -> None:
    """Delete a tree, and let the file system finish with it: what follows is written to fresh blocks."""
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


def nbytes_below(directory: Path) -> int:
    return sum(path.stat().st_size for path in files_below(directory))


def can_drop_caches() -> bool:
    return os.access(DROP_CACHES, os.W_OK)


def drop_caches() -> None:
    os.sync()
    Path(DROP_CACHES).write_text("3")


def tree_memory(pid: int) -> int:
    """Bytes of the process and its descendants: proportional set size without pages of files.

    Pages of mapped files are page cache, which the kernel takes back when it needs it; shared memory counts.
    """
    total = 0
    try:
        members = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return 0
    for member in members:
        try:
            rows = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it ended in between
            continue
        kilobytes = {row.split(":")[0]: int(row.split()[1]) for row in rows}
        total += 1024 * (kilobytes.get("Pss", 0) - kilobytes.get("Pss_File", 0))
    return total


class PeakMemory:
    """Watches a process tree from another process while the `with` lasts.

    The readings cost the watched process time, so nothing is timed meanwhile.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before_bytes = 0
        self.peak_bytes = 0

    @property
    def extra_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, tree_memory(self._pid))

    def __enter__(self) -> "PeakMemory":
        self.before_bytes = self.peak_bytes = tree_memory(self._pid)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
