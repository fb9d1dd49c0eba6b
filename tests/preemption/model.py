"""All orders in which the changes of several ranks reach one board, one after the other: nothing is timed, nothing left out.

A rank's program is run again from its start for each change that it makes, with the answers that it has had so far. So a rank can
stand still before any of its changes while others go on, without a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Request = tuple[str, bytes, bytes]


class Pending(Exception):
    """Not an error: the rank waits for its turn."""

    def __init__(self, request: Request) -> None:
        self.request = request


class Replayed:
    """A board that answers as it has answered before, and stops the program at the first change beyond."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = iter(answers)

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        for answer in self._answers:
            return answer
        raise Pending((key, expected, data))


Program = Callable[[Replayed], Any]


@dataclass(frozen=True)
class Ending:
    """One way in which all ranks came to their end."""

    results: list[Any]
    changes: list[int]
    """How often each rank asked the board."""
    board: dict[str, bytes]


def endings(programs: Sequence[Program]) -> Iterator[Ending]:
    """Every outcome of these programs, whatever the order of their changes; orders that meet in one state are followed once."""
    seen: set[Any] = set()
    stack: list[tuple[dict[str, bytes], tuple[tuple[bytes, ...], ...]]] = [({}, tuple(() for _ in programs))]
    while stack:
        board, answers = stack.pop()
        state = (tuple(sorted(board.items())), answers)
        if state in seen:
            continue
        seen.add(state)
        results: list[Any] = []
        for rank, program in enumerate(programs):
            try:
                results.append(program(Replayed(answers[rank])))
            except Pending as pending:
                key, expected, data = pending.request
                now, answer = _swap(board, key, expected, data)
                stack.append((now, (*answers[:rank], (*answers[rank], answer), *answers[rank + 1 :])))
        if len(results) == len(programs):
            yield Ending(results, [len(had) for had in answers], board)


def _swap(board: dict[str, bytes], key: str, expected: bytes, data: bytes) -> tuple[dict[str, bytes], bytes]:
    """What torch's stores do."""
    if board.get(key, b"") == expected:
        return {**board, key: data}, data
    return board, board.get(key, expected)
