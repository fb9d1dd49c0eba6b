"""What becomes of captures: a queue of versions, a thread that writes them in order, and memory that is given back.

One engine serves the ranks of one node, in the agent's process or in a thread of the trainer. A version is written as soon as
all ranks have begun it, close behind their copies; it exists when the writer has committed it, and stays in memory until its
slot is needed. What one rank cannot capture is given up for all; nothing that happens here waits for a trainer, and no trainer
waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import HoldfastError, LeftOut, Superseded
from ..run.census import Common as Shared
from ..run.census import Structure, compare
from ..run.contents import Contents
from ..run.history import Step
from ..run.team import error_of
from ..store.base import Store
from .arena import Arena
from .contents import Taken, contents_of, differing_census
from .gate import ALL, Gate, said_of
from .marks import Marks
from .messages import Begin, Captured, Common, Displace, Dropped, Free, Memory, Message, Outcome, Progress, Structured, Table
from .proofs import check_replicas
from .versions import DURABLE, FAILED, FILLING, OVER, QUEUED, WRITING, Rank, Version, first_reserved
from .writer import Writer

log = logging.getLogger("holdfast")
_REMEMBERED = 64
_ERRORS = 16
_UNRECORDED = 1000
"""Times that are kept for a store that does not answer; older ones are forgotten."""
_TABLES = 8

Tell = Callable[[int, Message, Sequence[int]], None]


class Engine:
    """Args:
    ranks: global ranks, all of which take part in each version. tell: sends a message to a rank; must not block for long.
    writer: commits.
    store: of the run, as the writer has it; if it is `Marks`, it tells what the time was spent on.
    arenas: by rank, of an engine before. united: what the writer is given of what all ranks have captured.
    node: its name, where there are several.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        writer: Writer,
        tell: Tell,
        store: Store,
        attempt: int,
        arenas: Mapping[int, Arena] | None = None,
        united: Callable[[Sequence[Taken]], Contents] = contents_of,
        node: str = "",
    ) -> None:
        self.node = node
        self.ranks, self.writer, self._united = tuple(ranks), writer, united
        self._tell_rank = tell
        self._store, self._attempt = store, attempt
        self._members = {rank: Rank(arena=(arenas or {}).get(rank)) for rank in ranks}
        self._versions: dict[int, Version] = {}
        self._queue: list[Version] = []
        self._newest: Version | None = None
        """The last one that is durable: its memory is kept for as long as another slot is free."""
        self._changed = threading.Condition(threading.RLock())
        self._is_closing = False
        self._is_superseded = False
        self.counts = {DURABLE: 0, FAILED: 0, "skipped": 0}
        self._reserving: set[int] = set()
        """Ranks for whose memory a thread is making the pages."""
        self.written_bytes = 0
        self.phase_seconds: dict[str, float] = {}
        self.errors: deque[tuple[float, str]] = deque(maxlen=_ERRORS)
        """(unix seconds, text) of the last failures."""
        self.last_committed: tuple[int, float] | None = None
        """(step, unix seconds)."""
        self._unrecorded: deque[Version] = deque(maxlen=_UNRECORDED)
        self._refused: deque[Version] = deque()
        """What whoever writes with this engine is still to be told of: that it will not come from here."""
        self._has_left = False
        """Whether they know that nothing comes from here while a rank is gone."""
        self._has_come_back = False
        """Whether that is not so any more, and they do not know it yet."""
        self._thread = threading.Thread(target=self._write_all, name="holdfast-engine", daemon=True)
        self._thread.start()

    def receive(self, rank: int, message: Message) -> None:
        """Take a message of a rank."""
        handlers: dict[type, Callable[[int, Any], None]] = {
            Structured: self._structured, Begin: self._begin, Progress: self._progress, Captured: self._captured,
            Dropped: self._dropped,
            Displace: self._displace,
        }  # fmt: skip
        if isinstance(message, Table):  # takes long
            self._table(rank, message)
            return
        with self._changed:
            handlers[type(message)](rank, message)

    def leave(self, rank: int) -> None:
        """A rank is gone: what it has not captured will not come; what it has stays."""
        with self._changed:
            self._members[rank].is_there = False
            self._members[rank].structure = None
            for version in self._versions.values():
                if version.level not in OVER and rank not in version.captured:
                    text = f"rank {rank} is gone, and had not captured step {version.step} when it went"
                    self._give_up(version, ["Unavailable", text])
            self._changed.notify_all()

    def join(self, rank: int) -> None:
        """A rank is back, the same process: it knows nothing of its memory any more, and is given another."""
        with self._changed:
            member = self._members[rank]
            if member.is_there:
                return
            member.is_there = True
            if self._gone is None and self._has_left:
                self._has_left, self._has_come_back = False, True
                self._changed.notify_all()
            old, member.arena, member.tables = member.arena, None, {}
            self._forget_newest()
        if old is not None:
            old.close()

    def flush(self, seconds: float) -> bool:
        """Wait until all that is captured is durable or has failed; what cannot be any more is given up.

        Returns whether that was done in time.
        """
        until = time.monotonic() + seconds
        with self._changed:
            self._give_up_what_will_not_be_begun()
            while any(v.level not in OVER for v in self._versions.values()):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 1.0))
        return True

    def close(self, seconds: float = 0.0) -> bool:
        """Flush, end the thread, and let go of the memory. Returns whether all was flushed."""
        is_done = self.flush(seconds)
        with self._changed:
            self._is_closing = True
            for version in self._versions.values():
                if version.level not in OVER:
                    self._give_up(version, ["Unavailable", "saving has ended"])
            self._changed.notify_all()
        if is_done:
            self._thread.join()
            self.writer.close()
            for member in self._members.values():
                if member.arena is not None:
                    member.arena.close()
        return is_done

    def release(self) -> dict[int, Arena]:
        """End, after a flush, and hand over the memory."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            return {rank: m.arena for rank, m in self._members.items() if m.arena is not None}

    @property
    def versions(self) -> list[Version]:
        """What is under way, and what was last, oldest first."""
        with self._changed:
            return list(self._versions.values())

    @property
    def arena_bytes(self) -> int:
        return sum(m.arena.nbytes for m in self._members.values() if m.arena is not None)

    @property
    def touched_bytes(self) -> int:
        """How much of the arenas counts as resident in this process."""
        return sum(m.arena.resident_bytes() for m in self._members.values() if m.arena is not None)

    def held(self) -> tuple[Version, dict[int, Arena]] | None:
        """The newest durable version whose bytes are still in memory, and the arenas they lie in."""
        with self._changed:
            if self._newest is None:
                return None
            arenas = {rank: m.arena for rank, m in self._members.items() if m.arena is not None}
            return (self._newest, arenas) if arenas.keys() == self._newest.slots.keys() == set(self.ranks) else None

    def _structured(self, rank: int, message: Structured) -> None:
        self._members[rank].structure = message
        known = {r: m.structure for r, m in self._members.items()}
        if any(structure is None for structure in known.values()):
            return
        groups: dict[str, list[int]] = {}
        for number, structure in known.items():
            assert structure is not None
            groups.setdefault(structure.digest, []).append(number)
        try:
            tables = [Structure.decode(known[ranks[0]].data) for ranks in groups.values()]  # type: ignore[union-attr]
            common: Shared = compare(tables, list(groups.values()))
            answer = Common(common.digest(), common.encode())
        except HoldfastError as error:
            answer = Common("", b"", said_of(error))
        self._tell_all(answer)

    def _table(self, rank: int, message: Table) -> None:
        """Make the rank's arena, unless the one that it has will do."""
        member = self._members[rank]
        with self._changed:
            old, fits = member.arena, False
            if old is not None:
                fits = old.slots >= message.slots and old.slot_bytes >= message.nbytes
            if not fits:  # versions that are still to be written have their views of it
                member.arena = None
                self._forget_newest()
        if not fits and old is not None:
            old.close()
        try:
            arena = old if fits and old is not None else first_reserved(message)
        except (HoldfastError, OSError) as error:
            self._tell(rank, Memory(message.number, 0, 0, error=said_of(error)))
            return
        with self._changed:
            member.arena = arena
            member.tables[message.number] = message, arena
            for number in list(member.tables)[:-_TABLES]:
                del member.tables[number]
        with self._changed:
            held = {v.at[rank] for v in self._versions.values() if v.arenas.get(rank) is arena and rank not in v.freed}
            free = sorted(arena.reserved - held)
            self._tell(rank, Memory(message.number, arena.slots, arena.slot_bytes, free), [arena.fd])
        if len(arena.reserved) < arena.slots and rank not in self._reserving:  # the first save may begin without them
            self._reserving.add(rank)
            threading.Thread(target=self._reserve_others, args=(rank, arena), name="holdfast-arena", daemon=True).start()

    def _reserve_others(self, rank: int, arena: Arena) -> None:
        """Make the memory of the slots after the first one, and let the rank have them one by one."""
        try:
            for slot in sorted(set(range(arena.slots)) - arena.reserved):
                arena.reserve(slot)
                with self._changed:
                    if self._members[rank].arena is not arena or self._is_closing:
                        return
                    self._tell(rank, Free(slot))
        except (HoldfastError, OSError) as error:
            log.warning("fewer versions are held in memory: %s", error)
        finally:
            self._reserving.discard(rank)

    def _begin(self, rank: int, message: Begin) -> None:
        member, version = self._members[rank], self._versions.get(message.step)
        table, arena = member.tables.get(message.table, (None, None))
        is_current = arena is not None and arena is member.arena
        member.last_step = max(member.last_step, message.step)
        if version is not None and (
            version.turn > message.turn or (version.level in OVER and version.turn == message.turn)
        ):  # others have ended it before this rank knew of it, or even begun it again
            again = ["Unavailable", f"step {message.step} was begun again since"]
            error = version.error if version.turn == message.turn else again
            outcome = Outcome(version.step, 0, error, version.is_skip, self._is_superseded, turn=message.turn)
            self._tell(rank, outcome)
            if is_current:
                self._tell(rank, Free(message.slot))
            return
        if version is None or version.turn < message.turn:
            if version is not None:
                self._give_up(version, ["Unavailable", f"rank {rank} has begun step {message.step} again"])
            version = self._versions[message.step] = Version(message.step, message.turn)
            version.times.began = message.began
        version.begun[rank], version.at[rank] = message, message.slot
        version.gates.setdefault(rank, Gate())
        if table is None or arena is None or not is_current:
            self._give_up(version, ["Unavailable", f"rank {rank} began step {message.step} in memory that it has no more"])
            return
        version.tables[rank], version.arenas[rank], version.slots[rank] = table, arena, arena.slot(message.slot)
        if self._newest is not None and rank in self._newest.freed and self._newest.at[rank] == message.slot:
            self._forget_newest()
        if version.level == FILLING and version.begun.keys() == set(self.ranks):
            self._enqueue(version)
        self._give_up_what_will_not_be_begun()

    def _give_up_what_will_not_be_begun(self) -> None:
        """A rank is gone; or one that was late begins with this engine what the others began with one that is gone."""
        for version in [v for v in self._versions.values() if v.level == FILLING]:
            for rank, member in self._members.items():
                if rank in version.begun:
                    continue
                if not member.is_there:
                    self._give_up(version, ["Unavailable", f"rank {rank} is gone, and never began step {version.step}"])
                elif member.last_step > version.step:
                    text = f"rank {rank} went on to step {member.last_step}, and never began step {version.step}"
                    self._give_up(version, ["Unavailable", text])

    def _enqueue(self, version: Version) -> None:
        if differing_census(version.begun):
            self._give_up(version, ["Torn", "the structure of the state changed on some ranks at this step"], is_skip=True)
            return
        version.level = QUEUED
        self._queue.append(version)
        self._changed.notify_all()

    def _progress(self, rank: int, message: Progress) -> None:
        if (version := self._begun(rank, message.step, message.turn)) is not None:
            version.gates[rank].come(message.at)

    def _captured(self, rank: int, message: Captured) -> None:
        if (version := self._begun(rank, message.step, message.turn)) is not None:
            version.captured[rank] = message
            version.times.by_rank[rank] = message.phases
            version.gates[rank].come(ALL)
            self._changed.notify_all()

    def _begun(self, rank: int, step: int, turn: int) -> Version | None:
        """The version that a rank captures; None where it was over when the rank began it, or is another try."""
        version = self._versions.get(step)
        return version if version is not None and rank in version.begun and version.turn == turn else None

    def _dropped(self, rank: int, message: Dropped) -> None:
        version = self._versions.get(message.step)
        if version is None or version.turn < message.turn:
            if version is not None:
                self._give_up(version, message.error, message.is_skip)
            version = self._versions[message.step] = Version(message.step, message.turn)
        if version.turn > message.turn or rank in version.captured:  # its bytes are here, whatever it has heard of them
            return
        self._give_up(version, message.error, message.is_skip, is_known=message.by_all)

    def _displace(self, rank: int, message: Displace) -> None:
        for older in [v for v in self._queue if v.step < message.step]:
            self._give_up(older, ["Unavailable", f"step {message.step} took its place"], is_skip=True)

    def _give_up(self, version: Version, error: list[str], is_skip: bool = False, is_known: bool = False) -> None:
        """End a version that cannot be written any more; one that is being written ends when its writer has noticed.

        Args:
            is_known: those that write with this engine do not wait for it either.
        """
        if version.level in OVER:
            return
        for gate in version.gates.values():
            gate.fail(error)
        version.error, version.is_skip = version.error or error, version.is_skip or is_skip
        if version.level != WRITING:
            if not is_known:
                self._refused.append(version)
            self._end(version)

    def _end(self, version: Version, attempt: int = 0) -> None:
        """The version is over, well or not: say so, and give its slot back."""
        version.level = DURABLE if version.error is None else FAILED
        self.counts["skipped" if version.is_skip else version.level] += 1
        if version in self._queue:
            self._queue.remove(version)
        version.times.ended = time.time()
        self._unrecorded.append(version)
        if version.error is not None and not version.is_skip:
            self.errors.append((version.times.ended, f"step {version.step}: {version.error[1]}"))
        version.begun.clear()
        outcome = Outcome(version.step, attempt, version.error, version.is_skip, self._is_superseded, turn=version.turn)
        self._tell_all(outcome)
        if version.level == DURABLE:
            self._forget_newest()
            self._newest = version
            self._free(version, [rank for rank, arena in version.arenas.items() if arena.slots == 1])
        else:
            version.slots.clear()
            self._free(version, self.ranks)
        for old in list(self._versions)[:-_REMEMBERED]:
            if self._versions[old].level in OVER:
                del self._versions[old]
        self._changed.notify_all()

    def _forget_newest(self) -> None:
        if self._newest is not None:
            self._newest.slots.clear()
            self._free(self._newest, self.ranks)
            self._newest = None

    def _free(self, version: Version, ranks: Sequence[int]) -> None:
        """Let ranks fill a version's slot again, unless their memory is another one by now: there it is not theirs to give."""
        for rank in ranks:
            arena, member = version.arenas.get(rank), self._members[rank]
            if arena is not None and arena is member.arena and member.is_there and rank not in version.freed:
                version.freed.add(rank)
                self._tell(rank, Free(version.at[rank]))

    def _write_all(self) -> None:
        while (version := self._take()) is not None:
            if isinstance(self._store, Marks):
                self._store.restart()
            error: BaseException | None = None
            try:
                version.written = self._write(version)
            except BaseException as raised:
                error = raised
                if not isinstance(error, HoldfastError):
                    log.exception("writing step %d failed", version.step)
            version.times.wrote(self._store)
            with self._changed:
                if error is not None:
                    self._is_superseded = self._is_superseded or isinstance(error, Superseded)
                    version.is_skip = version.is_skip or isinstance(error, LeftOut)
                    version.error = version.error or said_of(error)
                elif version.written is not None:
                    version.error = None  # what came too late to stop it
                    version.times.new_bytes = self.writer.new_bytes
                    self.written_bytes += self.writer.new_bytes
                    self.last_committed = version.step, time.time()
                self._end(version, version.written.attempt if version.written is not None else 0)
            if error is None:
                self._prune()

    def _prune(self) -> None:
        """Remove what is not to be kept. Whatever goes wrong with it, the next version is written."""
        try:
            why = self.writer.prune()
        except Exception as error:
            log.exception("pruning failed")
            why = f"{type(error).__name__}: {error}"
        if why:
            self.errors.append((time.time(), f"pruning failed, nothing was lost: {why}"))

    def _take(self) -> Version | None:
        """The next version to write, when there is one; None at the end."""
        while True:
            self._record()
            self._tell_others()
            with self._changed:
                while not self._queue and not self._is_closing and not self._unrecorded and not self._has_news:
                    self._changed.wait()
                if self._queue:
                    self._has_left = False
                    version = self._queue.pop(0)
                    version.level, version.times.taken = WRITING, time.time()
                    return version
                if self._is_closing and not self._unrecorded:
                    return None

    @property
    def _has_news(self) -> bool:
        return bool(self._refused) or self._is_leaving or self._has_come_back

    @property
    def _is_leaving(self) -> bool:
        """Whether nothing more comes from here, as a rank is gone, and nobody knows it yet."""
        is_empty = not self._queue and not any(version.level == FILLING for version in self._versions.values())
        return self._gone is not None and not self._has_left and is_empty

    @property
    def _gone(self) -> int | None:
        """A rank that is not there any more, so that no version can be begun."""
        return next((rank for rank, member in self._members.items() if not member.is_there), None)

    def _tell_others(self) -> None:
        """Let those that write with this engine know what they need not wait for."""
        with self._changed:
            refused, self._refused = self._refused, deque()
            gone = self._gone if self._is_leaving else None
            self._has_left = self._has_left or gone is not None
            is_back, self._has_come_back = self._has_come_back, False
        if is_back:
            self.writer.stay()
        for version in refused:
            kind, text = version.error or ["Unavailable", "it was given up"]
            self.writer.refuse(version.step, version.turn, LeftOut(text) if version.is_skip else error_of([kind, text]))
        if gone is not None:
            self.writer.leave(f"rank {gone} is gone")

    def _record(self) -> None:
        """Keep the times of what is over."""
        while self._unrecorded:
            version = self._unrecorded.popleft()
            for phases in (version.times.writing, *version.times.by_rank.values()):
                for phase in phases:
                    self.phase_seconds[phase.name] = self.phase_seconds.get(phase.name, 0.0) + phase.seconds
            version.times.keep(
                self._store, version.step, self._attempt, self.node, version.error, version.is_skip, version.written
            )

    def _write(self, version: Version) -> Step:
        """Write one version, behind its copies."""
        taken = [Taken(r, version.tables[r], version.begun[r], version.slots[r], version.gates[r]) for r in self.ranks]
        try:
            contents = self._united(taken)
        except HoldfastError as error:
            self.writer.refuse(version.step, version.turn, error)
            raise
        metrics = {name: value for one in reversed(taken) for name, value in one.begin.metrics.items()}

        def check() -> None:
            for one in taken:
                one.gate.wait(ALL)
            check_replicas(self.ranks, [version.captured[rank].proofs for rank in self.ranks])

        with self._in_time(version):
            return self.writer.write(contents, taken[0].begin, metrics, len(taken), check)

    @contextlib.contextmanager
    def _in_time(self, version: Version) -> Iterator[None]:
        """Give up a version that is not captured when nobody waits for it any more."""
        if self.writer.seconds is None:
            yield
            return
        timer = threading.Timer(self.writer.seconds, self._check_captured, (version, self.writer.seconds))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _check_captured(self, version: Version, seconds: float) -> None:
        with self._changed:
            late = [rank for rank in self.ranks if rank not in version.captured]
            if late:
                text = f"rank {late[0]} has not captured step {version.step} {seconds:.0f} s after its writing began"
                self._give_up(version, ["Deadline", text])

    def _tell_all(self, message: Message) -> None:
        for rank, member in self._members.items():
            if member.is_there:
                self._tell(rank, message)

    def _tell(self, rank: int, message: Message, fds: Sequence[int] = ()) -> None:
        self._tell_rank(rank, message, fds)
