"""What a step is made of, as a writer is given it: tensors with sources of bytes, and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .image import Source


@dataclass(frozen=True, slots=True)
class TensorItem:
    """One logical tensor, or the box of it that this writer holds."""

    name: str
    path: tuple[Any, ...]
    """Role, then keys as typed JSON."""
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    role: str
    source: Source | None
    """None for an alias."""
    owner: str | None = None
    """Name of the parameter that this is optimizer state of."""
    alias: str | None = None
    """Name of the tensor whose memory this one shares."""
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Offset and shape of the part that `source` has; None for the whole tensor."""

    @property
    def box_shape(self) -> tuple[int, ...]:
        return self.box[1] if self.box else self.shape


@dataclass
class Contents:
    """A state as one writer gives it."""

    tensors: list[TensorItem]
    values: list[Any] = field(default_factory=list)
    """[path, typed JSON] pairs in the order of the tree."""
    rank_values: dict[str, list[Any]] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
