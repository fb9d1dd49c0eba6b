"""Live state, taken apart: every tensor and value of a job by its logical name, with what it takes to put others there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import Refused
from .format.names import dotted
from .tensors import check_storable
from .tree import Leaf, Path, Put, walk


@dataclass(slots=True)
class LiveTensor:
    name: str
    path: Path
    role: str
    tensor: torch.Tensor
    owner: str | None = None
    """Name of the parameter that it is optimizer state of."""
    alias: str | None = None
    """Name of the tensor whose memory this one is."""
    put: Put | None = None
    """How to give a new value, where the tensor is only a reading of it (a generator's state); None: copy into it."""
    is_hyper: bool = False


@dataclass(slots=True)
class LiveValue:
    name: str
    path: Path
    role: str
    value: Any
    put: Put | None
    is_hyper: bool = False
    """A hyper-parameter: a difference between stored and live is listed, and `live=` keeps ours."""


@dataclass
class Live:
    """The state as it is now. Tensors are the live ones, not copies."""

    to_fill: bool = False
    """It is about to be loaded: what will be replaced as a whole is not taken apart."""
    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    values: dict[str, LiveValue] = field(default_factory=dict)
    nodes: list[tuple[Path, str]] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    subtrees: dict[Path, Put] = field(default_factory=dict)
    """Paths below which an object gets back the tree it gave, whatever its live one looks like now."""
    required: set[Path] = field(default_factory=set)
    """Those of the subtrees that must be stored."""
    finders: list[Callable[[Path], tuple[Path, Put] | None]] = field(default_factory=list)
    """Find the subtree that a stored path belongs to, where the live side cannot list them (an optimizer's lists)."""
    allocators: list[Callable[[Path, torch.dtype, tuple[int, ...]], torch.Tensor | None]] = field(default_factory=list)
    """Make what the live side lacks (moments before the first step), or None where the path is not theirs."""
    placers: list[Callable[[Path, Any], bool]] = field(default_factory=list)
    """Take what the live side lacks; False where the path is not theirs."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def subtree_of(self, path: Path) -> Path | None:
        """The subtree that `path` is in, or None."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.subtrees:
                return path[:length]
        for find in self.finders:
            if found := find(path):
                self.subtrees[found[0]] = found[1]
                return found[0]
        return None

    def add_tree(self, value: Any, path: Path, role: str, put: Put | None = None) -> None:
        """Add all leaves of a tree. A dict that is empty takes whatever is stored there."""
        for leaf in walk(value, path, self.nodes, put):
            if self.to_fill and isinstance(leaf.value, dict) and not leaf.value:
                self.subtrees[leaf.path] = leaf.value.update
            else:
                self.add_leaf(leaf, role)

    def add_leaf(self, leaf: Leaf, role: str, owner: str | None = None, is_hyper: bool = False) -> None:
        """Add one leaf.

        Raises:
            Refused: its name is taken by another path.  Unsupported: it cannot be stored.
        """
        name = dotted(leaf.path)
        taken = self.tensors.get(name) or self.values.get(name)
        if taken is not None:
            raise Refused(f"two things are called {name}: the paths {list(taken.path)} and {list(leaf.path)}; rename one")
        if not leaf.is_tensor:
            self.values[name] = LiveValue(name, leaf.path, role, leaf.value, leaf.put, is_hyper)
            return
        check_storable(name, leaf.value)
        alias = None if leaf.put is not None else self._alias(name, leaf.value)
        self.tensors[name] = LiveTensor(name, leaf.path, role, leaf.value, owner, alias, leaf.put, is_hyper)

    def _alias(self, name: str, tensor: torch.Tensor) -> str | None:
        if not tensor.numel():
            return None
        key = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first = self._seen.setdefault(key, name)
        return None if first == name else first
