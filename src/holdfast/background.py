"""From the settings of a Checkpointer to what saves in the background: an agent of the node, or a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .agent.links import AgentLink, ThreadLink, ask, reach
from .agent.marks import Marks
from .agent.messages import Adopt, Flush, Flushed, Node
from .agent.place import node_name, socket_path
from .agent.recall import remembering
from .agent.writer import JointWriter, SessionWriter
from .capture.saver import Saver
from .coding import coder_of
from .errors import Deadline, Refused
from .format.records import Claim, StepRef
from .policy.durations import seconds_of
from .policy.keep import Keep
from .policy.memory import bytes_of
from .run.board import Apart
from .run.contents import Contents
from .run.history import History
from .run.joint import Joint
from .run.session import Session
from .run.team import Team
from .state import State
from .store.base import Store
from .store.local import LocalStore
from .version import libraries

log = logging.getLogger("holdfast")
ON_FULL = ("skip", "wait", "coalesce")
_VISIBLE_SECONDS = 5.0
"""How long caches of a shared file system may hide what another node has written."""
_SHARE_OF_EARLIER = 0.8
"""Of a deadline, that what an earlier job left may take: ranks that wait for the leader have the same deadline."""


@dataclass(frozen=True)
class Agent:
    """How the process that saves is run: for `Checkpointer(agent=)`.

    Attributes:
        idle: seconds, or "10m": it ends when no trainer has been connected for so long. nice: of its priority.
    """

    idle: float | str = "10m"
    nice: int = 5

    def __post_init__(self) -> None:
        seconds_of(self.idle, "Agent(idle=)")


@dataclass(frozen=True)
class Settings:
    """What a Checkpointer was told about saving in the background."""

    memory: int | str = "auto"
    on_full: str = "skip"
    agent: bool | Agent = True
    keep: Keep = field(default_factory=Keep)
    recycle: bool = True
    coding: str | Mapping[str, str] = "raw"
    seconds: float = 600.0
    """By then a save is durable, or has failed."""

    def __post_init__(self) -> None:
        if self.on_full not in ON_FULL:
            raise ValueError(f"on_full={self.on_full!r}: {', '.join(ON_FULL)}")
        if self.memory != "auto":
            bytes_of(self.memory, "memory")
        if not isinstance(self.agent, (bool, Agent)):
            raise ValueError(f"agent={self.agent!r}: True, False or holdfast.Agent(...)")
        coder_of(self.coding)  # raises for what is no coding


def is_synchronous() -> bool:
    """Whether everything is to happen before the call returns, for debugging."""
    return os.environ.get("HOLDFAST_SYNC", "0") not in ("", "0")


def start(
    settings: Settings, state: State, store: Store, team: Team | None, session: Session | None, attempt: int,
) -> Saver:  # fmt: skip
    """What saves for this rank from now on. Called by all ranks of a team.

    Args:
        session: of the rank that leads, or of the one process.
    """
    rank, ranks = (team.rank, team.ranks) if team is not None else (0, ())
    nodes, is_shared = _look_around(team, store, attempt, settings.seconds)
    here = next(node.ranks for node in nodes if rank in node.ranks)
    has_agent = bool(settings.agent) and _is_reachable(store) and is_shared
    if settings.agent and not has_agent:
        why = "its nodes do not see the same files" if _is_reachable(store) else "no other process can reach them"
        log.info("no agent saves for this job to %s, as %s: a thread of each trainer does", store.url, why)

    def committed(ref: StepRef) -> None:
        if session is not None and (has_agent or team is None):
            session.follow(ref)

    def agree(step: int, mine: bool) -> bool:
        return mine if team is None else bool(team.decide("save", step, int(mine)))

    saver = Saver(
        state, ranks, rank, here, has_agent and len(ranks) > 1, settings.memory, settings.seconds, attempt, committed, agree
    )
    if has_agent:
        given = settings.agent if isinstance(settings.agent, Agent) else Agent()
        idle = seconds_of(given.idle, "Agent(idle=)")
        adopt = _adopt(settings, session, attempt, here, nodes, idle) if rank == here[0] else None
        saver.link = AgentLink(store.url, node_name(), rank, attempt, adopt, saver.hear, saver.lost, idle, given.nice)
        return saver
    writer: SessionWriter | JointWriter
    marks, coder = Marks(store), coder_of(settings.coding)
    if team is None:
        writer = SessionWriter(Session(marks, libraries(), claim=_held(session).claim), settings.keep, settings.recycle, coder)
    else:
        joint = Joint(Team(team.ranks, team.rank, Apart(team.board, "background/"), team.node), marks)
        seconds, keep, recycle = settings.seconds, settings.keep, settings.recycle
        writer = JointWriter(joint, lambda: _held(session), partial(_declared, saver), seconds, keep, recycle, coder)
    saver.link = ThreadLink(rank, writer, saver.hear, marks, attempt)
    return saver


def finish_earlier(store: Store, team: Team | None, seconds: float) -> None:
    """Have agents that still hold something of an earlier job on this run make it durable. Called by all ranks of a team."""
    if is_synchronous() or not _is_reachable(store):
        return
    if team is None:
        _finish(store, seconds * _SHARE_OF_EARLIER, (), ())
        return
    call = team.call("finish what agents hold", seconds, ["look", "finish"])
    said = call.round("look", lambda: [team.node, _has_agent(store)], lambda said: said)
    absent = {node for node, _ in said} - {node for node, has_agent in said if has_agent}
    is_first = [node for node, _ in said].index(team.node) == team.position

    def finish() -> None:
        if is_first:
            present = tuple(sorted({node for node, _ in said} - absent))
            _finish(store, seconds * _SHARE_OF_EARLIER, tuple(sorted(absent)), present)

    call.round("finish", finish, lambda said: None)


def _finish(store: Store, seconds: float, absent: tuple[str, ...], present: tuple[str, ...]) -> None:
    """Wait until the agent of this node has finished, if there is one.

    Args:
        absent: nodes of the job that have none. present: nodes of the job that have one, where there are several.
    """
    try:
        answer = ask(store.url, node_name(), Flush(seconds, absent, present), seconds + 1.0)
    except Deadline:
        answer = Flushed(False)
    if answer == Flushed(False):
        log.warning("an agent of an earlier job did not finish within %.0f s; what it holds is left out", seconds)


def _has_agent(store: Store) -> bool:
    """Whether somebody listens on this node for the run, even if he does not answer."""
    try:
        end = reach(socket_path(store.url, node_name()))
    except OSError:
        return True
    if end is not None:
        end.close()
    return end is not None


@contextlib.contextmanager
def in_memory(store: Store) -> Iterator[Store]:
    """The store, and what an agent of this node still has in memory of its newest step."""
    if is_synchronous() or not _is_reachable(store):
        yield store
        return
    with remembering(store, node_name()) as found:
        yield found


def _adopt(
    settings: Settings, session: Session | None, attempt: int, here: tuple[int, ...], nodes: tuple[Node, ...], idle: float
) -> Callable[[], Adopt]:
    def adopt() -> Adopt:
        claim = Claim(run="", attempt=attempt) if session is None else session.claim  # another node's agent leads
        coding, several = plain_coding(settings.coding), nodes if len(nodes) > 1 else ()
        return Adopt(claim, here, libraries(), settings.keep, settings.recycle, idle, coding, several, settings.seconds)

    return adopt


def _declared(saver: Saver, contents: Contents) -> Contents:
    """What a rank has captured, with what it knows of how it lies."""
    return replace(contents, layouts=saver.contents.layouts, streams=saver.contents.streams)


def plain_coding(asked: str | Mapping[str, str]) -> str | dict[str, str]:
    """What was asked for, as messages carry it."""
    return asked if isinstance(asked, str) else dict(asked)


def _held(session: Session | None) -> Session:
    if session is None:
        raise Refused("this rank does not lead")
    return session


def _is_reachable(store: Any) -> bool:
    """Whether another process can open the same store by its URL."""
    return type(store) is LocalStore and store.is_default


def _look_around(team: Team | None, store: Store, attempt: int, seconds: float) -> tuple[tuple[Node, ...], bool]:
    """The nodes of the job, in the order of their first ranks; and whether all of them see the same store."""
    if team is None:
        return (Node("", (0,)),), True
    call = team.call("where the ranks are", seconds, ["nodes"])
    said = call.round("nodes", lambda: [team.node, _is_reachable(store) and _sees(store, attempt)], lambda said: said)
    nodes: dict[str, list[int]] = {}
    for rank, (name, _) in zip(team.ranks, said, strict=True):
        nodes.setdefault(name, []).append(rank)
    return tuple(Node(name, tuple(ranks)) for name, ranks in nodes.items()), all(sees for _, sees in said)


def _sees(store: Store, attempt: int) -> bool:
    """Whether the attempt's record, which the leader has written, is there."""
    until = time.monotonic() + _VISIBLE_SECONDS
    while attempt not in History(store).attempt_numbers():
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True
