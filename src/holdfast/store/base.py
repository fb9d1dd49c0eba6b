"""The interface of a store: named byte files below one root, created once, read by ranges.

What a store can do is data (`Capabilities`), not a method that fails. Missing files raise FileNotFoundError, names that are
taken FileExistsError; everything else that goes wrong is `Unavailable` or `NoSpace`, with the path and what to do.
Paths are relative, with `/`; names that begin with a dot are the store's own and are never listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Capabilities:
    is_durable: bool
    """What `create` and `finish` have returned for survives a power cut."""
    is_create_once: bool
    """`create` lets exactly one of several concurrent callers win."""
    has_recycling: bool
    """`retire` keeps files that `write` may write over."""
    has_locks: bool
    """An open reader keeps its file from being written over."""


class Reader(Protocol):
    """An open file. Reads may run in several threads at once."""

    nbytes: int

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        """Fill the writable buffers one after the other with the bytes from `offset`; returns how many bytes there were."""
        ...

    def close(self) -> None: ...


class Writer(Protocol):
    """A file being written. Invisible to a commit until `finish`; writes may run in several threads at once."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`: both multiples of BLOCK, and the memory aligned to BLOCK."""
        ...

    def finish(self, nbytes: int) -> None:
        """Cut the file to `nbytes` and make its content durable. Its name is durable after the next `create` beside it."""
        ...

    def abort(self) -> None:
        """Remove the file. Never raises."""
        ...


class Store(Protocol):
    @property
    def url(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def read(self, path: str) -> bytes: ...

    def map(self, path: str) -> Any:
        """The whole file as a read-only buffer, mapped where the store can."""
        ...

    def open(self, path: str) -> Reader: ...

    def write(self, path: str, bound: int, recycle: bool = True) -> Writer:
        """Begin a new file of at most `bound` bytes; over a retired one if `recycle` and there is one.

        Raises:
            FileExistsError: the name is taken.
        """
        ...

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        """Publish a file whole, once: `data` is bytes-like or an iterable of such. Durable, with its name, on return;
        with `sync=False` only visible to all, which is enough for what a power cut ends anyway.

        Raises:
            FileExistsError: somebody was first; nothing was changed.
        """
        ...

    def list(self, path: str) -> list[str]:
        """The names directly below a directory, sorted; empty where it does not exist. Directories end in `/`."""
        ...

    def size(self, path: str) -> int: ...

    def delete(self, path: str, sync: bool = False) -> None:
        """Remove a file; missing is no error. `sync`: that it is gone is durable on return."""
        ...

    def sync(self, path: str) -> None:
        """Make the names in a directory durable, whoever created or removed them. Missing is no error."""
        ...

    def delete_dir(self, path: str) -> None:
        """Remove what is left below a directory, and it. Missing is no error."""
        ...

    def sweep(self, keep_bytes: int = 0) -> int:
        """Remove what dead writers left in the store's own names, and retired files beyond `keep_bytes`; returns bytes freed."""
        ...

    def retire(self, path: str, keep_bytes: int) -> int:
        """Give a file's blocks to a later `write`, keeping at most `keep_bytes` so; else remove it. Returns bytes freed."""
        ...


def pieces(data: Any) -> Iterable[memoryview]:
    """`data` of `Store.create` as byte views."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return [memoryview(data)]
    return (memoryview(piece).cast("B") for piece in data)
