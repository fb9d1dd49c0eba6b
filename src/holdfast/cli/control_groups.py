"""Control groups: whether the agent of a node is in that of its job, by what /proc says of processes. Versions 1 and 2; Linux.

Together with its trainers, its memory counts for the limit of the job, and what ends a job by its group ends the agent too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HoldfastError
from ..run.status import Status
from .amounts import size
from .findings import OK, WARNING, Finding

PROC = Path("/proc")
_FIRST_NAMESPACE = "cgroup:[4026531835]"
"""That of the machine itself, by the kernel's fixed number; seen from any other one, `/` is a group as well."""
_UNIFIED, _MEMORY, _SYSTEMD, _FREEZER = "", "memory", "name=systemd", "freezer"
_ENDING = (_UNIFIED, _SYSTEMD, _FREEZER)
"""Hierarchies by which systemd, container runtimes and batch systems end what they have started."""
_OF_USERS = "/user.slice/"
_NAME = "cgroup"
_OUTSIDE = "`holdfast agent serve {run}` in a service outside of the job, started before it, is not"


@dataclass(frozen=True)
class Groups:
    """The control groups of a process, as this one sees them.

    Attributes:
        paths: by hierarchy: a controller's name, `name=...`, or "" for the one of version 2.
        is_machine: `/` is the whole machine, and no container.
    """

    paths: Mapping[str, str]
    is_machine: bool

    @property
    def name(self) -> str:
        """The group that says most: the one in which memory counts, or else one by which processes are ended."""
        found = next((path for path in (self.memory, *map(self._path, _ENDING)) if self._is_group(path)), "/")
        return found if found != "/" or self.is_machine else "that of this container"

    @property
    def is_of_a_session(self) -> bool:
        """Whether these are groups of a user's login, and of no job."""
        return self.name.startswith(_OF_USERS)

    @property
    def memory(self) -> str:
        return self._path(_MEMORY) or self._path(_UNIFIED)

    def counts_for(self, other: Groups) -> bool:
        """Whether the memory of a process in these groups counts for the group that `other` is in."""
        return self._is_group(other.memory) and _is_within(self.memory, other.memory)

    def ends_with(self, other: Groups) -> bool:
        """Whether what ends all in the group of `other` ends a process in these groups."""
        pairs = ((self._path(tree), other._path(tree)) for tree in _ENDING)
        return any(self._is_group(theirs) and _is_within(mine, theirs) for mine, theirs in pairs)

    def _path(self, tree: str) -> str:
        return self.paths.get(tree, "")

    def _is_group(self, path: str) -> bool:
        return bool(path) and (path != "/" or not self.is_machine)


def groups_of(pid: int | str, proc: Path = PROC) -> Groups | None:
    """The groups of a process, by its number or `self`; None where they cannot be told."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        paths = {tree: path for _, trees, path in (line.split(":", 2) for line in lines) for tree in trees.split(",")}
    except (OSError, ValueError):
        return None
    return Groups(paths, _is_machine(proc)) if paths else None


def check_control_group(run: str | None, status: Status | None, proc: Path = PROC) -> Finding:
    """Whether the agent is in the control group of its trainers; or where there is none, would be if this one were a trainer.

    Args:
        run: the path of the run, for what to do; None where there is none. status: of its agent.
    """
    trainers = [rank.pid for rank in status.ranks if rank.is_connected and rank.pid] if status is not None else []
    if status is None or not trainers:
        return _would_be(run, groups_of("self", proc))
    agent = groups_of(status.pid, proc) if _is_agent(status.pid, proc) else None
    theirs = {pid: found for pid in trainers if (found := groups_of(pid, proc)) is not None}
    facts = {"agent_pid": status.pid, "trainer_pids": trainers, "agent": agent.name if agent else None, "inside": None}
    if agent is None or len(theirs) < len(trainers):
        told = "unknown: not all of agent and trainers are seen from here"
        return Finding(_NAME, OK, f"{told}. Run this on their node, outside of containers", facts)
    shared = [pid for pid, groups in theirs.items() if agent.ends_with(groups) or agent.counts_for(groups)]
    facts["inside"] = bool(shared)
    if not shared:
        return Finding(
            _NAME, OK, f"agent {status.pid} is in {agent.name}, outside of that of its trainers: it outlives them", facts
        )
    told = f"agent {status.pid} is in {agent.name}, as trainer {shared[0]} is: {_consequences(agent, list(theirs.values()))}"
    if status.arena_bytes:
        told += f" (its versions take {size(status.arena_bytes)})"
    return Finding(_NAME, WARNING, f"{told}. {_what_to_do(run)}", facts)


def agent_status(url: str) -> Status | None:
    """Of the agent of a run on this node; None where there is none that answers."""
    from ..agent.client import status_of

    try:
        return status_of(url)
    except HoldfastError:  # it hangs, or listens where others could: `holdfast agent status` says which
        return None


def _would_be(run: str | None, mine: Groups | None) -> Finding:
    """Where no agent saves: a trainer starts it, in its own groups."""
    facts: dict[str, Any] = {"agent_pid": None, "trainer_pids": [], "agent": mine.name if mine else None, "inside": None}
    if mine is None:
        return Finding(_NAME, OK, "unknown: this system does not tell the control groups of processes", facts)
    facts["inside"] = mine.ends_with(mine) or mine.counts_for(mine)
    if not facts["inside"]:
        return Finding(_NAME, OK, "none: an agent that is started from here counts for no limit, and outlives its job", facts)
    told = f"an agent that is started from here is in {mine.name}, with its job"
    if mine.is_of_a_session:
        return Finding(_NAME, OK, f"{told}; that is a user's session", facts)
    return Finding(_NAME, WARNING, f"{told}: {_consequences(mine, [mine])}. {_what_to_do(run)}", facts)


def _consequences(agent: Groups, trainers: Sequence[Groups]) -> str:
    found = []
    if any(agent.counts_for(groups) for groups in trainers):
        found.append("a limit on the job's memory counts that of the agent")
    if any(agent.ends_with(groups) for groups in trainers):
        found.append("what ends the group ends the agent, with what was captured and not durable")
    return ", and ".join(found)


def _what_to_do(run: str | None) -> str:
    return _OUTSIDE.format(run=run or "RUN")


def _is_agent(pid: int, proc: Path) -> bool:
    """Whether the process of that number is the agent: it may be in a container with numbers of its own."""
    try:
        return b"holdfast" in (proc / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False


def _is_machine(proc: Path) -> bool:
    try:
        return os.readlink(proc / "self" / "ns" / "cgroup") == _FIRST_NAMESPACE
    except OSError:  # before control groups had namespaces
        return True


def _is_within(inner: str, outer: str) -> bool:
    """Whether a group is another one or lies in it. `/..` begins what lies outside of the container that looks."""
    if not inner or inner.startswith("/.."):
        return False
    return outer == "/" or inner == outer or inner.startswith(f"{outer}/")
