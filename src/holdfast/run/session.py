"""One attempt's writing: each save is an intent, data files, an index part, and a decision, in this order.

After any error the step does not exist, what was written of it is gone, and everything committed before is as it was.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import HoldfastError, Refused, StepExists, Superseded
from ..format.columns import Columns
from ..format.index import Index
from ..format.names import owner_of, step_dir
from ..format.records import Commit, StepRef
from ..store.base import Store
from .assemble import build_columns
from .base import Base
from .contents import Contents
from .cover import prove_cover
from .decide import Part, combine, decide, publish_part, read_part
from .files import FilesWriter
from .history import History, Step, claim_attempt, create_run, newest
from .marks import intent, is_buried


class Session:
    """A run open for writing under one attempt.

    Args:
        libraries: versions to record. reason: of the attempt. parent: the commit that this line continues; None for the newest
            of the lineage. skipped: sample ranges that this line leaves out.
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
    ) -> None:
        self.store = store
        self.history = History(store)
        self.libraries = libraries
        self.run = create_run(store, libraries.get("holdfast", "")).run
        snapshot = self.history.look()
        last = newest(snapshot, store.url) if parent is None and (snapshot.lineage or snapshot.damaged) else None
        self.parent = parent or (last.ref if last else None)
        self.attempt = claim_attempt(self.history, self.run, reason or ("restart" if self.parent else "start"), self.parent, skipped).attempt
        self.last_step = self.parent.step if self.parent else None
        self.last: Step | None = None
        self.pid = os.getpid()
        self._layout: tuple[str, Columns] | None = None

    def save(
        self,
        contents: Contents,
        step: int,
        *,
        metrics: dict[str, Any] | None = None,
        best: list[str] | None = None,
        recycle: bool = True,
        refer: bool = True,
        kind: str = "full",
        origin: dict[str, Any] | None = None,
    ) -> Step:
        """Write one checkpoint; durable and committed on return.

        Args:
            refer: whether unchanged tensors may be left in earlier steps' files; without it the step is self-contained.
        Raises:
            Refused: `step` does not exceed the last one.  Superseded: a newer attempt has begun.
            StepExists, Unavailable, NoSpace, Unsupported.
        """
        if self.last_step is not None and step <= self.last_step:
            raise Refused(
                f"step {step} does not exceed step {self.last_step}, which {self.store.url} continues from; "
                f"to go back, `holdfast rollback {self.store.url}@STEP` first"
            )
        self.check_newest()
        parent = self.last.ref if self.last else self.parent
        parents = [parent, *self._references_of(parent)] if parent and refer else []
        record = Commit(
            decision="committed", kind=kind, run=self.run, step=step, attempt=self.attempt, parent=parent, created=time.time(),
            metrics=metrics or {}, best=best, libraries=self.libraries, origin=origin,
        )  # fmt: skip
        with intent(self.store, step, self.attempt, parents):
            for base_ref in (parent if refer else None, None):
                base = self._base(base_ref) if base_ref else None
                if base_ref and base is None:
                    continue
                committed = self._try(contents, record, base, recycle)
                if committed is not None:
                    break
        assert committed is not None
        self.last_step, self.last = step, committed
        return committed

    def check_newest(self) -> None:
        """Raises:
        Superseded: a newer attempt has begun on this run.
        """
        newer = max(self.history.attempt_numbers(), default=0)
        if newer > self.attempt:
            raise Superseded(
                f"attempt {newer} has taken over {self.store.url}; this is attempt {self.attempt} and must stop", attempt=self.attempt, newer=newer
            )

    def _try(self, contents: Contents, record: Commit, base: Base | None, recycle: bool) -> Step | None:
        """One try at a save; None if a step that it refers to is being deleted, and all must be written anew."""
        folder = step_dir(record.step, record.attempt)
        if record.kind == "partial":
            folder += "-p1"
        metadata = {"format": "pt", "holdfast": str(record.format), "run": self.run, "step": str(record.step)}
        is_decided = False
        if self.store.list(folder):
            raise StepExists(f"{folder} of {self.store.url} exists; a step is never written twice")
        try:
            files = FilesWriter(self.store, folder, "n0000", record.step, record.attempt, base, recycle, metadata)
            placed = files.write(contents.tensors)
            columns = build_columns(contents.tensors, placed)
            part = Part(
                writer="n0000", step=record.step, attempt=record.attempt, files=placed.owned, values=contents.values,
                rank_values=contents.rank_values, roles=contents.roles,
            )  # fmt: skip
            ref, layout = publish_part(self.store, folder, part, columns, self._layout if base else None)
            record, index = combine(record, [(columns, part, ref)], folder)
            prove_cover(index)
            needed = {f.path for f in index.files()} | {layout}
            if layout != ref.path:
                record = msgspec.structs.replace(record, references=sorted({*record.references, owner_of(layout)}))
            if any(is_buried(self.store, r) for r in record.references) or not all(map(self._is_there, needed)):
                return None
            self.check_newest()
            try:
                decide(self.store, folder, record)
            except StepExists:
                is_decided = True
                raise
            is_decided = True
            self._layout = (layout, columns)
            return Step(record.step, record.attempt, folder, record)
        finally:
            if not is_decided:
                with contextlib.suppress(Exception):
                    self.store.delete_dir(folder)

    def _base(self, ref: StepRef) -> Base | None:
        """The step to refer to, unless it is gone, being deleted, or damaged."""
        try:
            step = next((s for s in self.history.look().steps if s.ref == ref), None)
            if step is None or is_buried(self.store, ref):
                return None
            parts = [read_part(self.store, p.path, p.digest)[0] for p in step.commit.parts]
            return Base(Index(parts[0], step.path)) if len(parts) == 1 else None
        except (HoldfastError, FileNotFoundError):  # whatever ails the old step, the new one is written whole
            return None

    def _references_of(self, ref: StepRef) -> Sequence[StepRef]:
        found = next((s for s in self.history.look().steps if s.ref == ref), None)
        return found.commit.references if found else []

    def _is_there(self, path: str) -> bool:
        try:
            return self.store.size(path) >= 0
        except FileNotFoundError:
            return False
