"""The memory store: a dict. For tests, and as the reference of what a store must do."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from .base import Capabilities, pieces

_shared: dict[str, MemoryStore] = {}


class MemoryStore:
    """A store in this process's memory."""

    capabilities = Capabilities(is_durable=False, is_create_once=True, has_recycling=False, has_locks=True)

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name or secrets.token_hex(6)}"
        self._files: dict[str, bytes | bytearray] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The store that every caller in this process gets for `name`."""
        return _shared.setdefault(name, cls(name))

    def read(self, path: str) -> bytes:
        return bytes(self._get(path))

    def map(self, path: str) -> Any:
        return memoryview(self._get(path)).toreadonly()

    def open(self, path: str) -> MemoryReader:
        return MemoryReader(self._get(path))

    def size(self, path: str) -> int:
        return len(self._get(path))

    def list(self, path: str) -> list[str]:
        prefix = f"{path.rstrip('/')}/" if path else ""
        with self._lock:
            below = [name[len(prefix) :] for name in self._files if name.startswith(prefix)]
        return sorted({n.split("/")[0] + ("/" if "/" in n else "") for n in below if not n.startswith(".")})

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        content = b"".join(pieces(data))
        with self._lock:
            if path in self._files:
                raise FileExistsError(path)
            self._files[path] = content

    def write(self, path: str, bound: int, recycle: bool = True) -> MemoryWriter:
        with self._lock:
            if path in self._files:
                raise FileExistsError(path)
            content = self._files[path] = bytearray(bound)
        return MemoryWriter(self, path, content)

    def delete(self, path: str, sync: bool = False) -> None:
        with self._lock:
            self._files.pop(path, None)

    def sync(self, path: str) -> None:
        """Nothing here is durable."""

    def delete_dir(self, path: str) -> None:
        with self._lock:
            for name in [n for n in self._files if n.startswith(f"{path}/")]:
                del self._files[name]

    def sweep(self, keep_bytes: int = 0) -> int:
        return 0

    def retire(self, path: str, keep_bytes: int) -> int:
        size = self.size(path) if path in self._files else 0
        self.delete(path)
        return size

    def _get(self, path: str) -> bytes | bytearray:
        with self._lock:
            if path not in self._files:
                raise FileNotFoundError(path)
            return self._files[path]

    def _replace(self, path: str, content: bytes) -> None:
        with self._lock:
            self._files[path] = content


class MemoryReader:
    def __init__(self, content: bytes | bytearray) -> None:
        self._content = memoryview(content)
        self.nbytes = len(content)

    def read_into(self, offset: int, targets: Sequence[Any]) -> int:
        start = offset
        for target in targets:
            view = memoryview(target).cast("B")
            part = self._content[offset : offset + len(view)]
            view[: len(part)] = part
            offset += len(part)
        return offset - start

    def close(self) -> None:
        self._content.release()


class MemoryWriter:
    def __init__(self, store: MemoryStore, path: str, content: bytearray) -> None:
        self._store, self._path, self._content = store, path, content

    def write(self, offset: int, data: memoryview) -> None:
        end = offset + len(data)
        if end > len(self._content):
            self._content.extend(bytes(end - len(self._content)))
        self._content[offset:end] = data

    def finish(self, nbytes: int) -> None:
        self._store._replace(self._path, bytes(self._content[:nbytes]))

    def abort(self) -> None:
        self._store.delete(self._path)
