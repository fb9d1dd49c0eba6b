"""The agents of several nodes write together: each is one member of a team that meets in the checkpoint store itself.

No trainer has a part in it. A member that dies is missed at the deadline, or as soon as another agent stands in its place.
"""

from __future__ import annotations

import contextlib

from ..coding import coder_of
from ..run.joint import PHASES, Joint
from ..run.nodes import ByNodes
from ..run.session import Session
from ..run.store_board import StoreBoard, board_folder, remove_older
from ..run.team import Team
from ..store.base import Store
from .messages import Adopt, Node
from .writer import JointWriter

_LAST_WORD_SECONDS = 2.0
"""How long the first node's agent stays, so that the others read its last answer where it is quickest."""


class NodeWriter(JointWriter):
    """One node's part in what the agents of a job write together.

    Args:
        session: of the run, under the job's attempt; used by the node that leads.
    Raises:
        BoardGone: the store does not answer.
    """

    def __init__(self, store: Store, adopt: Adopt, session: Session) -> None:
        first = [node.ranks[0] for node in adopt.nodes]
        mine = adopt.ranks[0]
        self._board = StoreBoard(store, board_folder(adopt.claim.attempt), len(first))
        team = Team(tuple(first), mine, self._board, names={node.ranks[0]: name_of(node) for node in adopt.nodes})
        joint = Joint(team, store, sharing=ByNodes(), world=sum(len(node.ranks) for node in adopt.nodes))
        super().__init__(
            joint, lambda: session, lambda contents: contents, adopt.seconds, adopt.keep, adopt.recycle, coder_of(adopt.coding)
        )
        team.take_over(PHASES, "its agent was killed, and another one has taken its place")
        self._board.drop([f"ended/{team.rank}"])
        if team.leads:
            remove_older(store, adopt.claim.attempt)

    def close(self) -> None:
        """Say that this node is done; the last one takes the board away."""
        team = self._joint.team
        with contextlib.suppress(Exception):
            self.leave("its agent has ended")
            self._board.post(f"ended/{team.rank}", b"1")
            if self._board.wait([f"ended/{rank}" for rank in team.ranks], _LAST_WORD_SECONDS if team.leads else 0.0):
                self._board.remove()


def name_of(node: Node) -> str:
    """A node in messages."""
    return f"node {short_name(node)} (rank{'s' * (len(node.ranks) > 1)} {_spans(node.ranks)})"


def short_name(node: Node) -> str:
    """The host, where the name says more than that to be unique."""
    return node.name.partition("|")[0].partition("/")[0] if "|" in node.name else node.name


def _spans(ranks: tuple[int, ...]) -> str:
    """Ranks in few words: `0 to 7`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
