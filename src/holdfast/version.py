"""The version of holdfast, and those of what it stands on, as commit records name them."""

from __future__ import annotations

import platform
import sys

VERSION = "0.1.0"


def libraries() -> dict[str, str]:
    """Versions of holdfast, Python, and whatever of torch and numpy is loaded."""
    found = {"holdfast": VERSION, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", "?"))
    return found
