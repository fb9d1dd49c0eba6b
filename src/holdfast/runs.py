"""A run as its users see it: steps, pins, notes, waiting, holding, rolling back, pruning, copying. Starts without torch."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from .address import best, find
from .errors import Corrupt, Deadline, HoldfastError, NoCheckpoint, Refused, Unavailable
from .format.codec import FOR_EVER
from .format.records import StepRef
from .policy.keep import Candidate, Keep
from .run.history import History, Step, claim_attempt, live_pins
from .run.marks import check_pin_name, held, intent, note, pin, unpin
from .store.locate import open_store
from .version import libraries

if TYPE_CHECKING:
    from .loading.checkpoint import Checkpoint
    from .store.base import Store

_POLL_SECONDS = 0.25
_TRIES = 5


@dataclass
class Pruned:
    """What a pruning did, or would do.

    Attributes:
        kept: step to the reason. removed, weights_only: steps. spared: steps that were to go and why they stay.
        freed_bytes: given back to the filesystem; what waits to be written over is not counted.
    """

    kept: dict[int, str] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    weights_only: list[int] = field(default_factory=list)
    spared: dict[int, str] = field(default_factory=dict)
    freed_bytes: int = 0


class Run:
    """A run: the directory or URL that holds the checkpoints of one training job. Opening it changes nothing.

    Args:
        path: a directory, `memory://NAME`, or a store. It need not exist yet.
    """

    def __init__(self, path: Any) -> None:
        self.store = open_store(path)
        self.path = self.store.url
        self._history = History(self.store)

    @property
    def id(self) -> str:
        """The run's identity, 16 hex digits.

        Raises:
            NoCheckpoint: there is no run at this path.
        """
        record = self._history.run_record()
        if record is None:
            raise NoCheckpoint(f"there is no run at {self.path}")
        return record.run

    def steps(self, abandoned: bool = False) -> list[Step]:
        """Committed steps of the lineage, ascending; with `abandoned` also those that no resume would take."""
        snapshot = self._history.look()
        return snapshot.steps if abandoned else snapshot.lineage

    def latest(self) -> Step | None:
        """The newest step of the lineage, or None.

        Raises:
            Corrupt: the newest commit record is damaged; the message names the next one.
        """
        with contextlib.suppress(NoCheckpoint):
            return self._history.with_marks(find(self._history))
        return None

    def best(self, metric: str | None = None, mode: str | None = None) -> Step | None:
        """The best step of the lineage by a metric: the one given, else the run's own, else the smallest `loss`; or None."""
        with contextlib.suppress(NoCheckpoint):
            return best(self._history.look(), self.path, metric, mode)
        return None

    def find(self, at: str | int) -> Step:
        """The step that `at` means: a number, `latest`, `best`, a pin.

        Raises:
            NoCheckpoint: there is none; the message says what there is.
        """
        return self._history.with_marks(find(self._history, at))

    def wait(self, after: int | None = None, *, timeout: float | None = None) -> Step:
        """The newest committed step beyond `after`, as soon as there is one.

        Args:
            after: a step; None: any. timeout: seconds; None waits for ever.
        Raises:
            Deadline: none came in time.
        """
        start = time.monotonic()
        while True:
            found = self.latest()
            if found is not None and (after is None or found.step > after):
                return found
            if timeout is not None and time.monotonic() - start >= timeout:
                beyond = "" if after is None else f" beyond {after}"
                raise Deadline(f"no step{beyond} was committed in {self.path} within {timeout:g} s")
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def hold(self, step: int | str | Step) -> Iterator[Step]:
        """Keep pruning from removing a step while the block runs; ends by itself if this process dies.

        Raises:
            NoCheckpoint: the step does not exist, or was pruned before it could be held.
        """
        with held(self._history, (step if isinstance(step, Step) else self.find(step)).ref) as found:
            yield found

    def pin(self, step: int | str, name: str) -> None:
        """Keep a step for good, and make it addressable as `@name`. A step that refers to others, or has codecs that only
        holdfast reads, is written again, whole and raw.

        Raises:
            NoCheckpoint: no such step.  Refused: the name is taken, or cannot be one.
        """
        check_pin_name(name)
        with self.hold(step) as found:
            pin(self.store, found.ref, name)
        if found.commit.references or not FOR_EVER.issuperset(found.commit.codecs):
            self._replace(found, found.kind)

    def unpin(self, name: str) -> None:
        """Forget a pin; the step becomes subject to pruning again.

        Raises:
            NoCheckpoint: no such pin.
        """
        unpin(self.store, name)

    def note(self, step: int | str, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a committed step; later ones win over earlier ones and over those of the save.

        Raises:
            NoCheckpoint: no such step.
        """
        note(self.store, self.find(step).ref, plain_metrics(metrics))

    def rollback(self, step: int | str, *, skip_samples: Sequence[tuple[int, int]] | None = None) -> int:
        """Make `step` what resumes: a new attempt begins whose past ends there. Nothing is deleted.

        A job that still writes to this run stops with `Superseded` at its next save.

        Args:
            skip_samples: half-open ranges of global sample positions that the new line leaves out; recorded for the data loader.
        Returns:
            The number of the new attempt.
        Raises:
            NoCheckpoint: no such step.  Refused: only part of the state is left of it.
        """
        from .run.session import forget_session

        with self.hold(step) as found:
            if found.kind == "partial":
                raise Refused(f"step {found.step} of {self.path} holds only part of the state, not enough to go on from")
            skipped = [[int(a), int(b)] for a, b in skip_samples] if skip_samples else None
            attempt = claim_attempt(self._history, self.id, "rollback", found.ref, skipped).attempt
        forget_session(self.store)
        return attempt

    def prune(self, keep: Keep | None = None, *, dry_run: bool = False, recycle: bool = False) -> Pruned:
        """Delete the steps that `keep` does not keep, and what crashed saves left behind.

        Never removed: the newest step of the lineage, pinned ones, those held by a reader, files that a kept step refers to, and
        the last step of each abandoned line.

        Args:
            keep: default `Keep()`: the last three. dry_run: say what would be done, do nothing.
            recycle: keep the files of removed steps, up to the size of one checkpoint, for the next saves to write over.
        Raises:
            Corrupt: a commit record cannot be read; nothing was deleted.
        """
        keep = keep or Keep()
        snapshot = self._history.look()
        if snapshot.damaged:
            path, error = next(iter(snapshot.damaged.items()))
            raise Corrupt(f"not pruning {self.path}: {error}; nothing was deleted. Move {path} away to go on", file=path)
        held = {StepRef(p.step, p.attempt) for p in live_pins(self.store)}
        whole = max((s.step for s in snapshot.lineage if s.kind != "partial"), default=None)  # what a resume would take
        verdict = keep.decide([Candidate(s.step, s.metrics, s.ref in held or s.step == whole) for s in snapshot.lineage])
        tips = {s.attempt: s.ref for s in snapshot.steps if s.is_abandoned}
        victims = [s for s in snapshot.lineage if s.step in verdict.remove]
        victims += [s for s in snapshot.steps if s.is_abandoned and s.ref not in tips.values() and s.ref not in held]
        shrink = [s for s in snapshot.lineage if s.step in verdict.weights_only and s.kind == "full" and _has_optimizer(s)]
        result = Pruned(verdict.keep, sorted(s.step for s in victims), [s.step for s in shrink])
        if dry_run:
            result.freed_bytes = sum(s.commit.new_bytes + sum(p.bytes for p in s.commit.parts) for s in victims)
            return result
        from .run.prune import remove_steps

        shrunk = {step.step: self._replace(step, "partial") for step in shrink}
        result.weights_only = [step for step, freed in shrunk.items() if freed is not None]
        newest = snapshot.lineage[-1].commit.new_bytes if snapshot.lineage else 0
        removed = remove_steps(self._history, victims, newest if recycle else 0)
        done = {ref.step for ref in removed.steps}
        result.removed = [s for s in result.removed if s in done]
        result.spared = {ref.step: why for ref, why in removed.spared.items()}
        result.freed_bytes = removed.freed_bytes + sum(freed or 0 for freed in shrunk.values())
        return result

    def _replace(self, step: Step, kind: str) -> int | None:
        """Put a self-contained copy in the place of a step: whole, or `partial`, without its optimizer state.

        Returns the bytes freed; None if the step is in somebody else's hands at the moment, and stays as it was.
        """
        from .loading.checkpoint import open_step
        from .loading.source import contents_of_stored
        from .run.prune import Replacement, remove_steps
        from .run.write import write_step

        roles = {role for role, of in step.commit.roles.items() if kind != "partial" or of != "optimizer"}
        record = msgspec.structs.replace(step.commit, kind=kind, references=[])
        with intent(self.store, step.step, step.attempt, []):
            try:
                with held(self._history, step.ref) as found, open_step(self.store, step.path, step.commit) as checkpoint:
                    if found.path != step.path:
                        return None
                    contents = contents_of_stored(checkpoint, roles.__contains__)
                    written = write_step(self.store, contents, record, rewrite=secrets.randbelow(10**8) + 1, recycle=False)
            except (NoCheckpoint, FileNotFoundError, Corrupt):
                return None
            assert written is not None
            replacement = Replacement(written.step.path, kind != "partial")
            removed = remove_steps(self._history, [step], replacement=replacement)
            return removed.freed_bytes if removed.steps else None

    def copy(self, step: int | str, target: Any) -> Step:
        """Copy a step, with all that it refers to, into another run, as its newest step. The copy is self-contained there.

        Returns:
            The step in the target.
        Raises:
            NoCheckpoint: no such step.  Refused: the target already has this step or a later one.
            Corrupt: the source is damaged; the target has no such step then.
        """
        from .loading.checkpoint import open_step

        for _ in range(_TRIES):
            with self.hold(step) as found:
                try:
                    checkpoint = open_step(self.store, found.path, found.commit)
                    checkpoint.open_files()
                except FileNotFoundError:  # it was just replaced by a copy of itself
                    continue
                with checkpoint:
                    return self._copy_open(found, checkpoint, open_store(target))
        raise Unavailable(f"step {step} of {self.path} is replaced again and again; is somebody pinning it in a loop?")

    def _copy_open(self, found: Step, checkpoint: Checkpoint, target: Store) -> Step:
        from .loading.checkpoint import open_step
        from .loading.source import contents_of_stored
        from .run.session import Session

        session = Session(target, libraries(), reason="copy", first_step=found.step)
        origin = {"run": found.commit.run, "step": found.step, "attempt": found.attempt}
        copied = session.save(
            contents_of_stored(checkpoint),
            found.step,
            metrics=found.metrics,
            best=found.commit.best,
            origin=origin,
            refer=False,
            world=found.commit.world,
            lossy=found.commit.lossy,
        )
        with open_step(target, copied.path, copied.commit) as copy:
            _compare(checkpoint, copy)
        return copied


def _compare(source: Checkpoint, copy: Checkpoint) -> None:
    """Raises:
    Corrupt: the copy is another state. Equal content digests settle it; where the source was cut by several writers they differ.
    """
    if copy.content_digest == source.content_digest:
        return
    for name in source.names:
        if len(source.index.entries(source.tensor(name))) == 1 or source.digest(name) == copy.digest(name):
            continue
        raise Corrupt(
            f"{name} in the copy of step {source.step} in {copy.store.url} differs from its source; do not use it", tensor=name
        )


def plain_metrics(metrics: Mapping[str, Any] | None) -> dict[str, Any]:
    """Metrics as JSON takes them: numbers of any library, strings, booleans.

    Raises:
        HoldfastError: one that is none of these.
    """
    plain: dict[str, Any] = {}
    for name, value in (metrics or {}).items():
        if getattr(value, "shape", None) in ((), (1,)):  # a tensor, an array, or a scalar of either
            value = value.item()
        if not isinstance(value, (int, float, str, bool, type(None))):
            raise HoldfastError(f"the metric {name} is a {type(value).__qualname__}; give a number, a string or a boolean")
        plain[str(name)] = value if value == value and value not in (float("inf"), float("-inf")) else str(value)
    return plain


def _has_optimizer(step: Step) -> bool:
    return "optimizer" in step.commit.roles.values()
