"""`holdfast diff`: which tensors and values of two checkpoints differ, and by how much. Without torch.

Tensors whose chunks have the same digests are not read. Step numbers, metrics, and how tensors are cut do not count.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from ..loading.checkpoint import Checkpoint
from ..patterns import as_list, matches_any
from .amounts import counted, number, short
from .measure import Distance, distance, have_equal_chunks
from .place import open_address
from .terminal import Advance, Json, print_json, print_table, progress
from .values import values_of

DIFFERENT = 5


@dataclass
class Changed:
    """A tensor that both have, and that differs."""

    name: str
    what: list[str]
    """Of `shape`, `dtype`, `alias`, `content`."""
    a: str
    """dtype and shape there."""
    b: str
    distance: Distance | None = None
    """None where the shapes differ, or the content does not."""


@dataclass
class Difference:
    """Between two checkpoints."""

    tensors: int = 0
    """How many both have."""
    values: int = 0
    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    changed: list[Changed] = field(default_factory=list)
    changed_values: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.only_in_a or self.only_in_b or self.changed or self.changed_values)


def diff(
    a: Annotated[str, typer.Argument(help="One checkpoint.", metavar="A")],
    b: Annotated[str, typer.Argument(help="The other: of the same run or of another.", metavar="B")],
    select: Annotated[list[str] | None, typer.Option(help="Only names that match this pattern; repeatable.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Not names that match this one; repeatable.")] = None,
    as_json: Json = False,
) -> int:
    """Compare two checkpoints. Exit code 5 when they differ."""
    with open_address(a) as left, open_address(b) as right:
        with progress() as advance:
            found = compare(left, right, as_list(select) or ["*"], as_list(exclude), advance)
        ends = [{"address": text, "step": c.step, "attempt": c.attempt} for text, c in ((a, left), (b, right))]
    if as_json:
        print_json({"equal": found.is_empty, "a": ends[0], "b": ends[1], **asdict(found)})
    else:
        _tell(found, a, b)
    return 0 if found.is_empty else DIFFERENT


def compare(a: Checkpoint, b: Checkpoint, select: list[str], exclude: list[str], advance: Advance) -> Difference:
    """Compare what matches `select` and not `exclude`.

    Raises:
        Corrupt: bytes that had to be read are damaged.
    """

    def chosen(names: Any) -> set[str]:
        return {n for n in names if matches_any(n, select) and not matches_any(n, exclude)}

    ours, theirs = chosen(a.names), chosen(b.names)
    left, right = values_of(a), values_of(b)
    our_values, their_values = chosen(left), chosen(right)
    result = Difference(len(ours & theirs), len(our_values & their_values))
    result.only_in_a = sorted((ours | our_values) - (theirs | their_values))
    result.only_in_b = sorted((theirs | their_values) - (ours | our_values))
    result.changed_values = [
        {"name": name, "a": left[name], "b": right[name]}
        for name in sorted(our_values & their_values)
        if left[name] != right[name] or str(left[name]) != str(right[name])
    ]
    if a.content_digest and a.content_digest == b.content_digest:
        return result
    both = sorted(ours & theirs)
    for done, name in enumerate(both):
        advance("comparing", done, len(both))
        if (changed := _compare_tensor(a, b, name)) is not None:
            result.changed.append(changed)
    return result
