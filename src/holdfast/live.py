"""Live state, taken apart: every tensor and value of a job by its logical name, with what it takes to put others there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import Refused
from .format.names import dotted
from .layout.layouts import Layout, Whole
from .sharding.local import Sharded, is_sharded, sharded, this_rank
from .tensors import check_storable
from .tree import Leaf, Path, Put, walk


@dataclass(slots=True)
class LiveTensor:
    name: str
    path: Path
    role: str
    sharded: Sharded
    owner: str | None = None
    """Name of the parameter that it is optimizer state of."""
    alias: str | None = None
    """Name of the tensor whose memory this one is."""
    put: Put | None = None
    """How to give a new value, where the tensor is only a reading of it (a generator's state); None: copy into it."""
    is_hyper: bool = False

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's memory of it; the whole tensor where it is not sharded."""
        return self.sharded.local

    @property
    def shape(self) -> tuple[int, ...]:
        """Global."""
        return self.sharded.shape

    @property
    def layout(self) -> Layout:
        return self.sharded.layout


@dataclass(slots=True)
class LiveValue:
    name: str
    path: Path
    role: str
    value: Any
    put: Put | None
    is_hyper: bool = False
    """A hyper-parameter: a difference between stored and live is listed, and `live=` keeps ours."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Which of several states of a role this rank has."""

    axis: str
    """rank, or data: what they are numbered by."""
    number: int
    count: int
    has_reshape: bool
    """Whether they can be made from another number of states."""
    ranks: tuple[int, ...]
    """Global ranks that have the same one, ascending."""


@dataclass
class Live:
    """The state as it is now. Tensors are the live ones, not copies."""

    to_fill: bool = False
    """It is about to be loaded: what will be replaced as a whole is not taken apart."""
    rank: int = field(default_factory=this_rank)
    """Global rank of this process."""
    ranks: tuple[int, ...] = ()
    """Global ranks that save or load together; empty for a process that works alone."""
    streams: dict[str, Stream] = field(default_factory=dict)
    """Of the roles that belong to each rank: which of how many this rank has."""
    rules: Callable[[str, torch.Tensor], Sharded | None] | None = None
    """How hand-sharded tensors lie, by name."""
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
    allocators: list[Callable[[Path, torch.dtype, tuple[int, ...]], tuple[Any, Sharded] | None]] = field(default_factory=list)
    """Make what the live side lacks (moments before the first step): what a placer takes, and its memory here; or None where
    the path is not theirs."""
    placers: list[Callable[[Path, Any], bool]] = field(default_factory=list)
    """Take what the live side lacks; False where the path is not theirs."""
    after: list[Callable[[set[str]], None]] = field(default_factory=list)
    """Called with the names that were filled, when a load is over: what is a copy of them is brought up to date."""
    plain: set[int] = field(default_factory=set)
    """`id`s of the parts whose tensors `signature.py` can tell."""
    stable: set[str] = field(default_factory=set)
    """Roles of which is known that only an optimizer's step changes their tensors."""
    again: list[Callable[[Live], None]] = field(default_factory=list)
    """Add to another `Live`, in order, what may change while the signature stays: all but the plain parts' tensors."""
    _seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """How many ranks save or load together."""
        return max(1, len(self.ranks))

    @property
    def position(self) -> int:
        """Of this rank among them."""
        return self.ranks.index(self.rank) if self.ranks else 0

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

    @staticmethod
    def name_of(path: Path) -> str:
        """The logical name of a path."""
        return dotted(path)

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
        if not is_sharded(leaf.value):
            check_storable(name, leaf.value)
        by_rule = self.rules(owner or name, leaf.value) if self.rules is not None and leaf.put is None else None
        found = by_rule or sharded(name, leaf.value)
        self.add_sharded(name, leaf.path, role, found, owner, put=leaf.put, is_hyper=is_hyper, tied=id(leaf.value))

    def add_sharded(
        self,
        name: str,
        path: Path,
        role: str,
        found: Sharded,
        owner: str | None = None,
        *,
        put: Put | None = None,
        is_hyper: bool = False,
        tied: Any = None,
    ) -> None:
        """Add what this rank has of a logical tensor.

        Args:
            tied: equal for names that are one sharded tensor, whose memory here may be empty.
        Raises:
            Unsupported: it cannot be stored.
        """
        check_storable(name, found.local)
        alias = None if put is not None else self._alias(name, found, tied)
        self.tensors[name] = LiveTensor(name, path, role, found, owner, alias, put, is_hyper)

    def _alias(self, name: str, found: Sharded, tied: Any) -> str | None:
        tensor = found.local
        if not isinstance(found.layout, Whole):
            key: tuple[Any, ...] = ("sharded", tied)
        elif not tensor.numel():
            return None
        else:
            key = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first = self._seen.setdefault(key, name)
        return None if first == name else first
