"""The history of a run as its records tell it: attempts, lineage, and the steps that are committed.

Only commit records make a step; names of directories are never believed. The lineage is the newest attempt's commits, its
parent's up to the parent commit, and so on; all other commits are abandoned.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import Corrupt, HoldfastError, NoCheckpoint, Refused, Unsupported
from ..format.names import parse_step_dir, step_dir
from ..format.records import Attempt, Commit, Note, Pin, R, RunRecord, StepRef, seal, unseal
from ..store.base import Store
from .identity import is_gone, this_process

RUN_FILE = "holdfast.json"
_LOOKS = 10
DECISIONS = {"committed", "aborted"}
KINDS = {"full", "increment", "virtual", "partial", "composite"}
HOLD = "hold-"
"""How the names of holds begin, among the pins."""


@dataclass(frozen=True)
class Step:
    """A committed checkpoint of a run."""

    step: int
    attempt: int
    path: str
    """Its directory, from the run's root."""
    commit: Commit = field(repr=False)
    is_abandoned: bool = False
    pins: tuple[str, ...] = ()
    notes: tuple[Note, ...] = field(default=(), repr=False)

    @property
    def ref(self) -> StepRef:
        return StepRef(self.step, self.attempt)

    @property
    def created(self) -> float:
        """Seconds since 1970, UTC."""
        return self.commit.created

    @property
    def kind(self) -> str:
        return self.commit.kind

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors; aliases once."""
        return self.commit.raw_bytes

    @property
    def metrics(self) -> dict[str, object]:
        """Those given at the save, with those noted later over them."""
        merged = dict(self.commit.metrics)
        for note in self.notes:
            merged.update(note.metrics)
        return merged


@dataclass
class Snapshot:
    """What one look at a run's records found."""

    steps: list[Step]
    """Ascending by step, then attempt."""
    attempts: dict[int, Attempt]
    undecided: list[str]
    """Step directories without a commit record, or with one that says aborted."""
    damaged: dict[str, HoldfastError]
    """What cannot be read, by path: step directories whose commit record is damaged, pins, notes."""
    hidden: list[str]
    """Committed directories of steps that another directory stands for: what it replaces, or will, is not gone yet."""

    @property
    def lineage(self) -> list[Step]:
        return [s for s in self.steps if not s.is_abandoned]


class History:
    """Reads a run's records; remembers the contents of attempts and commits, since they never change."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._commits: dict[str, Commit] = {}
        self._attempts: dict[int, Attempt] = {}
        self._run = ""

    def run_record(self) -> RunRecord | None:
        """The record of the run, or None where there is none."""
        return read_record(self.store, RUN_FILE, RunRecord)

    def attempts(self) -> dict[int, Attempt]:
        """Every attempt by number.

        Raises:
            Corrupt: a record is damaged, is not of this run, or that of the run is gone.
        """
        run = self._run_id()
        for number in self.attempt_numbers():
            if number not in self._attempts:
                record = read_record(self.store, f"attempts/{number:04d}.json", Attempt)
                if record is not None:
                    if (record.attempt, record.run) != (number, run):
                        raise Corrupt(
                            f"attempts/{number:04d}.json is attempt {record.attempt} of run {record.run}; this is run {run}"
                        )
                    self._attempts[number] = record
        return dict(self._attempts)

    def attempt_numbers(self) -> list[int]:
        """The numbers of the attempts there are, ascending."""
        stems = (n.removesuffix(".json") for n in self.store.list("attempts") if n.endswith(".json"))
        return sorted(int(s) for s in stems if s.isascii() and s.isdigit())

    def _run_id(self) -> str:
        """The run's identity; empty where there is no run yet.

        Raises:
            Corrupt: there are attempts or steps, but no record of the run.
        """
        if not self._run:
            record = self.run_record()
            if record is None and (self.attempt_numbers() or self.store.list("steps")):
                raise Corrupt(f"{RUN_FILE} of {self.store.url} is gone; put it back from a copy of the run", file=RUN_FILE)
            self._run = record.run if record else ""
        return self._run

    def _check_attempts(self, names: Sequence[str], attempts: Mapping[int, Attempt]) -> None:
        """Raises:
        Corrupt: a step's attempt has no record, so that nobody knows whether it is on the lineage.
        """
        for name in names:
            parsed = parse_step_dir(name.removesuffix("/"))
            if parsed and parsed[1] not in attempts:
                path = f"attempts/{parsed[1]:04d}.json"
                raise Corrupt(f"{path} of {self.store.url} is gone, but steps/{name} is there: put the record back", file=path)

    def look(self) -> Snapshot:
        """Read what there is now; again, while steps come and go under its eyes."""
        names = self.store.list("steps")
        for _ in range(_LOOKS):
            snapshot = self._look(names)
            before, names = names, self.store.list("steps")
            if names == before:
                break
        return snapshot

    def _look(self, names: Sequence[str]) -> Snapshot:
        attempts = self.attempts()
        self._check_attempts(names, attempts)
        bounds = lineage_bounds(attempts)
        damaged: dict[str, HoldfastError] = {}
        pins, notes = self._pins(damaged), self._notes(damaged)
        found: dict[StepRef, list[tuple[bool, int, str, Commit]]] = {}
        undecided: list[str] = []
        for name in (n.removesuffix("/") for n in names):
            parsed, path = parse_step_dir(name), f"steps/{name}"
            if parsed is None:
                continue
            try:
                commit = self._commit(path, name)
            except (Corrupt, Unsupported) as error:
                damaged[path] = error
                continue
            if commit is None or commit.decision != "committed":
                undecided.append(path)
            else:
                found.setdefault(StepRef(*parsed[:2]), []).append((commit.kind == "partial", parsed[2], path, commit))
        steps, hidden = [], []
        for ref in sorted(found):
            first, *others = sorted(found[ref], key=lambda item: item[:2])
            is_abandoned = ref.step > bounds.get(ref.attempt, -1)
            marks = tuple(pins.get(ref, ())), tuple(notes.get(ref, ()))
            steps.append(Step(ref.step, ref.attempt, first[2], first[3], is_abandoned, *marks))
            hidden += [path for _, _, path, _ in others]
        return Snapshot(steps, attempts, undecided, damaged, hidden)

    def newest(self) -> Step:
        """The newest step of the lineage, without its pins and notes; reads no commit record but its own.

        Raises:
            NoCheckpoint: nothing is committed.  Corrupt: its record is damaged; the message names the next good one.
        """
        names, attempts = self.store.list("steps"), self.attempts()
        self._check_attempts(names, attempts)
        bounds = lineage_bounds(attempts)
        parsed = [(parse_step_dir(n.removesuffix("/")), n.removesuffix("/")) for n in names]
        known = [(key[0], key[1], -key[2], name) for key, name in parsed if key and key[0] <= bounds.get(key[1], -1)]
        for step, attempt, _, name in sorted(known, reverse=True):
            try:
                commit = self._commit(f"steps/{name}", name)
            except (Corrupt, Unsupported):
                return newest(self.look(), self.store.url)
            if commit is not None and commit.decision == "committed" and commit.kind != "partial":
                return Step(step, attempt, f"steps/{name}", commit)
        return newest(self.look(), self.store.url)

    def with_marks(self, step: Step) -> Step:
        """The step with its pins and notes as they are now."""
        damaged: dict[str, HoldfastError] = {}
        pins, notes = self._pins(damaged), self._notes(damaged)
        return replace(step, pins=tuple(pins.get(step.ref, ())), notes=tuple(notes.get(step.ref, ())))

    def by_ref(self, ref: StepRef) -> Step | None:
        """The step of exactly this attempt, wherever it lies, or None."""
        return next((s for s in self.look().steps if s.ref == ref), None)

    def committed(self, ref: StepRef) -> Step | None:
        """The same, if it lies where it was first written; reads no other record."""
        path = step_dir(ref.step, ref.attempt)
        commit = self._commit(path, path.removeprefix("steps/"))
        return Step(ref.step, ref.attempt, path, commit) if commit is not None and commit.decision == "committed" else None

    def _commit(self, path: str, name: str) -> Commit | None:
        try:  # a record never changes, but pruning may take it away and leave the directory
            self.store.size(f"{path}/commit.json")
        except FileNotFoundError:
            self._commits.pop(name, None)
            return None
        if name not in self._commits:
            record = read_record(self.store, f"{path}/commit.json", Commit)
            if record is None:
                return None
            if step_dir(record.step, record.attempt) != f"steps/{name.partition('-r')[0]}":
                raise Corrupt(f"{path}/commit.json says it is step {record.step} of attempt {record.attempt}", file=path)
            if record.run != self._run_id():
                raise Corrupt(
                    f"{path}/commit.json is of run {record.run}; this is run {self._run_id()}", file=f"{path}/commit.json"
                )
            if record.decision not in DECISIONS or record.kind not in KINDS:
                raise Unsupported(
                    f"{path}/commit.json is {record.decision} and {record.kind}, which is not known here: upgrade holdfast"
                )
            self._commits[name] = record
        return self._commits[name]

    def _pins(self, damaged: dict[str, HoldfastError]) -> dict[StepRef, list[str]]:
        found: dict[StepRef, list[str]] = {}
        for pin in live_pins(self.store, damaged):
            if pin.expires is None:
                found.setdefault(StepRef(pin.step, pin.attempt), []).append(pin.name)
        return found

    def _notes(self, damaged: dict[str, HoldfastError]) -> dict[StepRef, list[Note]]:
        notes = []
        for name in self.store.list("notes"):
            try:
                notes.append(read_record(self.store, f"notes/{name}", Note))
            except Corrupt as error:
                damaged[f"notes/{name}"] = error
        found: dict[StepRef, list[Note]] = {}
        for note in sorted((n for n in notes if n is not None), key=lambda n: n.created):
            found.setdefault(StepRef(note.step, note.attempt), []).append(note)
        return found


def live_pins(store: Store, damaged: dict[str, HoldfastError] | None = None) -> list[Pin]:
    """Pins, and holds whose process may still live.

    Args:
        damaged: takes the pins that cannot be read; without it they are raised. A damaged hold is left of a power cut, which
            no holder survives.
    """
    found = []
    for name in store.list("pins"):
        try:
            pin = read_record(store, f"pins/{name}", Pin)
        except Corrupt as error:
            if not name.startswith(HOLD):
                if damaged is None:
                    raise
                damaged[f"pins/{name}"] = error
            continue
        if pin is not None and (pin.expires is None or (pin.expires > time.time() and not is_gone(pin.by))):
            found.append(pin)
    return found


def read_record(store: Store, path: str, kind: type[R]) -> R | None:
    """A record, or None where there is none.

    Raises:
        Corrupt, Unsupported.
    """
    try:
        return unseal(store.read(path), kind, path)
    except FileNotFoundError:
        return None


def lineage_bounds(attempts: dict[int, Attempt]) -> dict[int, float]:
    """For each attempt on the lineage, the greatest step of it that counts."""
    bounds: dict[int, float] = {}
    number: int | None = max(attempts, default=None)
    bound = float("inf")
    while number is not None and number not in bounds:
        bounds[number] = bound
        parent = attempts[number].parent if number in attempts else None
        if parent is None:
            break
        number, bound = parent.attempt, min(bound, parent.step)
    return bounds


def create_run(store: Store, library: str) -> RunRecord:
    """The record of the run, made now if there is none.

    Raises:
        Refused: the directory holds something else.
    """
    existing = read_record(store, RUN_FILE, RunRecord)
    if existing is not None:
        return existing
    if strangers := [n for n in store.list("") if n not in ("attempts/", "steps/")]:
        raise Refused(f"{store.url} is not a run of holdfast and not empty (it holds {strangers[0]}); give an empty directory")
    record = RunRecord(run=uuid.uuid4().hex[:16], created=time.time(), library=library)
    try:
        store.create(RUN_FILE, seal(record))
        return record
    except FileExistsError:
        return create_run(store, library)


def claim_attempt(history: History, run: str, reason: str, parent: StepRef | None, skipped: list[list[int]] | None) -> Attempt:
    """Begin the next attempt, with `parent` as its past; whoever creates the record first has the number."""
    while True:
        number = max(history.attempt_numbers(), default=0) + 1
        record = Attempt(
            run=run,
            attempt=number,
            parent=parent,
            reason=reason,
            skipped_samples=skipped,
            created=time.time(),
            by=this_process(),
        )
        try:
            history.store.create(f"attempts/{number:04d}.json", seal(record))
            return record
        except FileExistsError:
            continue


def find_step(snapshot: Snapshot, step: int, where: str) -> Step:
    """The commit of `step` on the lineage, else the newest abandoned one of that step.

    Raises:
        NoCheckpoint: naming the steps there are.  Corrupt: its commit record is damaged.
    """
    found = [s for s in snapshot.steps if s.step == step]
    if found:
        return min(found, key=lambda s: (s.is_abandoned, -s.attempt))
    for path, error in snapshot.damaged.items():
        if (parse_step_dir(path.removeprefix("steps/")) or (None,))[0] == step:
            raise error
    known = [str(s.step) for s in snapshot.lineage]
    some = ", ".join(known if len(known) <= 12 else [*known[:5], "...", *known[-5:]])
    raise NoCheckpoint(f"{where} has no step {step}; " + (f"it has {some}" if known else "nothing is committed there"))


def newest(snapshot: Snapshot, where: str) -> Step:
    """The newest step of the lineage.

    Raises:
        NoCheckpoint: nothing is committed.  Corrupt: a newer commit record is damaged; the message names the next good one.
    """
    lineage = [s for s in snapshot.lineage if s.kind != "partial"]
    last = lineage[-1] if lineage else None
    bounds = lineage_bounds(snapshot.attempts)
    for path, error in snapshot.damaged.items():
        step, attempt, _ = parse_step_dir(path.removeprefix("steps/")) or (0, 0, 0)
        if step <= bounds.get(attempt, -1) and (last is None or step > last.step):
            advice = f"; step {last.step} is the newest with an intact record: ask for it" if last else ""
            if isinstance(error, Unsupported):
                raise Unsupported(f"{error}{advice}") from error
            raise Corrupt(f"{error}{advice}", file=f"{path}/commit.json") from error
    if last is None and snapshot.lineage:
        only = ", ".join(str(s.step) for s in snapshot.lineage)
        raise NoCheckpoint(f"{where} holds no whole step, only parts of a state (step {only}); ask for one by its number")
    if last is None:
        raise NoCheckpoint(f"nothing is committed in {where}")
    return last
