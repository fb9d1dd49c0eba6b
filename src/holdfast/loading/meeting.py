"""How the ranks of a node come to share memory and links: over the team's board they tell each other where to find them.

All of them meet or none does: where one cannot reach another's process (containers with pid or network namespaces of their
own), all are told so, and each reads for itself.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from dataclasses import dataclass

import msgspec

from ..format.records import Process
from ..run.identity import this_process
from ..run.team import Call
from . import shared_memory
from .links import Links, Listening, connect
from .shared_memory import SharedMemory

log = logging.getLogger("holdfast")
MEET, CONNECT = PHASES = ("meet", "connect")


@dataclass(frozen=True, slots=True)
class Memory:
    """How large the shared memory is; equal on all ranks."""

    ranks: int
    bitmap: int
    """Bytes of each rank's bitmap."""
    slots: int
    slot: int
    """Bytes of each."""

    def mapped(self, fd: int) -> SharedMemory:
        return SharedMemory(fd, self.ranks, self.bitmap, self.slots, self.slot)


class Place(msgspec.Struct, array_like=True):
    """Where a rank is found by the others of its node."""

    process: Process
    socket: str
    secret: bytes
    fd: int
    """Of the shared memory, of the first rank."""


def meet(call: Call, memory: Memory) -> tuple[SharedMemory, Links] | None:
    """Meet the other ranks of the node; None, on all of them, where one cannot.

    Raises:
        What any of them failed with.  Deadline: naming those that did not come.
    """
    team = call.team
    with contextlib.ExitStack() as stack:
        listening, mapped = _begin(stack, memory if team.leads else None, len(team.ranks) - 1)

        def where() -> bytes:
            if listening is None:
                return b""
            fd = mapped[0].fd if mapped else -1
            return msgspec.msgpack.encode(Place(this_process(), listening.name, listening.secret, fd))

        said: list[bytes] = call.round(MEET, where, lambda said: said)
        places = {r: msgspec.msgpack.decode(one, type=Place) for r, one in zip(team.ranks, said, strict=True) if one}
        lower, higher = [r for r in team.ranks if r < team.rank], [r for r in team.ranks if r > team.rank]
        ends: dict[int, socket.socket] = {}

        def reach() -> str:
            """Why the others cannot be reached; empty where they can."""
            if absent := [rank for rank in team.ranks if rank not in places]:
                return f"rank {absent[0]} has no shared memory or sockets to offer"
            try:
                if not mapped:
                    first = places[team.ranks[0]]
                    mapped.append(memory.mapped(shared_memory.open_of(first.process.pid, first.fd)))
                    stack.callback(mapped[0].close)
                for rank in lower:
                    ends[rank] = stack.enter_context(connect(places[rank].socket, places[rank].secret, team.rank, call.left))
            except OSError as error:
                return f"rank {team.rank} cannot reach the others' memory and sockets: {error}"
            return ""

        why = call.round(CONNECT, reach, lambda said: next(filter(None, said), ""))
        if why:
            if team.leads:
                log.warning("ranks %s of one node cannot read for each other, and each reads all it needs: %s", team.ranks, why)
            return None
        assert listening is not None
        for rank, end in listening.accept(higher, lambda: call.left).items():
            ends[rank] = stack.enter_context(end)
        links = Links(call, ends, {rank: place.process for rank, place in places.items()})
        listening.close()
        stack.pop_all()
        return mapped[0], links


def _begin(stack: contextlib.ExitStack, memory: Memory | None, others: int) -> tuple[Listening | None, list[SharedMemory]]:
    """A socket for the others to connect to, and the first rank's memory, as far as this system has them."""
    mapped = []
    try:
        if memory is not None:
            mapped.append(memory.mapped(shared_memory.make()))
            stack.callback(mapped[0].close)
        listening = Listening(others)
        stack.callback(listening.close)
    except (OSError, AttributeError) as error:
        log.warning("this rank cannot share what it reads: %s", error)
        return None, mapped
    return listening, mapped
