"""What a committed step holds: a digest for each name, whatever pieces the tensors lie in. Loads no torch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import holdfast
from holdfast.loading.checkpoint import Checkpoint

Box = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A step as it lies on disk."""

    step: int
    tensors: dict[str, str]
    """The logical digest of each tensor: over its elements and where they are in the whole, so the pieces do not matter."""
    values: dict[str, str]
    """A digest of each value that is not a tensor."""
    pieces: dict[str, list[Box]]
    """The shapes that each tensor was written in."""

    @property
    def digest(self) -> str:
        """Of all of it."""
        lines = "\n".join(f"{name}={digest}" for name, digest in sorted({**self.tensors, **self.values}.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:32]


def look(run: Path, step: int) -> Stored:
    """Read a step, and check it on the way."""
    with holdfast.open(run, step=step) as checkpoint:
        ties = {name: checkpoint[name].alias_of for name in checkpoint.names}
        by_rank = {f"{name} of rank {rank}": v for name, ranks in checkpoint.rank_values.items() for rank, v in ranks.items()}
        values = {**checkpoint.values, **by_rank, **{f"{name}, tied to": other for name, other in ties.items() if other}}
        return Stored(
            step,
            {name: checkpoint.digest(name) for name in checkpoint.names},
            {name: _digest(value) for name, value in values.items()},
            {name: _pieces(checkpoint, name) for name in checkpoint.names},
        )


def differences(before: Stored, after: Stored) -> list[str]:
    """A line for each name that is not the same in both."""
    one, other = {**before.tensors, **before.values}, {**after.tensors, **after.values}
    return [
        f"{name} was {one.get(name, 'not there')} as stored, and is {other.get(name, 'not there')} as resumed"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]


def _pieces(checkpoint: Checkpoint, name: str) -> list[Box]:
    index = checkpoint.index
    tensor = index.canonical(checkpoint.tensor(name))
    return [index.box(tensor, entry)[1] for entry in index.entries(tensor)]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:32]
