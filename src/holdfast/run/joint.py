"""A save by several ranks: each plans and writes alone, the leader proves and decides, and all have the same outcome.

Three rounds over the team's board, of constant size for each rank while the structure stays: begin, wrote, and the answer.
The decision itself lies in the checkpoint store, create-once: whoever waits too long publishes the abort there, and finds the
commit if that was first. So a rank that gives up, a leader that dies and a board that is gone all end in one outcome.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..errors import BoardGone, Deadline, HoldfastError, Replaced, StepExists, Unavailable
from ..format.columns import Columns
from ..format.digest import hex_digest
from ..format.index import Index
from ..format.names import step_dir
from ..format.records import Commit, PartRef, StepRef
from ..store.base import Store
from .base import Base
from .coder import Coder
from .contents import Contents
from .decide import abort, gather_parts
from .files import ItemKey
from .history import History, Step, read_record
from .marks import intent, is_buried
from .parts import Part, read_part
from .proof import differing, digest_by_holders, explain, source_digest
from .session import Session
from .shares import ByRanks, Described, Plan, Sharing, Undeclared, undeclared_of, written_by
from .team import Call, Team
from .unite import writer_of
from .write import Decision, OwnPart, removed, settle, write_part

BEGIN, KNOW, WROTE, EXPLAIN = PHASES = ("begin", "know", "wrote", "explain")
_LOOK_SECONDS = 1.0
_VISIBLE_SECONDS = 5.0
_MAX_BASE_INDEX_BYTES = 64 << 20
_LATE_WORD_SECONDS = 3.0
"""How long the leader's word is waited for after its decision was seen: it may have failed to make it durable."""
_TRIES = 1000


class Order(msgspec.Struct, frozen=True):
    """What the leader answers to `begin`: everything that the ranks must agree on."""

    record: Commit
    folder: str
    mark: str
    """Path of the leader's intent: who does not find it sees another directory."""
    base: StepRef | None
    recycle: bool
    asked: tuple[int, ...]
    """Ranks that must publish their structure; empty if the census still holds."""
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass
class Joint:
    """One run open for writing by a team. Every member has one; the leader's has the session.

    Attributes:
        sharing: how members find out who writes what. world: how many ranks the state is of, where members are not ranks.
    """

    team: Team
    store: Store
    session: Session | None = None
    sharing: Sharing = field(default_factory=ByRanks)
    world: int = 0
    _common: bytes = b""
    """What the structures of all have in common; empty where it is not known any more."""
    _said: list[str] = field(default_factory=list)
    """Structure digests by position, of the census: the leader's."""
    new_bytes: int = 0
    """Of the data files that this member wrote in the last save."""
    _own: tuple[StepRef, OwnPart] | None = None
    """The last step, and what this rank wrote of it."""
    _probes: dict[ItemKey, bytes] = field(default_factory=dict)
    """Of what this rank has in that step; see `base.probe`."""
    _plan: Plan | None = None
    _expires: float = 0.0
    """Of the leader's intent."""
    _coding: tuple[Coder | None, bool] = (None, False)
    """Of this save: what chooses codecs, and whether the step is kept for ever."""

    def save(
        self,
        make: Callable[[], tuple[Contents, str]],
        open_session: Callable[[], Session],
        step: int,
        seconds: float,
        *,
        metrics: dict[str, Any] | None = None,
        best: list[str] | None = None,
        recycle: bool = True,
        refer: bool = True,
        coding: Coder | None = None,
        check: Callable[[], None] = lambda: None,
        turn: int = 1,
    ) -> Step:
        """Save one step together; every rank of the team calls this. Durable and committed on return, on all ranks.

        Args:
            make: the contents that this rank holds, and their kind. open_session: the leader's session; asked at each save.
            seconds: until the outcome must be known. coding: what chooses this rank's codecs; without it all is raw.
            check: called when this rank has written its share; what it raises ends the save.
            turn: how many times this step is saved, the same on all ranks.
        Raises:
            The same error on all ranks, whichever of them it happened on.  Deadline: naming rank, phase and seconds.
        """
        call = self._call(step, turn, seconds, PHASES)
        made: list[Contents] = []
        structure: list[Described] = []

        def begin() -> dict[str, Any]:
            contents, kind = make()
            made.append(contents)
            structure.append(self.sharing.describe(contents))
            return {"structure": structure[0].digest(), "census": self._known, "kind": kind, "metrics": metrics or {}}

        with contextlib.ExitStack() as stack:

            def conclude(said: list[dict[str, Any]]) -> Any:
                self.session = open_session()
                kind = "full" if all(s["kind"] == "full" for s in said) else "partial"
                every = {name: value for one in reversed(said) for name, value in one["metrics"].items()}
                record, parents = self.session.record(
                    step, metrics=every, best=best, refer=refer, kind=kind, world=self.world or len(self.team.ranks)
                )
                mark = stack.enter_context(intent(self.store, step, record.attempt, parents))
                self._expires = mark.record.expires
                return msgspec.to_builtins(self._order(record, mark.path, refer, recycle, said))

            order = msgspec.convert(call.round(BEGIN, begin, conclude), Order)
            self._know(call, order, structure[0])
            self._coding = coding, not refer
            committed = self._write(call, order, made[0], structure[0], check)
        if self.session is not None:
            self.session.done(committed)
        return committed

    def refuse(self, step: int, turn: int, error: HoldfastError) -> None:
        """Let the others know that this member does not take part in a save, so that they do not wait for it. Never raises."""
        with contextlib.suppress(Exception):  # the board is gone: they have a deadline
            self._call(step, turn, 0.0, (BEGIN,), enters=False).fail(error)

    def _call(self, step: int, turn: int, seconds: float, phases: Sequence[str], enters: bool = True) -> Call:
        again = f", try {turn}" if turn > 1 else ""
        return self.team.call(f"save of step {step} to {self._run_name}{again}", seconds, phases, step, enters)

    @property
    def _known(self) -> str:
        """Digest of what is known of the structures of all."""
        return hex_digest(self._common) if self._common else ""

    @property
    def _run_name(self) -> str:
        """What the ranks call the run: they may have mounted it at different places."""
        return self.store.url.rstrip("/").rpartition("/")[2]

    def _order(self, record: Commit, mark: str, refer: bool, recycle: bool, said: list[dict[str, Any]]) -> Order:
        """The leader's plan for this save."""
        folder = self._free_folder(record)
        base = record.parent if refer and record.parent and self._may_refer(record.parent) else None
        digests = [one["structure"] for one in said]
        if self._known and digests == self._said and all(one["census"] == self._known for one in said):
            return Order(record, folder, mark, base, recycle, ())
        groups: dict[str, list[int]] = {}
        for rank, digest in zip(self.team.ranks, digests, strict=True):
            groups.setdefault(digest, []).append(rank)
        self._said = digests
        listed = tuple(map(tuple, groups.values()))
        return Order(record, folder, mark, base, recycle, tuple(ranks[0] for ranks in listed), listed)

    def _free_folder(self, record: Commit) -> str:
        """Where the step is written: beside what an aborted save of it has left; a part of a state leaves room for the whole."""
        first = secrets.randbelow(10**8) + 1 if record.kind == "partial" else 0
        numbers = range(first, first + _TRIES)
        return next(path for n in numbers if not self.store.list(path := step_dir(record.step, record.attempt, n)))

    def _may_refer(self, ref: StepRef) -> bool:
        try:
            return History(self.store).committed(ref) is not None and not is_buried(self.store, ref)
        except HoldfastError:  # whatever ails the old step, the new one is written whole
            return False

    def _know(self, call: Call, order: Order, structure: Described) -> None:
        """Compare the structures where that of any member has changed."""
        if not order.asked:
            return
        self._common, self._plan = b"", None  # until this round is over
        rank = self.team.rank

        def conclude(said: list[bytes]) -> bytes:
            return self.sharing.compare([data for data in said if data], order.groups)

        self._common = call.round(KNOW, lambda: structure.encode() if rank in order.asked else b"", conclude)

    def _write(self, call: Call, order: Order, contents: Contents, described: Described, check: Callable[[], None]) -> Step:
        """Write this rank's share, and learn or take the decision."""
        proofs: dict[str, tuple[tuple[int, ...], str]] = {}
        own: list[OwnPart] = []
        sees: list[bool] = []
        """Not empty if this rank sees the leader's directory, and so may decide something there."""

        def write() -> dict[str, Any]:
            self._see_the_same_directory(call, order)
            sees.append(True)
            plan = self._plan = self._plan or self.sharing.plan(contents, described, self._common, self.team.rank)
            proofs.update(_proofs(undeclared_of(plan, contents)))
            own.append(self._write_own(order, written_by(plan, contents)))
            check()
            return {"proofs": digest_by_holders(proofs), "part": own[0].ref.digest}

        try:
            said = self._say_wrote(call, order, write, sees)
            step = self._decide(call, order, said, own[0], proofs) if self.team.leads else self._learn(call, order, proofs)
        except BaseException:
            self._clean(order, own)
            raise
        self.new_bytes = sum(file.bytes for file in own[0].part.files)
        if step.kind == "full":
            self._own, self._probes = (step.ref, own[0]), (self._probes if order.base else {}) | own[0].probes
        with contextlib.suppress(HoldfastError):
            self.store.delete(own[0].ref.path)  # the whole index stands for it now
        return step

    def _clean(self, order: Order, own: list[OwnPart]) -> None:
        """Remove what this rank wrote of a step that was aborted."""
        with contextlib.suppress(Exception):
            decided = self._decided(order)
            if own and decided is not None and decided.decision == "aborted":
                for path in (*(file.path for file in own[0].part.files), own[0].ref.path):
                    self.store.delete(path)

    def _say_wrote(self, call: Call, order: Order, write: Callable[[], dict[str, Any]], sees: list[bool]) -> dict[str, Any]:
        try:
            said: dict[str, Any] = call.say(WROTE, write)
            return said
        except FileNotFoundError as error:
            raise removed(order.folder) from error
        except BaseException as error:
            with contextlib.suppress(Exception):  # the leader learns it from the board; this is for when that is gone
                if sees:
                    abort(self.store, order.folder, order.record, f"{self._name_of(self.team.rank)}: {error}")
            raise

    def _see_the_same_directory(self, call: Call, order: Order) -> None:
        """Raises:
        Unavailable: what the leader has put into the store is not there.  What the leader raised meanwhile.
        """
        until = time.monotonic() + min(_VISIBLE_SECONDS, call.left / 2)
        while True:
            try:
                self.store.size(order.mark)
                return
            except FileNotFoundError:
                if call.is_answered(WROTE, 0.0):  # it has failed, and taken its mark away
                    call.hear(WROTE)
                if time.monotonic() >= until:
                    raise Unavailable(
                        f"{self._name_of(self.team.rank)} sees another directory at {self.store.url} than "
                        f"{self._name_of(self.team.ranks[0])}: {order.mark} is not there. All ranks must reach the same storage"
                    ) from None
                time.sleep(0.05)

    def _write_own(self, order: Order, contents: Contents) -> OwnPart:
        return write_part(
            self.store,
            order.folder,
            contents,
            order.record,
            writer_of(self.team.rank),
            self._base(order.base),
            recycle=order.recycle,
            coding=self._coding[0],
            is_for_ever=self._coding[1],
        )

    def _base(self, ref: StepRef | None) -> Base | None:
        """What this rank may refer to: its own part of the last step, or the whole index of that if it is small."""
        if ref is None:
            return None
        if self._own is not None and self._own[0] == ref:
            return Base(Index(self._own[1].columns, "own"), self._probes)
        with contextlib.suppress(HoldfastError, FileNotFoundError):  # whatever ails the old step, the new one is written whole
            step = History(self.store).committed(ref)
            if step is not None and len(step.commit.parts) == 1 and step.commit.parts[0].bytes <= _MAX_BASE_INDEX_BYTES:
                part = step.commit.parts[0]
                return Base(Index(read_part(self.store, part.path, part.digest)[0], step.path))
        return None

    def _decide(self, call: Call, order: Order, mine: dict[str, Any], own: OwnPart, proofs: dict[str, Any]) -> Step:
        """The leader's part: all written, replicas equal, everything covered; then the decision, and the answer."""
        decision, found = Decision(), []

        def conclude() -> dict[str, Any]:
            try:
                said = call.hear_all(WROTE, mine)
                if asked := differing(self.team.ranks, [s["proofs"] for s in said]):
                    return {"explain": sorted(asked)}
                found.append(self._settle(call, order, own, [s["part"] for s in said], decision))
                return {}
            except BaseException as error:
                if not decision.is_taken:
                    with contextlib.suppress(Exception):
                        abort(self.store, order.folder, order.record, str(error))
                raise

        try:
            answer = call.answer(WROTE, conclude)
        except HoldfastError:  # also where only the answer could not be given
            if not found:
                raise
            return found[0]  # the decision is taken: the others read it in the store
        if "explain" in answer:
            self._explain(call, order, answer["explain"], proofs)
        return found[0]

    def _settle(self, call: Call, order: Order, own: OwnPart, digests: Sequence[str], decision: Decision) -> Step:
        assert self.session is not None
        session = self.session
        writers = [writer_of(rank) for rank in self.team.ranks]
        parts: list[tuple[Columns, Part, PartRef]] = [(own.columns, own.part, own.ref)]
        parts += gather_parts(self.store, order.folder, writers[1:], time.monotonic() + call.left, digests[1:])
        step = settle(
            self.store,
            order.folder,
            order.record,
            parts,
            own.layout,
            lambda record, needed: session.may_commit(record, needed, self._expires),
            decision,
            self._name_of,
        )
        if step is None:
            raise Unavailable(
                f"files that step {order.record.step} refers to were pruned meanwhile; the next save writes them anew"
            )
        return step

    def _learn(self, call: Call, order: Order, proofs: dict[str, Any]) -> Step:
        """Another rank's part: wait for the answer, or for the decision in the store, whichever is first to be seen."""
        until = None
        while (answer := self._heard(call, order)) is None:
            decided = self._seen(call, order)
            if decided is None and (call.left <= 0 or self._is_deserted(call)):
                self._give_up(call, order)
            elif decided is not None:
                until = until or time.monotonic() + min(_LATE_WORD_SECONDS, call.left)
                if time.monotonic() < until:
                    continue
                if decided.decision != "committed":
                    raise StepExists(f"the save of step {decided.step} was aborted: {decided.reason}", decided)
                break
        else:
            if "explain" in answer:
                self._explain(call, order, answer["explain"], proofs)
        return Step(order.record.step, order.record.attempt, order.folder, order.record)

    def _seen(self, call: Call, order: Order) -> Commit | None:
        """The decision, if it is there and this rank can reach the store; the leader may be able to, and answer."""
        try:
            return self._decided(order)
        except Unavailable:
            if call.left <= 0:
                raise
            return None

    def _is_deserted(self, call: Call) -> bool:
        """Whether the leader has gone on without a word about this save: it died, and another process stands in its place."""
        try:
            return call.is_left_by(self.team.ranks[0], WROTE)
        except BoardGone:
            return False

    def _heard(self, call: Call, order: Order) -> Any:
        """The leader's answer, if it is there; waits for it a little.

        Raises:
            The error that the leader answered.
        """
        pause = min(_LOOK_SECONDS, call.left)
        try:
            return call.hear(WROTE) if call.is_answered(WROTE, pause) else None
        except BoardGone:  # the store still decides
            time.sleep(pause)
            return None
        except Replaced as error:  # whoever answered in the place of a leader that died does not know what that one did
            with contextlib.suppress(HoldfastError):
                abort(self.store, order.folder, order.record, str(error))  # does nothing where something was decided: a read
                decided = self._decided(order)  # may not show yet what that one has just written
                if decided is not None and decided.decision == "committed":
                    return {}
            raise

    def _give_up(self, call: Call, order: Order) -> None:
        """Publish the abort; return if the commit was first.

        Raises:
            Deadline: the abort stands.
        """
        after = time.monotonic() - call.start
        names = self._name_of(self.team.rank), self._name_of(self.team.ranks[0])
        waited = f"{names[0]} waited {after:.1f} s for the decision of {names[1]}"
        abort(self.store, order.folder, order.record, waited)
        decided = self._decided(order)
        if decided is None or decided.decision != "committed":
            raise call.failed(Deadline(f"{call.name} was aborted: {decided.reason if decided else waited}"))

    def _explain(self, call: Call, order: Order, asked: list[int], proofs: dict[str, Any]) -> None:
        """Name the tensors whose replicas differ. Always raises."""

        def work() -> dict[str, str]:
            return {name: digest for name, (_, digest) in proofs.items()} if self.team.rank in asked else {}

        def conclude(said: list[dict[str, str]]) -> None:
            error = explain(self.team.ranks, said)
            abort(self.store, order.folder, order.record, str(error))
            raise error

        call.round(EXPLAIN, work, conclude)

    def _name_of(self, rank: int) -> str:
        return self.team.name_of(rank)

    def _decided(self, order: Order) -> Commit | None:
        return read_record(self.store, f"{order.folder}/commit.json", Commit)


def _proofs(undeclared: Undeclared) -> dict[str, tuple[tuple[int, ...], str]]:
    """Holders and digest of what others hold, too, by name; several boxes of one tensor apart."""
    found = {}
    for item, holders in undeclared:
        assert item.source is not None
        name, offset = item.key
        found[f"{name} at {list(offset)}" if any(offset) else name] = (holders, source_digest(item.source))
    return found
