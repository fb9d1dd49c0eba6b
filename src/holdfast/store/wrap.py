"""Wrappers with a store's interface around a store: retry what passes, limit the rate of writing, trace what is done.

A wrapper overrides what it changes and hands on the rest. The fault wrapper, which only tests want, is in holdfast.testing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import NoSpace, Unavailable
from .base import Capabilities, Reader, Store, Writer, pieces

T = TypeVar("T")


class Wrapped:
    """Hands every call on to `inner` through `call`, which a wrapper overrides."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        """Around every operation; `nbytes` is what a write carries or a read asks for, where that is known."""
        return run()

    def read(self, path: str) -> bytes:
        return self.call("read", path, lambda: self.inner.read(path))

    def map(self, path: str) -> Any:
        return self.call("map", path, lambda: self.inner.map(path))

    def open(self, path: str) -> Reader:
        return WrappedReader(self, path, self.call("open", path, lambda: self.inner.open(path)))

    def write(self, path: str, bound: int, recycle: bool = True) -> Writer:
        return WrappedWriter(self, path, self.call("write", path, lambda: self.inner.write(path, bound, recycle)))

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        self.call("create", path, lambda: self.inner.create(path, data, sync))

    def list(self, path: str) -> list[str]:
        return self.call("list", path, lambda: self.inner.list(path))

    def size(self, path: str) -> int:
        return self.call("size", path, lambda: self.inner.size(path))

    def delete(self, path: str, sync: bool = False) -> None:
        self.call("delete", path, lambda: self.inner.delete(path, sync))

    def sync(self, path: str) -> None:
        self.call("sync", path, lambda: self.inner.sync(path))

    def delete_dir(self, path: str) -> None:
        self.call("delete_dir", path, lambda: self.inner.delete_dir(path))

    def sweep(self, keep_bytes: int = 0) -> int:
        return self.call("sweep", "", lambda: self.inner.sweep(keep_bytes))

    def retire(self, path: str, keep_bytes: int) -> int:
        return self.call("retire", path, lambda: self.inner.retire(path, keep_bytes))


class WrappedReader:
    def __init__(self, store: Wrapped, path: str, inner: Reader) -> None:
        self._store, self._path, self._inner = store, path, inner
        self.nbytes = inner.nbytes

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        wanted = sum(len(t) for t in targets)
        return self._store.call("read_into", self._path, lambda: self._inner.read_into(offset, targets), wanted)

    def close(self) -> None:
        self._inner.close()


class WrappedWriter:
    def __init__(self, store: Wrapped, path: str, inner: Writer) -> None:
        self._store, self._path, self._inner = store, path, inner

    def write(self, offset: int, data: memoryview) -> None:
        self._store.call("write_at", self._path, lambda: self._inner.write(offset, data), len(data))

    def finish(self, nbytes: int) -> None:
        self._store.call("finish", self._path, lambda: self._inner.finish(nbytes))

    def abort(self) -> None:
        self._inner.abort()


class Retry(Wrapped):
    """Tries again, with growing pauses, what failed with `Unavailable`; never what is full, missing or taken.

    A `create` whose first answer was lost may find its own file: then the bytes are compared, and equal ones are success.
    """

    def __init__(self, inner: Store, tries: int = 4, pause_seconds: float = 0.1, sleep: Callable[[float], None] = time.sleep):
        super().__init__(inner)
        self._tries, self._pause, self._sleep = tries, pause_seconds, sleep

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        tries = 1 if operation == "finish" else self._tries  # a second fsync may succeed and mean nothing
        for attempt in range(1, tries + 1):
            try:
                return run()
            except Unavailable as error:
                if isinstance(error, NoSpace) or attempt == tries:
                    raise
                self._sleep(self._pause * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def write(self, path: str, bound: int, recycle: bool = True) -> Writer:
        """A name that a failed try has taken is freed; one that was taken before is refused."""
        is_mine = False

        def begin() -> Writer:
            nonlocal is_mine
            if is_mine:
                self.inner.delete(path)
            elif self._has(path):
                raise FileExistsError(path)
            is_mine = True
            return self.inner.write(path, bound, recycle)

        return WrappedWriter(self, path, self.call("write", path, begin))

    def _has(self, path: str) -> bool:
        try:
            return self.inner.size(path) >= 0
        except FileNotFoundError:
            return False

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        content = data if isinstance(data, (bytes, bytearray, memoryview)) else b"".join(data)
        has_failed = False

        def publish() -> None:
            nonlocal has_failed
            try:
                self.inner.create(path, content, sync)
            except FileExistsError:
                if not has_failed or self.inner.read(path) != content:
                    raise
            except Unavailable:
                has_failed = True
                raise

        self.call("create", path, publish)


class Limit(Wrapped):
    """Writes no more than so many bytes a second, however many threads write. Reading is not limited.

    A write returns when its bytes would have gone through: it is paced, not delayed on top of what it takes.
    """

    def __init__(
        self,
        inner: Store,
        bytes_a_second: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._rate, self._sleep, self._clock = bytes_a_second, sleep, clock
        self._through = -float("inf")
        """When all that was asked for until now will have gone through."""
        self._lock = threading.Lock()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation != "write_at":
            return run()
        until = self._reserve(nbytes)
        result = run()
        self._wait(until)
        return result

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        def paced() -> Iterator[memoryview]:
            for piece in pieces(data):
                self._wait(self._reserve(len(piece)))
                yield piece

        self.inner.create(path, paced(), sync)

    def _reserve(self, nbytes: int) -> float:
        with self._lock:
            self._through = max(self._through, self._clock()) + nbytes / self._rate
            return self._through

    def _wait(self, until: float) -> None:
        if (seconds := until - self._clock()) > 0:
            self._sleep(seconds)


@dataclass
class Totals:
    """What a traced store was asked to do."""

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    log: list[tuple[str, str, int]] = field(default_factory=list)
    """(operation, path, bytes), in the order in which they ended."""


class Trace(Wrapped):
    """Counts operations, bytes and seconds."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.totals = Totals()
        self._lock = threading.Lock()

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        start = time.perf_counter()
        try:
            return run()
        finally:
            with self._lock:
                self.totals.calls[operation] += 1
                self.totals.nbytes[operation] += nbytes
                elapsed = time.perf_counter() - start
                self.totals.seconds[operation] = self.totals.seconds.get(operation, 0.0) + elapsed
                self.totals.log.append((operation, path, nbytes))
