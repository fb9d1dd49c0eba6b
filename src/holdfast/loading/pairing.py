"""Finding twins: nodes of a team that need the same, so that each reads a part of it and sends that to the others.

Each node says a digest of what it needs; the leader of the team tells each node its twins. Either all lines between twins can
be made, or none is, and each node reads for itself.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ..format.index import Chunks
from ..run.team import Call
from .node import Node
from .twins import Address, Door, Line

log = logging.getLogger("holdfast")
TWINS, JOIN = PHASES = ("twins", "join")
MOST_TWINS = 16
"""Nodes that read for each other; more of them are cut into several groups, so that a rank has few connections."""
LEAST_BYTES = 8 << 20
"""What a node must need for lines to be worth their making."""


@dataclass
class Twins:
    """Of one rank: lines to the same rank of the other nodes, by their number, and the number of its own node."""

    lines: Mapping[int, Line] = field(default_factory=dict)
    number: int = 0

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


def find_twins(call: Call, chunks: Chunks, node: Node | None, name: str, nodes: Mapping[str, Sequence[int]]) -> Twins:
    """Find the twins of this rank's node and connect to them; none where there are none or one cannot be reached.

    Args:
        call: of the whole team. name: of the node. nodes: the ranks of each, for the team's leader.
    Raises:
        What any rank failed with.  Deadline: naming those that did not come.
    """
    with contextlib.ExitStack() as stack:
        doors: list[Door] = []

        def say() -> Any:
            if node is None or _bytes_of(node, chunks) < LEAST_BYTES:
                return None
            try:
                doors.append(Door(call.team.rank))
            except OSError as error:
                log.warning("this rank cannot be reached from other nodes: %s", error)
                return None
            stack.callback(doors[0].close)
            return [node.kind(), msgspec.msgpack.encode(doors[0].address)]

        def conclude(said: list[Any]) -> bool:
            by_rank = dict(zip(call.team.ranks, said, strict=True))
            groups = _groups(by_rank, nodes)
            for group in groups:
                addresses = [[by_rank[rank][1] for rank in nodes[one]] for one in group]
                for number, one in enumerate(group):
                    call.tell(TWINS, one, [number, addresses])
            for one in nodes.keys() - {one for group in groups for one in group}:
                call.tell(TWINS, one, [0, []])
            return bool(groups)

        if not call.round(TWINS, say, conclude):
            return Twins()
        number, addresses = call.told(TWINS, name)
        made = Twins(number=number)

        def join() -> str:
            if addresses and node is not None:
                twins = [msgspec.msgpack.decode(one[node.position], type=Address) for one in addresses]
                try:
                    made.lines = doors[0].lines(twins, call)
                    stack.callback(made.close)
                except OSError as error:
                    return f"rank {call.team.rank}: {error}"
            return ""

        why = call.round(JOIN, join, lambda said: next(filter(None, said), ""))
        if why:
            if call.team.leads:
                log.warning("nodes that need the same cannot read for each other, and each reads all it needs: %s", why)
            return Twins()
        for door in doors:
            door.close()
        stack.pop_all()
    return made


def _bytes_of(node: Node, chunks: Chunks) -> int:
    """Bytes that a node needs."""
    return int(chunks.stored_bytes[np.unpackbits(node.union(), count=len(chunks)).astype(bool)].sum(dtype=np.int64))


def _groups(said: Mapping[int, Any], nodes: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Names of nodes that need the same, all of whose ranks can be reached."""
    alike: dict[bytes, list[str]] = {}
    for name, ranks in nodes.items():
        if all(said[rank] is not None for rank in ranks):
            alike.setdefault(said[ranks[0]][0], []).append(name)
    cut = [names[at : at + MOST_TWINS] for names in alike.values() for at in range(0, len(names), MOST_TWINS)]
    return [names for names in cut if len(names) > 1]
