"""A load by several ranks: one of them picks the step, all agree that it fits before anything is touched, and on the outcome.

Each rank accounts for what it holds; what is stored and has no place on any rank is refused. A digest that fails on one rank
leaves the state touched on all of them. Ranks of one node, and nodes that need the same, read for
each other: see `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np

from ..errors import Unavailable
from ..format.names import dotted, path_of
from ..live import Live
from ..run.team import Team
from .checkpoint import Checkpoint
from .exchange import source_of
from .fill import Direct, Reads, Source
from .ledger import Ledger
from .match import Match, match, refuse
from .meeting import PHASES as MEETING
from .node import Node, gather
from .pairing import JOIN, TWINS, Twins, find_twins
from .wishes import Wishes

T = TypeVar("T")
FIND, OPEN, MATCH, SHARE, CHECK, FILL, PUT = ("find", "open", "match", "share", "check", "fill", "put")
PHASES = (FIND, OPEN, MATCH, SHARE, TWINS, JOIN, CHECK, FILL, PUT)


class Alone:
    """A load by one process."""

    leads = True

    def find(self, work: Callable[[], Any]) -> Any:
        return work()

    def open(self, checkpoint: Callable[[], Checkpoint]) -> Checkpoint:
        return checkpoint()

    def match(self, checkpoint: Checkpoint, live: Callable[[], Live], wishes: Wishes, all_roles: bool) -> Match:
        return match(checkpoint, live(), wishes, all_roles)

    def source(self, checkpoint: Checkpoint, reads: Callable[[], Reads]) -> AbstractContextManager[Source]:
        return nullcontext(Direct(checkpoint, reads()))

    def all_done(self, phase: str, work: Callable[[], T]) -> T:
        return work()


class Together:
    """One load under way, on one rank of a team.

    Args:
        name: what is loaded, equal on all ranks. seconds: until it must be done.
    """

    def __init__(self, team: Team, name: str, seconds: float) -> None:
        self.team = team
        self.call = team.call(name, seconds, PHASES)
        self._node: tuple[int, ...] = (team.rank,)
        """The ranks of this one's node."""
        self._nodes: dict[str, list[int]] = {}
        """The ranks of each node, on the leader."""
        self._is_one_node = True

    def find(self, work: Callable[[], Any]) -> Any:
        """What the leader finds, on all ranks."""
        return self.call.answer(FIND, work) if self.team.leads else self.call.hear(FIND)

    def open(self, checkpoint: Callable[[], Checkpoint]) -> Checkpoint:
        """Open the step on every rank; all must see the same.

        Raises:
            Unavailable: one sees another directory. What opening raised on any rank.
        """
        opened: list[Checkpoint] = []

        def work() -> list[Any]:
            opened.append(checkpoint())
            return [[opened[0].step, opened[0].attempt, opened[0].content_digest], self.team.node]

        def conclude(said: list[list[Any]]) -> int:
            for rank, (one, node) in zip(self.team.ranks, said, strict=True):
                self._nodes.setdefault(node, []).append(rank)
                if one != said[0][0]:
                    raise Unavailable(
                        f"rank {rank} sees another step {one[0]} of {opened[0].store.url} than rank {self.team.ranks[0]}: "
                        "all ranks must reach the same storage"
                    )
            for node, ranks in self._nodes.items():
                self.call.tell(OPEN, node, ranks)
            return len(self._nodes)

        try:
            self._is_one_node = self.call.round(OPEN, work, conclude) == 1
            self._node = tuple(self.call.told(OPEN, self.team.node))
        except BaseException:
            for one in opened:
                one.close()
            raise
        return opened[0]

    def match(self, checkpoint: Checkpoint, live: Callable[[], Live], wishes: Wishes, all_roles: bool) -> Match:
        """Match on every rank. Nothing was touched if this raises, anywhere.

        Raises:
            Mismatch: on all ranks, whichever of them it is on.
        """
        found: list[Match] = []

        def work() -> list[bytes]:
            found.append(match(checkpoint, live(), wishes, all_roles))
            numbers = [found[0].numbers[name] for name in found[0].untaken]
            size = len(checkpoint.index) + len(checkpoint.commit.values)
            return [_bits(numbers, size), _bits(list(found[0].elsewhere), size)]

        def conclude(said: list[list[bytes]]) -> list[int]:
            untaken = [np.frombuffer(one[0], np.uint8) for one in said]
            elsewhere = [np.frombuffer(one[1], np.uint8) for one in said]
            nowhere = np.bitwise_and.reduce([u | e for u, e in zip(untaken, elsewhere, strict=True)])
            left = np.unpackbits(nowhere & np.bitwise_or.reduce(untaken))
            names = [_name(checkpoint, int(number)) for number in np.flatnonzero(left)]
            why = "unexpected: it is stored, but nothing live has that name on any rank"
            refuse({name: found[0].untaken.get(name, why) for name in names}, wishes, Ledger(), checkpoint)
            return [int(number) for number in np.flatnonzero(left)]

        for number in self.call.round(MATCH, work, conclude):
            name = _name(checkpoint, number)
            found[0].ledger.unexpected.append(name)
            found[0].ledger.waived[name] = found[0].untaken.get(name, "unexpected")
        return found[0]

    @contextmanager
    def source(self, checkpoint: Checkpoint, reads: Callable[[], Reads]) -> Iterator[Source]:
        """Where this rank's reads come from: the store, and what the other ranks of its node read for it.

        Raises:
            What any rank failed with; nothing was touched.
        """
        wanted: list[Reads] = []

        def work() -> Node | None:
            inner = self.call.among(self._node, SHARE, MEETING)
            try:
                wanted.append(reads())
                node = gather(checkpoint.index.all_chunks(), wanted[0], inner)
            except BaseException as error:
                inner.fail(error)  # the others of the node wait for this one
                raise
            if node is not None:
                stack.callback(node.close)
            return node

        with ExitStack() as stack:
            node = self.all_done(SHARE, work)
            twins = Twins()
            if not self._is_one_node:
                twins = find_twins(self.call, checkpoint.index.all_chunks(), node, self.team.node, self._nodes)
                stack.callback(twins.close)
            if node is None:
                yield Direct(checkpoint, wanted[0])
                return
            source = source_of(checkpoint, wanted[0], node, twins.lines, twins.number)
            if isinstance(source, Direct):
                stack.close()
            try:
                yield source
            except BaseException as error:
                node.links.fail(error)
                raise

    def all_done(self, phase: str, work: Callable[[], T]) -> T:
        """Do this rank's work; return what it gave once all ranks have done theirs, or raise what any of them raised."""
        done: list[T] = []
        self.call.round(phase, lambda: done.append(work()), lambda said: None)
        return done[0]


def _bits(numbers: list[int], size: int) -> bytes:
    flags = np.zeros(size, bool)
    flags[[n for n in numbers if n >= 0]] = True
    return np.packbits(flags).tobytes()


def _name(checkpoint: Checkpoint, number: int) -> str:
    tensors = len(checkpoint.index)
    if number < tensors:
        return str(checkpoint.index.names[number])
    return dotted(path_of(checkpoint.commit.values[number - tensors][0]))
