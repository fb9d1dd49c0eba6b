"""What a run of ranks fails with: one error for the test, and in it one for each rank that did not return a value."""

from __future__ import annotations


class RankError(Exception):
    """An exception of a rank that could not be pickled; its type and text are in the message."""


class RankDied(RankError):
    """The rank's process ended before it answered."""


class RankTimeout(RankError):
    """The rank was still running when time was up, and was killed; the message shows where each of its threads was."""


class RanksFailed(Exception):
    """Some ranks of a run did not return a value.

    Attributes:
        errors: the exception of each such rank.
    """

    def __init__(self, what: str, world: int, errors: dict[int, BaseException], texts: dict[int, str]) -> None:
        self.errors = errors
        told = "\n".join(f"--- rank {rank} of {world}: {texts[rank].rstrip()}" for rank in sorted(errors))
        super().__init__(f"{what} failed on rank {', '.join(map(str, sorted(errors)))} of {world}\n{told}")
