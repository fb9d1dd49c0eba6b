"""What ranks of one node tell each other arrives, also from one that has left since."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import NoSpace
from holdfast.loading import links
from holdfast.run.identity import this_process
from holdfast.run.store_board import StoreBoard
from holdfast.run.team import Team
from holdfast.store.local import LocalStore


def test_why_a_rank_has_left_is_known_though_it_has_not_read_everything(tmp_path: Path) -> None:
    """A connection that is closed with unread messages in it is reset, before those that were sent over it are read."""
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    call = Team((0, 1), 1, StoreBoard(LocalStore(tmp_path), "agents/test", 2)).call("load", 30.0, ["fill"])
    made = links.Links(call, {0: ours}, {0: this_process()})
    try:
        made.post("needs", 1)
        for message in ([links._FAILED, 1, [NoSpace.__name__, "rank 0: injected"]], [links._ENDED, 1, None]):
            theirs.send(msgspec.msgpack.encode(message))
        theirs.close()
        with pytest.raises(NoSpace, match="injected"):
            made.wait("filled", 1, "to read its part")
    finally:
        made.close()
