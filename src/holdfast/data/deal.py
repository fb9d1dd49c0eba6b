"""How samples are dealt: from a global position to the next global batch, and from that to the share of one rank.

A global position counts samples over all epochs: epoch * length + position in the epoch. A global batch takes the next
batch_size * world positions that are not skipped; it never crosses the end of an epoch, so the last one may be smaller, and
its samples are dealt as evenly as they go. Pure numbers; nothing here knows which sample a position is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Span = tuple[int, int]
"""A half-open range of global positions."""


@dataclass(frozen=True, slots=True)
class Deal:
    """The rules of dealing. Two jobs with other rules may take turns: all that passes between them is a position."""

    length: int
    batch_size: int
    """Samples of a batch of one rank."""
    world: int
    drop_last: bool
    skip: tuple[Span, ...]
    """Sorted, neither empty nor touching each other."""

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world

    def end(self, at: int) -> int:
        """The end of the epoch that `at` is in."""
        return (at // self.length + 1) * self.length

    def settle(self, at: int) -> int:
        """Where the next global batch begins: at or after `at`, past what is skipped or too little for a batch."""
        least = self.global_batch if self.drop_last else 1
        while True:
            at = self._past_skip(at)
            if self.left(at) >= least:
                return at
            at = self.end(at)

    def left(self, at: int) -> int:
        """Samples from `at` to the end of its epoch, without skipped ones."""
        return sum(stop - start for start, stop in self._kept(at))

    def batches_left(self, at: int) -> int:
        """Global batches from `at` to the end of its epoch."""
        left = self.left(at)
        return left // self.global_batch if self.drop_last else -(-left // self.global_batch)

    def take(self, at: int) -> tuple[list[Span], int]:
        """The spans of the global batch that begins at `at`, and the position after it, both within the epoch of `at`."""
        wanted = self.global_batch
        spans: list[Span] = []
        for start, stop in self._kept(at):
            stop = min(stop, start + wanted)
            spans.append((start, stop))
            at, wanted = stop, wanted - (stop - start)
            if not wanted:
                break
        return spans, at

    def share(self, spans: Sequence[Span], rank: int) -> list[Span]:
        """The part of a global batch that is `rank`'s: consecutive; shares differ by one sample at most, and may be empty."""
        each, more = divmod(sum(stop - start for start, stop in spans), self.world)
        first = rank * each + min(rank, more)
        return _cut(spans, first, first + each + (rank < more))

    def _past_skip(self, at: int) -> int:
        number = bisect_right(self.skip, at, key=lambda span: span[0]) - 1
        return max(at, self.skip[number][1]) if number >= 0 else at

    def _kept(self, at: int) -> Iterable[Span]:
        """What is not skipped, from `at` to the end of its epoch."""
        end = self.end(at)
        number = max(0, bisect_right(self.skip, at, key=lambda span: span[0]) - 1)
        for start, stop in self.skip[number:]:
            if start >= end:
                break
            if at < start:
                yield at, start
            at = max(at, stop)
        if at < end:
            yield at, end


def merged(spans: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    """Spans sorted, without empty ones, and joined where they overlap or touch.

    Raises:
        ValueError: something is not a pair of positions in order.
    """
    found: list[Span] = []
    for span in sorted(_span(s) for s in spans):
        if found and span[0] <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span[1])
        elif span[0] < span[1]:
            found.append(span)
    return tuple(found)


def _span(given: Sequence[int]) -> Span:
    pair = tuple(given)
    if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
        raise ValueError(f"{given!r} is no half-open range (first, after the last) of global sample positions")
    return int(pair[0]), int(pair[1])


def _cut(spans: Sequence[Span], first: int, last: int) -> list[Span]:
    """The samples numbered first to last of the spans' samples."""
    found = []
    for start, stop in spans:
        size = stop - start
        low, high = max(first, 0), min(last, size)
        if low < high:
            found.append((start + low, start + high))
        first, last = first - size, last - size
    return found
