"""From the settings of a Checkpointer to what saves in the background: an agent of the node, or a thread."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .agent.links import AgentLink, ThreadLink, ask
from .agent.marks import Marks
from .agent.messages import Adopt, Flush, Flushed
from .agent.recall import remembering
from .agent.writer import JointWriter, SessionWriter
from .capture.saver import Saver
from .coding import coder_of
from .errors import Deadline, Refused
from .format.records import StepRef
from .policy.durations import seconds_of
from .policy.keep import Keep
from .policy.memory import bytes_of
from .run.joint import Joint
from .run.session import Session
from .run.team import Apart, Team
from .state import State
from .store.base import Store
from .store.local import LocalStore
from .version import libraries

log = logging.getLogger("holdfast")
ON_FULL = ("skip", "wait", "coalesce")
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
    here = _ranks_here(team, settings.seconds)
    has_agent = bool(settings.agent) and _is_reachable(store) and here == max(1, len(ranks))
    if settings.agent and not has_agent:
        why = "its ranks are on several nodes" if _is_reachable(store) else f"no other process can reach {store.url}"
        log.info("the agent does not save for this job, as %s: a thread of each trainer does", why)

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
        adopt = None if session is None else _adopt(settings, session, ranks or (0,), idle)
        node = os.environ.get("HOLDFAST_NODE", "")
        saver.link = AgentLink(store.url, node, rank, attempt, adopt, saver.hear, saver.lost, idle, given.nice)
        return saver
    writer: SessionWriter | JointWriter
    marks, coder = Marks(store), coder_of(settings.coding)
    if team is None:
        writer = SessionWriter(Session(marks, libraries(), claim=_held(session).claim), settings.keep, settings.recycle, coder)
    else:
        joint = Joint(Team(team.ranks, team.rank, Apart(team.board, "background/"), team.node), marks)
        seconds, keep, recycle = settings.seconds, settings.keep, settings.recycle
        writer = JointWriter(joint, lambda: _held(session), lambda: saver.contents, seconds, keep, recycle, coder)
    saver.link = ThreadLink(rank, writer, saver.hear, marks, attempt)
    return saver


def finish_earlier(store: Store, seconds: float) -> None:
    """Have an agent that still holds something of an earlier job on this run make it durable."""
    if is_synchronous() or not _is_reachable(store):
        return
    seconds *= _SHARE_OF_EARLIER
    try:
        answer = ask(store.url, os.environ.get("HOLDFAST_NODE", ""), Flush(seconds), seconds + 1.0)
    except Deadline:
        answer = Flushed(False)
    if answer == Flushed(False):
        log.warning("an agent of an earlier job did not finish within %.0f s; what it holds is left out", seconds)


@contextlib.contextmanager
def in_memory(store: Store) -> Iterator[Store]:
    """The store, and what an agent of this node still has in memory of its newest step."""
    if is_synchronous() or not _is_reachable(store):
        yield store
        return
    with remembering(store, os.environ.get("HOLDFAST_NODE", "")) as found:
        yield found


def _adopt(settings: Settings, session: Session, ranks: tuple[int, ...], idle: float) -> Callable[[], Adopt]:
    return lambda: Adopt(session.claim, ranks, libraries(), settings.keep, settings.recycle, idle, plain_coding(settings.coding))


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


def _ranks_here(team: Team | None, seconds: float) -> int:
    """How many ranks of the team are on this node."""
    if team is None:
        return 1
    call = team.call("where the ranks are", seconds, ["nodes"])
    nodes: list[str] = call.round("nodes", lambda: team.node, lambda said: said)
    return nodes.count(team.node)
