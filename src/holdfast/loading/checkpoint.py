"""An open checkpoint: names, shapes and values at once, bytes when asked for. Works without torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..errors import Corrupt, HoldfastError, NoCheckpoint, Unsupported
from ..format import datafile, values
from ..format.digest import LogicalDigest, element_bits, hex_digest
from ..format.index import Chunks, Index, TensorRow, content_digest
from ..format.names import dotted, path_of, safe_path
from ..format.records import Commit
from ..run.merge import merge_parts
from ..run.parts import read_part, values_bytes
from ..run.validate import check_index, check_values, located
from ..store.base import Store
from .lazy import LazyTensor
from .reading import Bytes, Damage, OpenFiles, first_damage, missing_file, no_room, read_chunks

READABLE = ("full", "partial")
NODE = "$node"
"""Key of the typed JSON that says what a path holds besides a value: list, tuple, ndarray, generator, ..."""


class ByRank(dict[int, Any]):
    """A value that differed between the ranks that saved it, by the position of the rank among them."""


class Checkpoint:
    """One committed step, open for reading. A context manager; reading is thread-safe.

    Attributes:
        names: the logical names of its tensors, sorted. step, attempt: its own. metrics: those of the save.
        content_digest: the identity of the state, hex. nbytes: bytes of its tensors, aliases once. commit: its record.
    """

    def __init__(self, store: Store, commit: Commit, index: Index) -> None:
        self.store, self.commit, self.index = store, commit, index
        self.step, self.attempt, self.metrics = commit.step, commit.attempt, commit.metrics
        self.content_digest, self.nbytes = commit.content_digest, commit.raw_bytes
        self._files = OpenFiles(store, index.files())

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    @property
    def names(self) -> list[str]:
        """The logical names of its tensors, sorted."""
        return self.index.names.all()

    @property
    def values(self) -> dict[str, Any]:
        """The non-tensor leaves by logical name, decoded."""
        return {name: values.decode(data, name) for name, data in self.plain_values()}

    @property
    def rank_values(self) -> dict[str, ByRank]:
        """Non-tensor leaves that differed between the ranks that saved, by logical name."""
        found: dict[str, ByRank] = {}
        for rank in sorted(map(int, self.commit.rank_values)):
            for path, data in self.commit.rank_values[str(rank)]:
                if not (isinstance(data, dict) and NODE in data):
                    name = dotted(path_of(path))
                    found.setdefault(name, ByRank())[rank] = values.decode(data, name)
        return found

    def plain_values(self) -> list[tuple[str, Any]]:
        """(logical name, typed JSON) of every value, without the marks of containers."""
        pairs = [(dotted(path_of(path)), data) for path, data in self.commit.values]
        return [(name, data) for name, data in pairs if not (isinstance(data, dict) and NODE in data)]

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.index.find(name) >= 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.names)

    def __getitem__(self, name: str) -> LazyTensor:
        """The tensor `name`, unread.

        Raises:
            KeyError: there is none.
        """
        return LazyTensor(self, self.tensor(name))

    def tensor(self, name: str) -> TensorRow:
        """The index's row of the tensor `name`.

        Raises:
            KeyError: there is none.
        """
        row = self.index.find(name)
        if row < 0:
            raise KeyError(f"{name} is not in step {self.step} of {self.store.url}")
        return self.index.tensor(row)

    def read(
        self,
        chunks: Chunks,
        target: Callable[[int], Bytes | None],
        deliver: Callable[[int, Bytes], None],
        progress: Callable[[int], None] | None = None,
        room: Callable[[int, int], Bytes] = no_room,
    ) -> list[Damage]:
        """Read chunks as `read_chunks` does.

        Raises:
            Corrupt: a file is gone.
        """
        try:
            name = partial(self._name, chunks)
            return read_chunks(self._files, chunks, self.index.codecs, target, deliver, name, progress, room)
        except FileNotFoundError as error:
            raise missing_file(str(error.filename or error), self.store.url, self.step) from error

    def open_files(self) -> None:
        """Open every file, so that pruning cannot take one away.

        Raises:
            FileNotFoundError: one is gone.
        """
        self._files.open_all()

    def read_bytes(self, tensor: TensorRow, start: int = 0, stop: int | None = None) -> Bytes:
        """Raw row-major bytes `start` to `stop` of a tensor, checked; whole chunks are read.

        Raises:
            Corrupt: naming the place.
        """
        tensor = self.index.canonical(tensor)
        stop = tensor.nbytes if stop is None else stop
        entries = self.index.entries(tensor)
        if len(entries) == 1 and self.index.box(tensor, entries[0])[1] == tensor.shape:
            chunks = self.index.chunks(entries[0], tensor.row)
            chunks = chunks.take((chunks.raw_start < stop) & (chunks.raw_start + chunks.raw_bytes > start))
            return self._gather(chunks, start, stop)
        return self._assemble(tensor)[start:stop]

    def _assemble(self, tensor: TensorRow) -> Bytes:
        """A tensor whose boxes came from several writers, put together."""
        item = np.dtype((np.void, tensor.dtype.itemsize))
        whole = np.empty(tensor.shape, item)
        for entry in self.index.entries(tensor):
            offset, shape = self.index.box(tensor, entry)
            nbytes = int(np.prod(shape, dtype=np.int64)) * tensor.dtype.itemsize
            part = self._gather(self.index.chunks(entry, tensor.row), 0, nbytes)
            whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))] = part.view(item).reshape(shape)
        return whole.reshape(-1).view(np.uint8)

    def _gather(self, chunks: Chunks, start: int, stop: int) -> Bytes:
        out = np.empty(stop - start, np.uint8)
        starts, sizes = chunks.raw_start.tolist(), chunks.raw_bytes.tolist()

        def target(i: int) -> Bytes | None:
            is_inside = starts[i] >= start and starts[i] + sizes[i] <= stop
            return out[starts[i] - start : starts[i] - start + sizes[i]] if is_inside else None

        def deliver(i: int, raw: Bytes) -> None:
            low, high = max(start, starts[i]), min(stop, starts[i] + sizes[i])
            out[low - start : high - start] = raw[low - starts[i] : high - starts[i]]

        if damages := self.read(chunks, target, deliver):
            raise first_damage(damages, self.store.url, self.step)
        return out

    def verify(self, progress: Callable[[int, int], None] | None = None) -> list[Damage]:
        """Read every byte and check it; returns the damage, empty when everything is as captured.

        Args:
            progress: called with (bytes done, bytes in all).
        """
        damages = self._verify_headers()
        chunks = self.index.all_chunks()
        total, done = int(chunks.stored_bytes.sum(dtype=np.int64)), 0

        def step(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(done, total)

        gone = {d.file for d in damages if d.nbytes == 0}
        if gone:
            is_there = np.array([f.path not in gone for f in self._files.rows] + [True])
            chunks = chunks.take(is_there[chunks.file.astype(np.int64)])
        return damages + self.read(chunks, lambda i: None, lambda i, raw: None, step)

    def _verify_headers(self) -> list[Damage]:
        damages = []
        for number, row in enumerate(self._files.rows):
            if row.is_foreign:
                continue
            try:
                reader = self._files.reader(number)
            except FileNotFoundError:
                damages.append(Damage(row.path, "", 0, 0, "are gone: the file does not exist"))
                continue
            head = np.empty(min(row.header_bytes, reader.nbytes), np.uint8)
            reader.read_into(0, [head.data])
            if reader.nbytes != row.nbytes:
                damages.append(
                    Damage(
                        row.path,
                        "",
                        reader.nbytes,
                        abs(row.nbytes - reader.nbytes),
                        f"should not be: {row.nbytes} bytes belong there",
                    )
                )
            elif bytes.fromhex(hex_digest(head)) != row.digest:
                damages.append(Damage(row.path, "", 0, row.header_bytes, "differ from their digest"))
            else:
                with contextlib.suppress(Unsupported):
                    datafile.parse_header(head.tobytes(), reader.nbytes, row.path)
        return damages

    def digest(self, name: str) -> str:
        """The logical digest of a tensor: the same however it is cut, in whatever layout it was saved."""
        tensor = self.tensor(name)
        result = LogicalDigest(tensor.dtype.name, tensor.shape)
        result.add(element_bits(self.read_bytes(tensor), tensor.dtype.itemsize), 0)
        return result.hex()

    def _name(self, chunks: Chunks, i: int) -> str:
        row = int(chunks.tensor[i])
        return str(self.index.names[row]) if row >= 0 else ""


def open_step(store: Store, path: str, commit: Commit) -> Checkpoint:
    """Open the step in the directory `path`, whose record is `commit`; reads the index, no data.

    Raises:
        Corrupt, Unsupported, Unavailable.
        FileNotFoundError: pruned meanwhile.
    """
    if commit.decision != "committed":
        raise NoCheckpoint(f"{path} of {store.url} was {commit.decision}: {commit.reason}")
    where = f"{path}/commit.json"
    if commit.kind not in READABLE:
        raise Unsupported(f"{where} is of kind {commit.kind}, which this version of holdfast cannot load: upgrade it")
    parts = []
    for ref in commit.parts:
        if not safe_path(ref.path, where).startswith(f"{path}/"):
            raise Corrupt(f"{where} names the index {ref.path!r} outside its directory", file=where)
        parts.append(read_part(store, ref.path, ref.digest)[0])
    if not parts:
        raise Corrupt(f"{where} names no index", file=where)
    check_values(commit.values, where)
    try:
        index = Index(merge_parts(parts, path), f"{path}/index")
    except HoldfastError as error:
        raise located(error, path) from error
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise Corrupt(f"the index of {path} is damaged: {error}", file=path) from error
    check_index(index)
    if commit.kind != "virtual" and any(file.is_foreign for file in index.files()):
        raise Corrupt(f"the index of {path} names a foreign file in a {commit.kind} step", file=path)
    if content_digest(index.columns, values_bytes(commit.values, commit.rank_values)) != commit.content_digest:
        raise Corrupt(f"{where} and the index beside it are not of one state: the content digests differ", file=where)
    return Checkpoint(store, commit, index)
