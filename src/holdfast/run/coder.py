"""What a writer asks about coding: which codec each tensor gets; and what it tells in return: how long writing took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..format.codec import Codec
from .contents import TensorItem


@dataclass(frozen=True, slots=True)
class Work:
    """A data file as it was written."""

    raw_bytes: int
    """Of what was written; not of what was left in earlier files."""
    stored_bytes: int
    seconds: float
    """From its beginning until it was durable."""
    writing_seconds: float
    """Of these, how long the store was at work."""
    coding_seconds: float
    """Of these, how long something was being coded; 0 for a raw file. What is left is waiting for bytes to be captured."""
    is_coded: bool


class Coder(Protocol):
    """Chooses codecs, save by save. One for a run; asked and told by one thread at a time."""

    def choose(self, items: Sequence[TensorItem], roles: Mapping[str, str], is_for_ever: bool) -> list[Codec]:
        """The codec of each item.

        Args:
            items: with sources. roles: role to kind, as in `Contents`.
            is_for_ever: whether the step must be readable without holdfast: see `codec.FOR_EVER`.
        Raises:
            Refused: a lossy codec was asked for what must stay exact.
        """
        ...

    def learn(self, work: Work) -> None:
        """Take in how a file was written. Called for each file of a save."""
        ...

    def look(self, items: Sequence[TensorItem]) -> None:
        """Called when all files are written, and before the sources go: now reading from them holds nothing up."""
        ...
