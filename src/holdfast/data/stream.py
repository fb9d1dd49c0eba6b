"""Streams that can be resharded: an iterable dataset over many sources, with an offset in each, and a buffer of what was read.

A source (a file, mostly) belongs to one shard at a time. The state of a shard lists its sources with their offsets and holds
the items that were read and not given yet, so that any number of shards can be merged and split exactly.
"""

from __future__ import annotations

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import Mismatch
from .place import place


@dataclass
class Cursor:
    """Where a shard is; what an iterator works on."""

    todo: list[list[int]]
    """[source, pass, offset in items], the one being read first."""
    done: list[int] = field(default_factory=list)
    """Sources that were read to their end, where there is only one pass."""
    buffer: list[Any] = field(default_factory=list)
    """Items that were read and are not in a sample yet."""


class ShardedStream(IterableDataset[Any]):
    """Samples from sources that are dealt to the workers of all ranks; to be derived from.

    Define `read`. Define `is_ready` and `draw` to make samples out of more, or less, than one item, such as packed tokens.
    There should be at least as many sources as workers in the job: a worker without a source gives nothing.

    Args:
        sources: what `read` can open; the same on all ranks.
        repeat: begin again at the end, without end; else each `iter()` is one pass.
        rank, world: default to torch.distributed's, or to 0 of 1, when the stream is made.
    """

    def __init__(
        self, sources: Sequence[Any], *, repeat: bool = False, rank: int | None = None, world: int | None = None
    ) -> None:
        self.sources = list(sources)
        self._repeat = repeat
        self.place = place(rank, world)
        self._names: str | None = None
        self._cursor: Cursor | None = None
        self._is_loaded = False

    @abstractmethod
    def read(self, source: Any, start: int) -> Iterator[Any]:
        """The items of a source from number `start` on, in an order that is always the same."""

    def is_ready(self, buffer: list[Any], at_end: bool) -> bool:
        """Whether the buffered items make a sample; `at_end`: no more will come. By default one item is one."""
        return bool(buffer)

    def draw(self, buffer: list[Any]) -> Any:
        """Take a sample out of a buffer that is ready; what stays in it is part of the state."""
        return buffer.pop(0)

    def name(self, source: Any) -> str:
        """What tells a source from others wherever the data lies; the file name without its directory would do."""
        return str(source)

    # --- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        if self._cursor is None or not self._is_loaded:
            self._cursor = self._beginning()
        self._is_loaded = False
        return self._samples(self._cursor)

    def _beginning(self) -> Cursor:
        shard, count = self._shard()
        return Cursor([[number, 0, 0] for number in range(len(self.sources))[shard::count]])

    def _shard(self) -> tuple[int, int]:
        rank, world = self.place
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        return rank * workers + number, world * workers

    def _samples(self, cursor: Cursor) -> Iterator[Any]:
        yield from self._drawn(cursor.buffer)
        empty = 0
        while cursor.todo and empty < len(cursor.todo):
            entry = cursor.todo[0]
            for item in self.read(self.sources[entry[0]], entry[2]):
                entry[2] += 1
                cursor.buffer.append(item)
                yield from self._drawn(cursor.buffer)
            empty = empty + 1 if entry[2] == 0 else 0
            del cursor.todo[0]
            if self._repeat:
                cursor.todo.append([entry[0], entry[1] + 1, 0])
            else:
                cursor.done.append(entry[0])
                empty = 0
        yield from self._drawn(cursor.buffer, at_end=True)

    def _drawn(self, buffer: list[Any], at_end: bool = False) -> Iterator[Any]:
        while self.is_ready(buffer, at_end):
            yield self.draw(buffer)

    # --- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        cursor = self._cursor or self._beginning()
        return self._state(cursor.todo, cursor.done, cursor.buffer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there at the next `iter()`.

        Raises:
            Mismatch: it is of other sources.
        """
        self._check(state)
        state = copy.deepcopy(state)
        self._cursor = Cursor([list(entry) for entry in state["todo"]], list(state["done"]), list(state["buffer"]))
        self._is_loaded = True

    def merge(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """All shards as one.

        Raises:
            Mismatch: a source is in none of them or in two, so they are not the shards of one job.
        """
        todo, done, buffer = [], [], []
        for state in states:
            self._check(state)
            todo += state["todo"]
            done += state["done"]
            buffer += state["buffer"]
        held = sorted([entry[0] for entry in todo] + done)
        if held != list(range(len(self.sources))):
            wrong = sorted(set(range(len(self.sources))) ^ set(held)) or sorted({n for n in held if held.count(n) > 1})
            raise Mismatch(
                f"the states of {len(states)} shards are not those of one job: {self.name(self.sources[wrong[0]])} and "
                f"{len(wrong) - 1} more of {len(self.sources)} sources are in none or in several of them"
            )
        return self._state(sorted(todo, key=lambda entry: (entry[1], entry[2] == 0, entry[0])), sorted(done), buffer)

    def split(self, whole: dict[str, Any], shard: int, count: int) -> dict[str, Any]:
        """Every `count`-th source and buffered item; those in the middle come first, so that they are spread evenly."""
        return self._state(whole["todo"][shard::count], whole["done"][shard::count], whole["buffer"][shard::count])

    def _state(self, todo: list[list[int]], done: list[int], buffer: list[Any]) -> dict[str, Any]:
        """Copies: an iterator goes on changing what it holds."""
        return {
            "sources": self._fingerprint(),
            "todo": [list(entry) for entry in todo],
            "done": list(done),
            "buffer": copy.deepcopy(buffer),
        }

    def _check(self, state: dict[str, Any]) -> None:
        if state["sources"] != self._fingerprint():
            raise Mismatch(
                f"the stream reads {len(self.sources)} sources that are not those of the state: give it the same list, and "
                "define name() where the same data lies elsewhere"
            )

    def _fingerprint(self) -> str:
        if self._names is None:
            names = "\0".join(map(self.name, self.sources))
            self._names = f"{len(self.sources)}-{hashlib.sha256(names.encode()).hexdigest()[:16]}"
        return self._names


class TokenStream(ShardedStream):
    """Packs items, lists of tokens, into samples of exactly `length` tokens; what is left over waits in the buffer.

    At the end of a pass a shorter sample gives the rest, unless `drop_last`. Define `read`.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        length: int,
        *,
        drop_last: bool = False,
        repeat: bool = False,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        super().__init__(sources, repeat=repeat, rank=rank, world=world)
        if length < 1:
            raise ValueError(f"a sample cannot have {length} tokens")
        self.length = length
        self._drop_last = drop_last

    def is_ready(self, buffer: list[Any], at_end: bool) -> bool:
        held = sum(map(len, buffer))
        return held >= self.length or (at_end and held > 0 and not self._drop_last)

    def draw(self, buffer: list[Any]) -> list[Any]:
        sample: list[Any] = []
        while buffer and len(sample) < self.length:
            item = buffer.pop(0)
            wanted = self.length - len(sample)
            sample += item[:wanted]
            if len(item) > wanted:
                buffer.insert(0, item[wanted:])
        return sample
