"""One attempt's writing: each save is an intent, data files, an index part, and a decision, in this order.

After an error everything committed before is as it was, and the step does not exist, unless the error says that it is visible and
its commit was not confirmed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..errors import Deadline, HoldfastError, NoCheckpoint, Refused, Superseded, Unavailable
from ..format.index import Index
from ..format.records import Claim, Commit, StepRef
from ..store.base import Store
from .base import Base
from .coder import Coder
from .contents import Contents
from .history import History, Step, claim_attempt, create_run, newest
from .marks import INTENT_SECONDS, held, intent, is_buried
from .parts import read_part
from .write import Written, write_step

_TRIES = 5


class Session:
    """A run open for writing under one attempt.

    Args:
        libraries: versions to record. reason: of the attempt. parent: the commit that this line continues; None for the newest
            of the lineage; one that is given must be held. skipped: sample ranges that this line leaves out.
        first_step: what will be saved first, so that it can be refused before the attempt is claimed.
        claim: an attempt that another process has claimed, to write under; then nothing else is looked at.
    Raises:
        Refused: the directory holds something that is not a run.
    """

    def __init__(
        self,
        store: Store,
        libraries: dict[str, str],
        reason: str | None = None,
        parent: StepRef | None = None,
        skipped: list[list[int]] | None = None,
        first_step: int | None = None,
        claim: Claim | None = None,
    ) -> None:
        self.store = store
        self.history = History(store)
        self.libraries = libraries
        self.parent, self.attempt = parent, 0
        if claim is not None:
            self.run, self.attempt, self.parent = claim.run, claim.attempt, claim.parent
        else:
            self.run = create_run(store, libraries.get("holdfast", "")).run
            if parent is None:
                self._claim_after_newest(reason, skipped, first_step)
        if not self.attempt:
            reason = reason or ("restart" if parent else "start")
            self.attempt = claim_attempt(self.history, self.run, reason, parent, skipped).attempt
        self.last_step = self.parent.step if self.parent else None
        self.last: Step | None = None
        self.pid = os.getpid()
        self._written: Written | None = None

    def _claim_after_newest(self, reason: str | None, skipped: list[list[int]] | None, first_step: int | None) -> None:
        """Claim an attempt that continues from the newest step, which must not go away meanwhile; none if there is no step."""
        for _ in range(_TRIES):
            try:
                last = newest(self.history.look(), self.store.url)
            except NoCheckpoint:
                return
            with contextlib.suppress(NoCheckpoint), held(self.history, last.ref):
                self._check_step(first_step, last.step)
                claimed = claim_attempt(self.history, self.run, reason or "restart", last.ref, skipped)
                self.parent, self.attempt = last.ref, claimed.attempt
                return
        raise Unavailable(f"{self.store.url}: each newest step was pruned before it could be held; is another job saving there?")

    def _check_step(self, step: int | None, last: int | None, is_whole: bool = True) -> None:
        if step is not None and last is not None and step < last + is_whole:
            raise Refused(
                f"step {step} does not exceed step {last}, which {self.store.url} continues from; "
                f"to go back, `holdfast rollback {self.store.url}@STEP` first"
            )

    def save(
        self,
        contents: Contents,
        step: int,
        *,
        metrics: dict[str, Any] | None = None,
        best: list[str] | None = None,
        recycle: bool = True,
        refer: bool = True,
        origin: dict[str, Any] | None = None,
        kind: str = "full",
        world: int = 1,
        coding: Coder | None = None,
        lossy: Sequence[str] = (),
        check: Callable[[], None] = lambda: None,
    ) -> Step:
        """Write one checkpoint; durable and committed on return.

        Args:
            refer: whether unchanged tensors may be left in earlier steps' files; without it the step is self-contained, and
                no codec is used but `raw` and `zstd`.
            coding: what chooses codecs; without it all is raw. lossy: what the source of a copy says of itself.
            kind: `partial` for a part of the state: no step to continue from; it leaves room for the whole of the same step.
            world: how many ranks the state is of: a copy keeps that of its source.
            check: called when all is written; what it raises, ends the save.
        Raises:
            Refused: `step` does not exceed the last one.  Superseded: a newer attempt has begun.
            StepExists, Unavailable, NoSpace, Unsupported.
        """
        record, parents = self.record(step, metrics=metrics, best=best, refer=refer, origin=origin, kind=kind, world=world)
        record = msgspec.structs.replace(record, lossy=list(lossy))
        with intent(self.store, step, self.attempt, parents) as mark:
            for base_ref in (record.parent if refer else None, None):
                base = self._base(base_ref) if base_ref else None
                if base_ref and base is None:
                    continue
                committed = self._try(contents, record, base, recycle, mark.record.expires, check, coding, not refer)
                if committed is not None:
                    break
        if committed is None:
            raise Unavailable(f"files of step {step} vanished from {self.store.url} while it was being saved")
        self.done(committed)
        return committed

    def record(
        self,
        step: int,
        *,
        metrics: dict[str, Any] | None = None,
        best: list[str] | None = None,
        refer: bool = True,
        origin: dict[str, Any] | None = None,
        kind: str = "full",
        world: int = 1,
    ) -> tuple[Commit, list[StepRef]]:
        """What the commit record of `step` says before anything is written, and the steps that it may refer to.

        Raises:
            Refused, Superseded.
        """
        self._check_step(step, self.last_step, kind != "partial")
        self.check_newest()
        parent = self.last.ref if self.last else self.parent
        parents = [parent, *self._references_of(parent)] if parent and refer else []
        record = Commit(
            decision="committed", kind=kind, run=self.run, step=step, attempt=self.attempt, parent=parent, created=time.time(),
            metrics=metrics or {}, best=best, libraries=self.libraries, origin=origin, world=world,
        )  # fmt: skip
        return record, parents

    @property
    def claim(self) -> Claim:
        """The attempt, and where it stands, for another process to write under."""
        return Claim(run=self.run, attempt=self.attempt, parent=self.last.ref if self.last else self.parent)

    def follow(self, ref: StepRef) -> None:
        """Go on from a step that another process has committed under this attempt."""
        self.parent, self.last_step, self.last = ref, ref.step, None

    def done(self, committed: Step) -> None:
        """Go on from a step that this session has committed."""
        if committed.kind != "partial":
            self.last_step, self.last = committed.step, committed

    def check_newest(self) -> None:
        """Raises:
        Superseded: a newer attempt has begun on this run.
        """
        newer = max(self.history.attempt_numbers(), default=0)
        if newer > self.attempt:
            raise Superseded(
                f"attempt {newer} has taken over {self.store.url}; this is attempt {self.attempt} and must stop",
                attempt=self.attempt,
                newer=newer,
            )

    def may_commit(self, found: Commit, needed: set[str], expires: float) -> bool:
        """Whether all that the record needs is there, and will stay.

        Raises:
            Superseded.  Deadline: the intent has expired.
        """
        if any(is_buried(self.store, r) for r in found.references) or not all(map(self._is_there, needed)):
            return False
        self.check_newest()
        if time.time() >= expires:
            raise Deadline(f"saving step {found.step} took over {INTENT_SECONDS / 3600:g} h; it was given up")
        return True

    def _try(
        self,
        contents: Contents,
        record: Commit,
        base: Base | None,
        recycle: bool,
        expires: float,
        check: Callable[[], None],
        coding: Coder | None,
        is_for_ever: bool,
    ) -> Step | None:
        """One try at a save; None if a step that it refers to is being deleted, and all must be written anew."""

        def may_commit(found: Commit, needed: set[str]) -> bool:
            check()
            return self.may_commit(found, needed, expires)

        layout = self._written.layout if base and self._written else None
        rewrite = secrets.randbelow(10**8) + 1 if record.kind == "partial" else 0
        written = write_step(
            self.store, contents, record, base,
            rewrite=rewrite, layout=layout, recycle=recycle, coding=coding, is_for_ever=is_for_ever, may_commit=may_commit,
        )  # fmt: skip
        if written is None:
            return None
        if rewrite:
            return written.step
        kept = self._written.probes if self._written and base else {}
        self._written = replace(written, probes=kept | written.probes)
        return written.step

    def _base(self, ref: StepRef) -> Base | None:
        """The step to refer to, unless it is gone, being deleted, or damaged."""
        try:
            step = self.history.committed(ref)
            if step is None or is_buried(self.store, ref):
                return None
            parts = [read_part(self.store, p.path, p.digest)[0] for p in step.commit.parts]
            probes = self._written.probes if self._written and self._written.step.ref == ref else None
            return Base(Index(parts[0], step.path), probes) if len(parts) == 1 else None
        except (HoldfastError, FileNotFoundError):  # whatever ails the old step, the new one is written whole
            return None

    def _references_of(self, ref: StepRef) -> Sequence[StepRef]:
        try:
            found = self.history.committed(ref)
        except HoldfastError:
            return []  # it will not be referred to either: see `_base`
        return found.commit.references if found else []

    def _is_there(self, path: str) -> bool:
        try:
            return self.store.size(path) >= 0
        except FileNotFoundError:
            return False


_open: dict[str, Session] = {}


def session_of(store: Store, libraries: dict[str, str], first_step: int) -> Session:
    """This process's session on a run, opened when first asked for."""
    known = _open.get(store.url)
    record = known.history.run_record() if known else None
    if known is None or known.pid != os.getpid() or record is None or record.run != known.run:
        known = _open[store.url] = Session(store, libraries, first_step=first_step)
    return known


def keep_session(session: Session) -> None:
    """Make `session` this process's session on its run."""
    _open[session.store.url] = session


def forget_session(store: Store) -> None:
    """The next save of this process begins a new attempt."""
    _open.pop(store.url, None)
