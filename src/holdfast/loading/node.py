"""What the ranks of one node have in common while they load: memory, links, and the knowledge of who needs what.

Who needs what is told through the shared memory, a bit for each chunk of the checkpoint, so that the team's board carries a
message of constant size for each rank, however large checkpoint and job are.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ..format.columns import Array
from ..format.digest import digest
from ..format.index import Chunks
from ..plan.exchange import slot_bytes
from ..run.team import Call
from .fill import Reads
from .links import Links
from .meeting import Memory, meet
from .reading import GROUP_BYTES
from .shared_memory import SharedMemory

SLOT_BYTES = 32 << 20
"""Of a slot at most, unless one chunk is larger."""
SLOT_BYTES_EACH = GROUP_BYTES
"""Of a slot, for each rank of the node: what it reads at once."""
SLOTS = 2
"""One is copied from while the other is read into. More of them fall out of the processor's caches: 10 % slower for each."""
_NEEDS = "needs"


@dataclass(frozen=True)
class Node:
    """The node, as one of its ranks sees it."""

    memory: SharedMemory
    links: Links
    position: int
    """Of this rank among its ranks."""
    needs: list[Array]
    """Of each rank, a packed bitmap of the chunks that it needs."""
    slot: int
    """Bytes of a slot of the ring."""

    def close(self) -> None:
        self.links.close()
        self.needs.clear()
        self.memory.close()

    def union(self) -> Array:
        """A packed bitmap of what the node needs."""
        union: Array = np.bitwise_or.reduce(self.needs)
        return union

    def kind(self) -> bytes:
        """Equal for nodes that need the same and can divide it alike."""
        return digest(self.union()) + struct.pack("<qq", len(self.needs), self.slot)


def gather(chunks: Chunks, reads: Reads, call: Call) -> Node | None:
    """Meet the other ranks of the node, and learn what they need; None, on all of them, where they cannot meet.

    Args:
        chunks: of the whole index. call: of the ranks of the node, with the phases of `meeting.py`.
    Raises:
        What any rank of the node failed with.  Unavailable: one died.  Deadline: naming those that did not come.
    """
    ranks, position = len(call.team.ranks), call.team.position
    slot = slot_bytes(chunks, min(SLOT_BYTES, ranks * SLOT_BYTES_EACH))
    met = meet(call, Memory(ranks, -(-len(chunks) // 8), SLOTS, slot))
    if met is None:
        return None
    memory, links = met
    node = Node(memory, links, position, [memory.bitmap(at) for at in range(ranks)], slot)
    try:
        need = np.zeros(len(chunks), bool)
        need[reads.rows] = True
        node.needs[position][:] = np.packbits(need)
        links.post(_NEEDS, 1)
        links.wait(_NEEDS, 1, "to say what they need")
    except BaseException as error:
        links.fail(error)
        node.close()
        raise
    return node
