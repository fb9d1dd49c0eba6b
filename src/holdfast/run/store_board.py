"""A board in the checkpoint store: what processes of several nodes talk by that have nothing else in common.

A key is a run of small files, one for each value it has had: a value is set by creating the next one, which the store lets only
one do. Nothing of it needs to survive a power cut, as nobody who talks does. What whoever was killed has left is removed with the
whole board, by the next one on this run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence

from ..errors import BoardGone, HoldfastError, NoSpace, Unavailable
from ..format.digest import hex_digest
from ..store.base import Store

FOLDER = "agents"
_FIRST_PAUSE_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.1
_LOOKS = 5
_LONGER = 1.3
"""By how much each pause is longer than the one before."""


class StoreBoard:
    """A `Board` below one directory of a store.

    Args:
        folder: of this board alone. members: how many look there: the more, the longer the pauses.
    """

    def __init__(self, store: Store, folder: str, members: int) -> None:
        self._store, self.folder = store, folder
        self._has_posted = False
        self._longest_pause = max(_LONGEST_PAUSE_SECONDS, members / 512)
        self._pause = _FIRST_PAUSE_SECONDS
        """Grows from one wait to the next while nothing comes: whoever waits long looks seldom."""

    def post(self, key: str, data: bytes) -> None:
        name = _name(key)
        with self._reached():
            while not self._is_first(name, number := max(self._numbers([name])[name], default=0) + 1, data):
                continue
            self._has_posted = True
            for older in self._numbers([name])[name]:
                if older < number:
                    self._store.delete(f"{self.folder}/{name}.{older}")

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        wanted = {_name(key) for key in keys}
        until = time.monotonic() + seconds
        while True:
            with self._reached():
                found = {name.partition(".")[0] for name in self._list()}
            if wanted <= found:
                if seconds > 0:
                    self._pause = _FIRST_PAUSE_SECONDS
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(self._pause, left))
            self._pause = min(self._pause * _LONGER, self._longest_pause)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        names = [_name(key) for key in keys]
        with self._reached():
            numbers = self._numbers(names)
            return [self._newest(name, numbers[name])[1] for name in names]

    def drop(self, keys: Iterable[str]) -> None:
        names = {_name(key) for key in keys}
        with contextlib.suppress(HoldfastError):
            for name in self._store.list(self.folder):
                if name.partition(".")[0] in names:
                    self._store.delete(f"{self.folder}/{name}")

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        name = _name(key)
        with self._reached():
            while True:
                numbers = self._numbers([name])[name]
                number, stands = self._newest(name, numbers) if numbers else (0, b"")
                if stands != expected:
                    return stands
                if self._is_first(name, number + 1, data):  # values before it stay: else a late one could take their number
                    return data

    def decide(self, key: str, data: bytes) -> bytes:
        return self.swap(key, b"", data)

    def remove(self) -> None:
        """Take the whole board away, for all. Never raises."""
        with contextlib.suppress(HoldfastError, OSError):  # somebody posts there still; a later board's owner removes it
            self._store.delete_dir(self.folder)

    def _is_first(self, name: str, number: int, data: bytes) -> bool:
        try:
            self._store.create(f"{self.folder}/{name}.{number}", data, sync=False)
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise BoardGone(f"{self.folder} in {self._store.url} was removed: a newer attempt has begun there") from error
        return True

    def _list(self) -> list[str]:
        found = self._store.list(self.folder)
        if not found and self._has_posted:  # what this process has posted is replaced, and never all dropped
            raise BoardGone(f"{self.folder} in {self._store.url} was removed: a newer attempt has begun there")
        return found

    def _numbers(self, names: Sequence[str]) -> dict[str, list[int]]:
        """By name of a key, of the values that it has, ascending."""
        found: dict[str, list[int]] = {name: [] for name in names}
        for known, _, number in (one.partition(".") for one in self._list()):
            if known in found:
                found[known].append(int(number))
        return {name: sorted(numbers) for name, numbers in found.items()}

    def _newest(self, name: str, numbers: Sequence[int]) -> tuple[int, bytes]:
        """The value that a key has, and its number.

        Args:
            numbers: of its values, when they were looked at.
        """
        for _ in range(_LOOKS):
            if numbers:
                try:
                    return numbers[-1], self._store.read(f"{self.folder}/{name}.{numbers[-1]}")
                except FileNotFoundError:  # a newer one has come
                    pass
                except Unavailable:  # so says a network's file system of a file that another node has just removed
                    if self._numbers([name])[name][-1:] == list(numbers[-1:]):
                        raise
            else:  # a listing in several parts may show neither the old value nor the new one
                time.sleep(_LONGEST_PAUSE_SECONDS)
            numbers = self._numbers([name])[name]
        raise BoardGone(f"{self.folder} in {self._store.url} has lost a message: was it removed?")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Raises:
        BoardGone: the store does not answer.
        """
        try:
            yield
        except (BoardGone, NoSpace):
            raise
        except Unavailable as error:
            raise BoardGone(f"the store by which the agents of several nodes talk does not answer: {error}") from error


def board_folder(attempt: int) -> str:
    """Where the agents of a job meet that saves under an attempt."""
    return f"{FOLDER}/a{attempt:04d}"


def remove_older(store: Store, attempt: int) -> None:
    """Remove the boards of attempts before this one, which can commit nothing any more. Never raises."""
    with contextlib.suppress(HoldfastError, OSError):
        for name in store.list(FOLDER):
            number = name.rstrip("/").removeprefix("a")
            if number.isdecimal() and int(number) < attempt:
                StoreBoard(store, f"{FOLDER}/{name.rstrip('/')}", 1).remove()


def _name(key: str) -> str:
    """The key as a name of files: keys have spaces, slashes, and any length."""
    return hex_digest(key.encode())[:24]
