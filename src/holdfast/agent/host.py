"""What memory this machine, or the control group that this process is in, has left."""

from __future__ import annotations

import contextlib
from pathlib import Path

_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes() -> int:
    """Bytes that may still be taken; the page cache counts as free. 0 where that cannot be told."""
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) << 10)
    for limit, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # "max" is no limit
            found.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(found, default=0)
