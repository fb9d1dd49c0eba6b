"""Writing one step as its only writer: data files, index part, proof, decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from ..errors import HoldfastError, StepExists, Unavailable
from ..format.columns import Columns
from ..format.names import owner_of, step_dir
from ..format.records import Commit
from ..store.base import Store
from .assemble import build_columns
from .base import Base
from .contents import Contents
from .cover import prove_cover
from .decide import combine, decide, publish_part
from .files import FilesWriter
from .history import Step, read_record
from .parts import Part

WRITER = "n0000"


@dataclass(frozen=True)
class Written:
    """A step that was just written, and what makes the next one cheaper."""

    step: Step
    layout: tuple[str, Columns]
    """Path of the index part that holds the layout, and its columns."""
    probes: dict[str, bytes]
    """See `base.probe`."""


def write_step(
    store: Store,
    contents: Contents,
    record: Commit,
    base: Base | None = None,
    *,
    rewrite: int = 0,
    layout: tuple[str, Columns] | None = None,
    recycle: bool = True,
    may_commit: Callable[[Commit, set[str]], bool] = lambda record, needed: True,
) -> Written | None:
    """Write and commit a step; durable on return. After None, or an error, nothing of it is left, except where the error says
    that the step is visible and its commit was not confirmed: then it is whole, and may not survive a power cut.

    Args:
        record: what the commit record says besides what is written here.
        rewrite: number of the rewriting; 0 for the step itself.
        layout: of an earlier step, to be reused if it is the same.
        may_commit: asked last, with the record and the paths that it needs; if it says no, None is returned.
    Raises:
        StepExists: the step is there, or was decided by somebody else.  Refused, Corrupt, Unavailable, NoSpace.
    """
    folder = step_dir(record.step, record.attempt, rewrite)
    if store.list(folder):
        raise StepExists(f"{folder} of {store.url} exists; a step is never written twice")
    is_decided = False
    try:
        metadata = {"format": "pt", "holdfast": str(record.format), "run": record.run, "step": str(record.step)}
        placed = FilesWriter(store, folder, WRITER, record.step, record.attempt, base, recycle, metadata).write(contents.tensors)
        columns = build_columns(contents.tensors, placed)
        part = Part(
            writer=WRITER, step=record.step, attempt=record.attempt, files=placed.owned, values=contents.values,
            rank_values=contents.rank_values, roles=contents.roles,
        )  # fmt: skip
        ref, holder = publish_part(store, folder, part, columns, layout)
        record, index = combine(record, [(columns, part, ref)], folder)
        prove_cover(index)
        if holder != ref.path:
            record = msgspec.structs.replace(record, references=sorted({*record.references, owner_of(holder)}))
        if not may_commit(record, {f.path for f in index.files()} | {holder}):
            return None
        try:
            decide(store, folder, record)
        except StepExists as error:
            is_decided = error.existing is not None
            raise
        except Unavailable as error:
            is_decided = True  # or not: nobody guesses, and nothing is taken away that others may have seen
            raise _undecided(store, folder, record, error) from error
        is_decided = True
        return Written(Step(record.step, record.attempt, folder, record), (holder, columns), placed.probes)
    except FileNotFoundError as error:
        raise StepExists(f"{folder} was removed while it was being written: another process took this one for dead") from error
    finally:
        if not is_decided:
            with contextlib.suppress(Exception):
                store.delete_dir(folder)


def _undecided(store: Store, folder: str, record: Commit, cause: Unavailable) -> Unavailable:
    """The error for a decision whose answer was lost or bad. What is certainly not committed is removed.

    A record that is visible after all is not synced again: after a failed fsync a second one may succeed and mean nothing.
    """
    if read_record(store, f"{folder}/commit.json", Commit) == record:
        return type(cause)(f"step {record.step} is visible in {store.url}, but its commit was not confirmed: {cause}")
    with contextlib.suppress(HoldfastError):
        store.delete_dir(folder)
    return type(cause)(f"the commit of step {record.step} could not be written, and the step does not exist: {cause}")
