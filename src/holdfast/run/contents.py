"""What a step is made of, as a writer is given it: tensors with sources of bytes, and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..layout.layouts import Layout
from .image import Source


@dataclass(frozen=True, slots=True)
class TensorItem:
    """One logical tensor, or a box of it that this writer writes. A tensor may stand several times, with other boxes."""

    name: str
    path: tuple[Any, ...]
    """Role, then keys as typed JSON."""
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    role: str
    source: Source | None
    """None for an alias, and for a tensor that this writer knows and others write."""
    owner: str | None = None
    """Name of the parameter that this is optimizer state of."""
    alias: str | None = None
    """Name of the tensor whose memory this one shares."""
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Offset and shape of the part that `source` has; None for the whole tensor."""

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What tells it from the other entries of this writer: name and offset."""
        return self.name, tuple(self.box[0]) if self.box else (0,) * len(self.shape)

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
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Of the tensors that are sharded, by name."""
    streams: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By role, for what belongs to ranks: those that hold the same stream as this one. Such names are no structure: each rank has
    others, and knows itself who else has them."""
    declared: dict[tuple[str, tuple[int, ...]], str] = field(default_factory=dict)
    """Of what a node holds, by `TensorItem.key`: digest of the layout that says that all who hold it have the same bytes."""

    @property
    def nbytes(self) -> int:
        """Of the tensors' bytes that this writer holds."""
        return sum(item.source.nbytes for item in self.tensors if item.source is not None)
