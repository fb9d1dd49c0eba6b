"""A tree of dotted names as indented lines: groups with their sums, leaves with what is known of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Leaf:
    """A tensor or a value."""

    cells: tuple[str, ...]
    """What stands in the columns after its name."""
    nbytes: int = 0
    is_tensor: bool = False


@dataclass
class _Group:
    groups: dict[str, _Group] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    tensors: int = 0
    values: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Line:
    """One line of the tree: a leaf, or a group with its sums."""

    label: str
    """Indented."""
    leaf: Leaf | None = None
    tensors: int = 0
    values: int = 0
    nbytes: int = 0


def lines(leaves: Mapping[str, Leaf], depth: int | None = None) -> Iterator[Line]:
    """The tree of `leaves`, by name, from its roots.

    Args:
        depth: groups that lie this deep are not opened; None opens all.
    """
    root = _Group()
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        _count(root, leaf)
        group = root
        for part in above:
            group = group.groups.setdefault(part, _Group())
            _count(group, leaf)
        group.leaves[last] = leaf
    yield from _walk(root, 0, depth)


def _count(group: _Group, leaf: Leaf) -> None:
    group.tensors += leaf.is_tensor
    group.values += not leaf.is_tensor
    group.nbytes += leaf.nbytes


def _walk(group: _Group, level: int, depth: int | None) -> Iterator[Line]:
    indent = "  " * level
    for name in sorted({*group.groups, *group.leaves}, key=_natural):
        if name in group.leaves:
            yield Line(indent + name, group.leaves[name])
        if name in group.groups:
            below, label = group.groups[name], name
            while not below.leaves and len(below.groups) == 1:
                ((only, below),) = below.groups.items()
                label = f"{label}.{only}"
            yield Line(indent + label, None, below.tensors, below.values, below.nbytes)
            if depth is None or level + 1 < depth:
                yield from _walk(below, level + 1, depth)


def _natural(name: str) -> list[tuple[int, str]]:
    """Numbers in a name count as numbers: layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]
