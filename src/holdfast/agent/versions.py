"""What an engine knows: of each version on its way to the store, and of each rank and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..run.history import Step
from .arena import Arena, Bytes
from .gate import Gate
from .messages import Begin, Captured, Structured, Table
from .times import Times

FILLING, QUEUED, WRITING, DURABLE, FAILED = "filling", "captured", "writing", "durable", "failed"
OVER = (DURABLE, FAILED)


@dataclass
class Version:
    """One step, on its way from the ranks' memory to the store."""

    step: int
    turn: int = 1
    """How many times the step was begun."""
    begun: dict[int, Begin] = field(default_factory=dict)
    """By rank, until it is over."""
    at: dict[int, int] = field(default_factory=dict)
    """By rank: the number of its slot."""
    tables: dict[int, Table] = field(default_factory=dict)
    gates: dict[int, Gate] = field(default_factory=dict)
    arenas: dict[int, Arena] = field(default_factory=dict)
    """Those that it was begun in: a rank may have another one since, while this version is still to be written."""
    slots: dict[int, Bytes] = field(default_factory=dict)
    """Its memory in them, which stays for as long as this has it."""
    freed: set[int] = field(default_factory=set)
    """Ranks that may fill its slot again."""
    captured: dict[int, Captured] = field(default_factory=dict)
    level: str = FILLING
    error: list[str] | None = None
    is_skip: bool = False
    written: Step | None = None
    times: Times = field(default_factory=Times)


@dataclass
class Rank:
    """What the engine knows of one rank."""

    structure: Structured | None = None
    arena: Arena | None = None
    tables: dict[int, tuple[Table, Arena]] = field(default_factory=dict)
    """By number, the last ones, with the arena that was given for each: a capture may have begun before the newest."""
    last_step: int = -1
    """That it has begun; it will begin none before it any more."""
    is_there: bool = True


def first_reserved(table: Table) -> Arena:
    """Memory for a table's slots, with the pages of the first one.

    Raises:
        NoSpace: there is not so much.
    """
    arena = Arena.create(table.slots, table.nbytes)
    try:
        arena.reserve(0)
    except BaseException:
        arena.close()
        raise
    return arena
