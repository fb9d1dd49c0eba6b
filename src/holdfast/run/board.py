"""The board: a small key-value store by which the members of a team talk; and a part of one, for calls beside others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class Board(Protocol):
    """Keys and values that all ranks of a job see."""

    def post(self, key: str, data: bytes) -> None: ...

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Whether all the keys are there within so many seconds."""
        ...

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        ...

    def drop(self, keys: Iterable[str]) -> None:
        """Forget keys; missing ones are no error."""
        ...

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        """Set a key to `data`, not b"", if its value is `expected`, b"" for a key that is not there; the value that stands."""
        ...

    def decide(self, key: str, data: bytes) -> bytes:
        """Set a key that only the first rank to come sets, to `data`, not b""; what the first one set."""
        ...


class Apart:
    """A part of a board for calls of their own, which go on beside the others."""

    def __init__(self, board: Board, prefix: str) -> None:
        self._board, self._prefix = board, prefix

    def post(self, key: str, data: bytes) -> None:
        self._board.post(self._prefix + key, data)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        return self._board.wait([self._prefix + key for key in keys], seconds)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        return self._board.read([self._prefix + key for key in keys])

    def drop(self, keys: Iterable[str]) -> None:
        self._board.drop(self._prefix + key for key in keys)

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        return self._board.swap(self._prefix + key, expected, data)

    def decide(self, key: str, data: bytes) -> bytes:
        return self._board.decide(self._prefix + key, data)
