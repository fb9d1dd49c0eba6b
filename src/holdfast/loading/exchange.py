"""Reading once for all ranks of a node: what several of them need is read by one into shared memory, and copied from there.

The chunks pass through a ring of slots, in file order, a window at a time: while one window is copied into the targets of all
ranks, the next ones are read. Chunks that one rank alone needs it reads straight into their targets, meanwhile. Of nodes that
need the same, each reads a part of every window and sends it to the others. The reader checks the digest, in the slot; damage
that it finds it tells to all, and each rank that needs the chunk reports it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..format.columns import Array
from ..format.digest import digest
from ..format.index import NO_DIGEST, Chunks
from ..plan.exchange import plan_sharing
from .checkpoint import Checkpoint
from .fill import Direct, Reads, Source
from .node import Node
from .reading import Bytes, Damage
from .twins import Line

T = TypeVar("T")
_MOST_COPIERS = 4
_READ, _FILLED, _DAMAGED, _SENT, _DRAINED, _DONE = "read", "filled", "damaged", "sent", "drained", "done"
_DAMAGES_AT_ONCE = 64


def source_of(checkpoint: Checkpoint, reads: Reads, node: Node, lines: Mapping[int, Line], twin: int) -> Source:
    """The source of a rank's reads: all ranks of the node, and of its twins, make theirs from the same needs.

    Args:
        lines: to the same rank of the twin nodes, by the number of the twin. twin: the number of this one.
    """
    if not plan_sharing(checkpoint.index.all_chunks(), node.needs, node.position, node.slot, 1 + len(lines)).windows:
        return Direct(checkpoint, reads)
    return Exchange(checkpoint, reads, node, lines, twin)


class Windows:
    """Counts windows that are done, from the first on without a gap, each after so many marks. Threads may mark."""

    def __init__(self, marks: int) -> None:
        self._marks = marks
        self._left: dict[int, int] = {}
        self._next = 0
        self._lock = threading.Lock()

    def mark(self, window: int) -> int:
        """Mark a window; returns how many are done."""
        with self._lock:
            self._left[window] = self._left.get(window, self._marks) - 1
            while self._left.get(self._next) == 0:
                del self._left[self._next]
                self._next += 1
            return self._next


class Exchange:
    """A source that reads this rank's part of what several ranks need, and copies what it needs of theirs.

    Attributes:
        read_bytes: see `Source`.
    """

    def __init__(self, checkpoint: Checkpoint, reads: Reads, node: Node, lines: Mapping[int, Line], twin: int) -> None:
        chunks, ranks = checkpoint.index.all_chunks(), len(node.needs)
        self._checkpoint, self._reads, self._chunks = checkpoint, reads, chunks
        self._memory, self._links = node.memory, node.links
        self._lines = {number * ranks + node.position: line for number, line in lines.items()}
        """By the number of the twin as a reader."""
        self._reader = twin * ranks + node.position
        self._sharing = plan_sharing(chunks, node.needs, node.position, node.slot, 1 + len(lines))
        node.needs.clear()
        self.read_bytes = 0
        self._lock = threading.Lock()
        self._have_read, self._have_filled = Windows(1), Windows(1 + len(lines))
        self._reasons: dict[int, str] = {}
        """Of shared chunks that are damaged."""
        self._copiers = max(1, min(_MOST_COPIERS, len(os.sched_getaffinity(0)) // ranks))
        by_row = np.argsort(reads.rows)
        found = np.searchsorted(reads.rows, self._sharing.shared, sorter=by_row)
        self._wanted_at = by_row[np.minimum(found, len(by_row) - 1)] if len(by_row) else found
        """Of each shared chunk that is ours, which of our reads it is."""
        node.links.hear = self._hear

    def check(self) -> list[Damage]:
        """Check what this rank alone needs, and its part of the rest."""
        rows = np.concatenate([self._sharing.alone, self._sharing.shared[self._sharing.reader == self._reader]])
        return self._checkpoint.read(self._chunks.take(rows), lambda i: None, lambda i, raw: None)

    def fill(self) -> list[Damage]:
        links, damages = self._links, []
        threads = 1 + self._memory.slots + 2 * len(self._lines) + self._copiers
        try:
            with ThreadPoolExecutor(threads, "holdfast-exchange") as pool:
                try:
                    alone = pool.submit(self._or_fail, self._read_alone)
                    for slot in range(self._memory.slots):
                        pool.submit(self._or_fail, self._read_ahead, slot)
                    for twin, line in self._lines.items():
                        pool.submit(self._or_fail, self._send_to, twin, line)
                        pool.submit(self._or_fail, self._receive_from, twin, line)
                    for window in range(self._sharing.windows):
                        links.wait(_FILLED, window + 1, "to read their part")
                        damages += self._copy(window, pool)
                        for twin in self._lines:
                            links.wait_here(f"{_SENT} {twin}", window + 1, "to send its part to another node")
                        links.post(_DRAINED, window + 1)
                    damages += alone.result()
                    links.post(_DONE, 1)
                    links.wait(_DONE, 1, "to fill their targets")
                except BaseException as error:
                    links.fail(error)  # before the pool waits for its threads
                    self._hang_up(error)
                    raise
        finally:
            self._hang_up()
            links.close()
        return sorted(damages, key=lambda damage: (damage.file, damage.offset))

    def _hang_up(self, error: BaseException | None = None) -> None:
        for line in self._lines.values():
            line.close(error)

    def _or_fail(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return work(*arguments)
        except BaseException as error:
            self._links.fail(error)
            raise

    def _read_alone(self) -> list[Damage]:
        """Read what no other rank needs, straight into its targets."""
        reads = self._reads
        which = np.flatnonzero(np.isin(reads.rows, self._sharing.alone))
        chunks = reads.chunks.take(which)
        self._add(chunks)

        def target(i: int) -> Bytes | None:
            self._links.check()
            return reads.target(int(which[i]))

        def room(i: int, nbytes: int) -> Bytes:
            return reads.room(int(which[i]), nbytes)

        return self._checkpoint.read(chunks, target, lambda i, raw: reads.deliver(int(which[i]), raw), room=room)

    def _read_ahead(self, slot: int) -> None:
        """Read this rank's part of every window that passes through a slot, as soon as that is free."""
        for window in range(slot, self._sharing.windows, self._memory.slots):
            self._await_slot(window)
            self._read_part(window)

    def _read_part(self, window: int) -> None:
        low, high = self._sharing.part(window, self._reader)
        if low < high:
            chunks, part, sizes = self._part(window, low, high)

            def target(i: int) -> Bytes:
                self._links.check()
                return part[sizes[i][0] : sizes[i][1]]

            damages = self._checkpoint.read(chunks, target, lambda i, raw: np.copyto(target(i), raw))
            self._add(chunks)
            reasons = {(damage.file, damage.offset): damage.reason for damage in damages}
            if reasons:
                places = ((number, self._place(number)) for number in range(low, high))
                self._tell([(number, reasons[place]) for number, place in places if place in reasons])
        self._links.post_here(_READ, self._have_read.mark(window))
        self._links.post(_FILLED, self._have_filled.mark(window))

    def _send_to(self, twin: int, line: Line) -> None:
        """Send this rank's part of window after window, as it is read."""
        for window in range(self._sharing.windows):
            low, high = self._sharing.part(window, self._reader)
            if low < high:
                self._links.wait_here(_READ, window + 1, "to read its part")
                bad = [(number, self._reasons[number]) for number in range(low, high) if number in self._reasons]
                line.send(window, bad, self._part(window, low, high)[1])
            self._links.post_here(f"{_SENT} {twin}", window + 1)

    def _receive_from(self, twin: int, line: Line) -> None:
        """Receive a twin's part of window after window, as soon as their slots are free."""
        for window in range(self._sharing.windows):
            low, high = self._sharing.part(window, twin)
            if low < high:
                self._await_slot(window)
                chunks, part, sizes = self._part(window, low, high)
                bad = dict(line.receive(window, part))
                for i in np.flatnonzero(chunks.algorithm != NO_DIGEST).tolist():
                    if low + i not in bad and digest(part[sizes[i][0] : sizes[i][1]]) != chunks.digest[i].tobytes():
                        bad[low + i] = f"differ from their digest after rank {line.rank} of another node has sent them"
                self._tell(bad.items())
            self._links.post(_FILLED, self._have_filled.mark(window))

    def _part(self, window: int, low: int, high: int) -> tuple[Chunks, Bytes, list[tuple[int, int]]]:
        """The shared chunks from `low` to `high` of a window, the memory where they lie, and where each lies in it."""
        chunks = self._chunks.take(self._sharing.shared[low:high])
        at = self._sharing.at[low:high]
        starts, stops = at - at[0], at - at[0] + chunks.raw_bytes
        memory = self._memory.slot(window)[int(at[0]) : int(at[0] + stops[-1])]
        return chunks, memory, list(zip(starts.tolist(), stops.tolist(), strict=True))

    def _await_slot(self, window: int) -> None:
        if window >= self._memory.slots:
            self._links.wait(_DRAINED, window - self._memory.slots + 1, "to copy what was read for them")

    def _add(self, chunks: Chunks) -> None:
        with self._lock:
            self.read_bytes += int(chunks.stored_bytes.sum(dtype=np.int64))

    def _tell(self, bad: Iterable[tuple[int, str]]) -> None:
        """Tell all ranks of the node which shared chunks are damaged, and why."""
        found = list(bad)
        for first in range(0, len(found), _DAMAGES_AT_ONCE):
            some = found[first : first + _DAMAGES_AT_ONCE]
            self._hear(self._reader, _DAMAGED, some)
            self._links.post(_DAMAGED, 1, some)

    def _hear(self, rank: int, topic: str, data: Any) -> None:
        self._reasons.update(data)

    def _place(self, number: int) -> tuple[str, int]:
        """File and offset of a shared chunk."""
        row = int(self._sharing.shared[number])
        return self._checkpoint.index.file(int(self._chunks.file[row])).path, int(self._chunks.offset[row])

    def _copy(self, window: int, pool: ThreadPoolExecutor) -> list[Damage]:
        """Copy what this rank needs of a window into its targets; returns what of it is damaged."""
        low, high = self._sharing.first[window : window + 2].tolist()
        mine = low + np.flatnonzero(self._sharing.is_mine[low:high])
        slot = self._memory.slot(window)
        parts = np.array_split(mine, min(self._copiers, max(1, len(mine))))
        if len(parts) == 1:
            return self._copy_some(slot, mine)
        return [damage for some in pool.map(lambda part: self._copy_some(slot, part), parts) for damage in some]

    def _copy_some(self, slot: Bytes, numbers: Array) -> list[Damage]:
        damages, reads = [], self._reads
        for number in numbers.tolist():
            i, at = int(self._wanted_at[number]), int(self._sharing.at[number])
            if number in self._reasons:
                row = int(self._sharing.shared[number])
                file, offset = self._place(number)
                name = str(self._checkpoint.index.names[int(self._chunks.tensor[row])])
                damages.append(Damage(file, name, offset, int(self._chunks.stored_bytes[row]), self._reasons[number]))
                continue
            raw = slot[at : at + int(reads.chunks.raw_bytes[i])]
            target = reads.target(i)
            if target is None:
                reads.deliver(i, raw)
            else:
                np.copyto(target, raw)
        reads.settle()  # the slot is filled again
        return damages
