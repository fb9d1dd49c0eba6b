"""The contents of a step from what the ranks of a node have captured: one writer's, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import Refused
from ..format.names import path_of
from ..run.contents import Contents, TensorItem
from ..run.parts import Part
from ..run.unite import unite, writer_of
from .arena import Bytes
from .gate import ArenaSource, Gate
from .messages import Begin, Row, Table


@dataclass(frozen=True)
class Taken:
    """One rank's part of a step."""

    rank: int
    table: Table
    begin: Begin
    slot: Bytes
    gate: Gate


def contents_of(taken: Sequence[Taken]) -> Contents:
    """What the parts of all ranks are together. Their bytes may still be on their way.

    Args:
        taken: by ascending rank.
    Raises:
        Refused: two ranks write the same box, or replicated generators differ.
    """
    parts = [
        Part(writer=writer_of(one.rank), step=one.begin.step, attempt=0, values=one.begin.values, roles=one.begin.roles)
        for one in taken
    ]
    values, rank_values = unite(parts)
    roles = {role: kind for part in parts for role, kind in part.roles.items()}
    return Contents(_tensors(taken), values, rank_values, roles)


def differing_census(taken: Mapping[int, Begin]) -> bool:
    """Whether some ranks have computed their shares from an older census than others."""
    return len({begin.census for begin in taken.values()}) > 1


def _tensors(taken: Sequence[Taken]) -> list[TensorItem]:
    written: dict[tuple[str, tuple[int, ...]], int] = {}
    names: set[str] = set()
    found: list[TensorItem] = []
    known: dict[str, TensorItem] = {}
    for one in taken:
        for row in one.table.rows:
            item = _item(row, one)
            if item.source is None:
                known.setdefault(item.name, item)
                continue
            if (other := written.setdefault(item.key, one.rank)) != one.rank:
                raise Refused(
                    f"{item.name}: ranks {other} and {one.rank} both write what lies at {list(item.key[1])} of it; "
                    "give different tensors different names, or wrap them in holdfast.PerRank"
                )
            names.add(item.name)
            found.append(item)
    return found + [item for name, item in known.items() if name not in names]


def _item(row: Row, one: Taken) -> TensorItem:
    source = ArenaSource(one.slot, row.at, row.nbytes, one.gate, row.ready) if row.at >= 0 else None
    return TensorItem(row.name, path_of(row.path), row.dtype, row.shape, row.role, source, row.owner, row.alias, row.box)
