"""From a URL or path to its store."""

from __future__ import annotations

import os
from typing import Any, cast

from ..errors import Unavailable
from .base import Store


def open_store(where: str | os.PathLike[str] | Any) -> Store:
    """The store of a directory or of `memory://NAME`; a store is handed back as it is.

    Raises:
        Unavailable: a URL scheme that this version has no store for.
    """
    if not isinstance(where, (str, os.PathLike)):
        return cast(Store, where)
    text = os.fspath(where)
    scheme, mark, rest = text.partition("://")
    if mark and scheme == "memory":
        from .memory import MemoryStore

        return MemoryStore.named(rest)
    if mark and scheme != "file":
        raise Unavailable(f"no store for {scheme}:// in this version; use a directory, or copy there with another tool")
    from .local import LocalStore

    return LocalStore(rest if mark else text)
