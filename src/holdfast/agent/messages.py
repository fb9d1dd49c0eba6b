"""What ranks and the agent of their node say to each other. Typed, versioned; the same objects are used within one process.

A field may be added with a default; anything else is a new VERSION, and an agent of another version is not used.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..format.records import Claim, Process
from ..policy.keep import Keep
from ..run.status import Status
from ..run.timings import Phase

VERSION = 1


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message of a rank."""

    version: int
    rank: int
    process: Process
    attempt: int = 0
    """Under which it saves."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The agent's answer to it."""

    version: int
    process: Process


class Node(msgspec.Struct, frozen=True):
    """One node of a job on several."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks, ascending."""


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """A job begins to save under an attempt: from the first of its ranks on this node. What is complete of earlier attempts is
    finished first."""

    claim: Claim
    ranks: tuple[int, ...]
    """Global ranks of the job on this node; () for a process that works alone."""
    libraries: dict[str, str]
    keep: Keep
    recycle: bool
    idle_seconds: float
    coding: str | dict[str, str] = "raw"
    nodes: tuple[Node, ...] = ()
    """Of a job on several nodes: all of them, in the order of their first ranks; the first one leads."""
    seconds: float = 600.0
    """By then a save of several nodes is durable, or has failed."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """To a rank: it is of the job that was adopted, and may save."""

    attempt: int


class Structured(msgspec.Struct, tag=True, frozen=True):
    """The structure of what a rank holds, when it has changed; see run/census.py."""

    digest: str
    data: bytes


class Common(msgspec.Struct, tag=True, frozen=True):
    """To all ranks: what the structures have in common, or why they cannot be saved together."""

    digest: str
    data: bytes
    error: list[str] | None = None


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a rank's part: a `TensorItem`, with where its bytes lie in the slot."""

    name: str
    path: list[Any]
    """As `stored_path` gives it."""
    dtype: str
    shape: tuple[int, ...]
    role: str
    owner: str | None
    alias: str | None
    box: tuple[tuple[int, ...], tuple[int, ...]] | None
    at: int
    """Bytes from the start of the slot; -1 where others write it."""
    nbytes: int
    ready: int
    """Its bytes are there when the rank's progress has come so far."""
    held: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The box that this one is some rows of, of which other ranks of the node have the others; None if it is all of it."""
    declared: str = ""
    """Digest of the layout that says that all who hold that box have the same bytes; empty where nothing does."""


class Table(msgspec.Struct, tag=True, frozen=True):
    """What all captures of a rank consist of, until the next table; answered with `Memory`."""

    number: int
    rows: list[Row]
    slots: int
    nbytes: int
    """Of one version."""


class Memory(msgspec.Struct, tag=True, frozen=True):
    """To a rank: the arena for its table; the descriptor comes with it. `error` where there is none."""

    number: int
    slots: int
    slot_bytes: int
    free: list[int] = []
    """Slots that may be filled now; of the others it is told when they may."""
    error: list[str] | None = None


class Begin(msgspec.Struct, tag=True, frozen=True):
    """A capture of a step has begun in a slot. All that is not in the arena is here."""

    step: int
    slot: int
    table: int
    census: str
    """Digest of the census that the share was computed from."""
    values: list[Any]
    roles: dict[str, str]
    metrics: dict[str, Any]
    refer: bool
    pin: str
    began: float
    """Unix seconds at which `step` was called."""
    turn: int = 1
    """How many times this step was begun: one that has failed may be begun again."""


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Rows whose `ready` is at most `at` are in the arena."""

    step: int
    at: int
    turn: int = 1


class Captured(msgspec.Struct, tag=True, frozen=True):
    """All bytes of a step are in the arena, and were checked against the live ones."""

    step: int
    proofs: dict[str, tuple[tuple[int, ...], str]]
    """Of what others hold, too, without it being declared: holders and digest, by name."""
    phases: tuple[Phase, ...] = ()
    turn: int = 1


class Dropped(msgspec.Struct, tag=True, frozen=True):
    """This rank does not take part in a step: it had no room, or its capture is not whole."""

    step: int
    error: list[str]
    is_skip: bool = False
    turn: int = 1
    by_all: bool = False
    """All ranks have agreed to leave it out: none of them begins it."""


class Displace(msgspec.Struct, tag=True, frozen=True):
    """A newer step needs memory: what is not being written yet is dropped for it."""

    step: int


class Outcome(msgspec.Struct, tag=True, frozen=True):
    """To all ranks: how a step has ended. `error` is [name of the class, text]."""

    step: int
    attempt: int
    error: list[str] | None = None
    is_skip: bool = False
    """It was left out on purpose: no room, or a newer one took its place."""
    was_superseded: bool = False
    pruning: str = ""
    """Why pruning failed after it, if it did."""
    turn: int = 0
    """Which of the times that the step was begun has ended so; 0 where it is not of one step."""


class Free(msgspec.Struct, tag=True, frozen=True):
    """To all ranks: a slot may be filled again."""

    slot: int


class Flush(msgspec.Struct, tag=True, frozen=True):
    """Finish what was captured on all ranks; what is not, of ranks that are gone, is given up."""

    seconds: float
    absent: tuple[str, ...] = ()
    """Nodes that have no agent any more: nothing is waited for that one of them would have to write."""
    present: tuple[str, ...] | None = None
    """Nodes of the job that asks, if it is one: agents of others may be gone with their nodes, and are not waited for long."""


class Flushed(msgspec.Struct, tag=True, frozen=True):
    """Whether all was finished in time."""

    is_done: bool
    last_step: int | None = None


class Bye(msgspec.Struct, tag=True, frozen=True):
    """The rank leaves in good order; with the last of them the agent ends."""


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Who asks wants to know how things are."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Finish and end."""


class Told(msgspec.Struct, tag=True, frozen=True):
    """The agent's status; see run/status.py."""

    status: Status


class Recall(msgspec.Struct, tag=True, frozen=True):
    """Who begins anew asks for what is still in memory."""


class Recalled(msgspec.Struct, tag=True, frozen=True):
    """The newest durable step whose bytes are in memory; `step` is -1 where there is none. The descriptors come with it."""

    step: int
    attempt: int = 0
    tables: list[Table] = []
    slots: list[int] = []
    """Of each arena, in the order of the descriptors: which slot it is in."""
    shapes: list[tuple[int, int]] = []
    """Slots and bytes of a slot of each arena."""


Message = (
    Hello
    | Welcome
    | Adopt
    | Joined
    | Structured
    | Common
    | Table
    | Memory
    | Begin
    | Progress
    | Captured
    | Dropped
    | Displace
    | Outcome
    | Free
    | Flush
    | Flushed
    | Bye
    | Ask
    | Stop
    | Told
    | Recall
    | Recalled
)
