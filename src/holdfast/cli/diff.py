"""`holdfast diff`: which tensors and values of two checkpoints differ, and by how much. Without torch.

Tensors whose chunks have the same digests are not read. Step numbers, metrics, and how tensors are cut do not count.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from ..address import UsageError
from ..loading.checkpoint import Checkpoint
from ..patterns import as_list, matches_any
from .amounts import counted, number, short
from .measure import Distance, distance, have_equal_chunks
from .place import open_address
from .terminal import Advance, Json, print_json, print_table, progress
from .values import stored_values, value_text

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
        UsageError: nothing does.  Corrupt: bytes that had to be read are damaged.
    """

    def chosen(names: Any) -> set[str]:
        return {n for n in names if matches_any(n, select) and not matches_any(n, exclude)}

    ours, theirs = chosen(a.names), chosen(b.names)
    left, right = stored_values(a), stored_values(b)
    our_values, their_values = chosen(left), chosen(right)
    if not (ours or theirs or our_values or their_values) and (a.names or b.names):
        raise UsageError("nothing in either of the two matches --select without --exclude; they were not compared")
    result = Difference(len(ours & theirs), len(our_values & their_values))
    result.only_in_a = sorted((ours | our_values) - (theirs | their_values))
    result.only_in_b = sorted((theirs | their_values) - (ours | our_values))
    result.changed_values = [
        {"name": name, "a": left[name], "b": right[name]}
        for name in sorted(our_values & their_values)
        if json.dumps(left[name], sort_keys=True) != json.dumps(right[name], sort_keys=True)
    ]
    if a.content_digest and a.content_digest == b.content_digest:
        return result
    done, total = 0, sum(a[name].nbytes for name in ours & theirs)
    for name in sorted(ours & theirs):
        if (changed := _compare_tensor(a, b, name)) is not None:
            result.changed.append(changed)
        done += a[name].nbytes
        advance("comparing", done, total)
    return result


def _compare_tensor(a: Checkpoint, b: Checkpoint, name: str) -> Changed | None:
    left, right = a.tensor(name), b.tensor(name)
    what = [word for word in ("shape", "dtype") if getattr(left, word) != getattr(right, word)]
    if a[name].alias_of != b[name].alias_of:
        what.append("alias")
    measured = None
    if left.shape == right.shape and not (left.dtype == right.dtype and have_equal_chunks(a, left, b, right)):
        measured = distance(a, left, b, right)
        if measured.differing:
            what.append("content")
    if not what:
        return None
    return Changed(name, what, _kind(a, name), _kind(b, name), measured if "content" in what else None)


def _kind(checkpoint: Checkpoint, name: str) -> str:
    tensor = checkpoint[name]
    alias = f" (shares {tensor.alias_of})" if tensor.alias_of else ""
    return f"{tensor.dtype} {list(tensor.shape)}{alias}"


def _tell(found: Difference, a: str, b: str) -> None:
    common = f"{counted(found.tensors, 'tensor')} and {counted(found.values, 'value')}"
    if found.is_empty:
        print(f"equal: {common}, in every bit")
        return
    for where, names in ((a, found.only_in_a), (b, found.only_in_b)):
        for name in names:
            print(f"only in {where}: {name}")
    if found.changed:
        titles = ("tensor", "differs in", "kind", "elements", "max abs", "relative L2")
        print_table(titles, [_row(changed) for changed in found.changed], right=titles[3:])
    for value in found.changed_values:
        ends = (short(value_text(value["name"], value[end])) for end in "ab")
        print(f"value {value['name']}: {' -> '.join(ends)}")
    differing = f"{counted(len(found.changed), 'tensor')} and {counted(len(found.changed_values), 'value')}"
    print(f"different: {differing} of the {common} that both have")


def _row(changed: Changed) -> tuple[str, ...]:
    kind = changed.a if changed.a == changed.b else f"{changed.a} -> {changed.b}"
    measured = changed.distance
    cells = ("", "", "")
    if measured is not None:
        share = f"{measured.differing} of {measured.elements}"
        unmeasured = f" ({measured.not_finite} not finite)" if measured.not_finite else ""
        cells = (share + unmeasured, number(measured.max_abs), number(measured.relative_l2))
    return (changed.name, ", ".join(changed.what), kind, *cells)
