"""Writing one step: each writer its data files and index part; then one of them the proof and the decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ..errors import HoldfastError, StepExists, Unavailable
from ..format.columns import Columns
from ..format.index import layout_digest
from ..format.names import owner_of, step_dir
from ..format.records import Commit, PartRef
from ..store.base import Store
from .assemble import build_columns
from .base import Base
from .coder import Coder
from .contents import Contents
from .cover import prove_cover
from .decide import combine, decide, publish_part
from .files import FilesWriter, ItemKey
from .history import Step, read_record
from .parts import Part
from .unite import rank_of

WRITER = "n0000"
WHOLE = "all"
"""The writer of the whole index of a step that several have written."""


@dataclass(frozen=True)
class OwnPart:
    """What one writer has written of a step, durable."""

    columns: Columns
    part: Part
    ref: PartRef
    layout: str
    """Path of the index part that holds the layout: its own, or an earlier one."""
    probes: dict[ItemKey, bytes]
    """See `base.probe`."""


@dataclass(frozen=True)
class Written:
    """A step that was just written, and what makes the next one cheaper."""

    step: Step
    layout: tuple[str, str]
    """Path of the index part that holds the layout, and the layout's digest."""
    probes: dict[ItemKey, bytes]


def write_step(
    store: Store,
    contents: Contents,
    record: Commit,
    base: Base | None = None,
    *,
    rewrite: int = 0,
    layout: tuple[str, str] | None = None,
    recycle: bool = True,
    coding: Coder | None = None,
    is_for_ever: bool = False,
    may_commit: Callable[[Commit, set[str]], bool] = lambda record, needed: True,
) -> Written | None:
    """Write and commit a step as its only writer; durable on return. After None, or an error, nothing of it is left, except where
    the error says that the step is visible and its commit was not confirmed: then it is whole, and may not survive a power cut.

    Args:
        record: what the commit record says besides what is written here.
        rewrite: number of the rewriting; 0 for the step itself.
        layout: of an earlier step, to be reused if it is the same.
        coding: what chooses codecs; without it all is raw. is_for_ever: whether the step must stay raw or zstd.
        may_commit: asked last, with the record and the paths that it needs; if it says no, None is returned.
    Raises:
        StepExists: the step is there, or was decided by somebody else.  Refused, Corrupt, Unavailable, NoSpace.
    """
    folder = step_dir(record.step, record.attempt, rewrite)
    if store.list(folder):
        raise StepExists(f"{folder} of {store.url} exists; a step is never written twice")
    decided = Decision()
    try:
        own = write_part(
            store, folder, contents, record, WRITER, base,
            layout=layout, recycle=recycle, coding=coding, is_for_ever=is_for_ever,
        )  # fmt: skip
        step = settle(store, folder, record, [(own.columns, own.part, own.ref)], own.layout, may_commit, decided)
        return Written(step, (own.layout, layout_digest(own.columns)), own.probes) if step else None
    except FileNotFoundError as error:
        raise removed(folder) from error
    finally:
        if not decided.is_taken:
            with contextlib.suppress(Exception):
                store.delete_dir(folder)


def write_part(
    store: Store,
    folder: str,
    contents: Contents,
    record: Commit,
    writer: str,
    base: Base | None,
    *,
    layout: tuple[str, str] | None = None,
    recycle: bool = True,
    coding: Coder | None = None,
    is_for_ever: bool = False,
) -> OwnPart:
    """Write one writer's data files and its index part. On any error its data files are gone again.

    Args:
        layout, coding, is_for_ever: see `write_step`.
    Raises:
        Refused: a lossy codec was asked for what must stay exact.
        FileNotFoundError: the directory was removed meanwhile.  Unavailable, NoSpace.
    """
    metadata = {"format": "pt", "holdfast": str(record.format), "run": record.run, "step": str(record.step)}
    files = FilesWriter(
        store, folder, writer, record.step, record.attempt, base, recycle, metadata, coding, contents.roles, is_for_ever
    )
    placed = files.write(contents.tensors)
    columns = build_columns(contents.tensors, placed)
    part = Part(
        writer=writer, step=record.step, attempt=record.attempt, files=placed.owned, values=contents.values,
        rank_values=contents.rank_values, roles=contents.roles,
    )  # fmt: skip
    ref, holder = publish_part(store, folder, part, columns, layout)
    return OwnPart(columns, part, ref, holder, placed.probes)


@dataclass
class Decision:
    """Whether a decision may be visible, so that what it names must not be taken away."""

    is_taken: bool = False


def settle(
    store: Store,
    folder: str,
    record: Commit,
    parts: Sequence[tuple[Columns, Part, PartRef]],
    layout: str,
    may_commit: Callable[[Commit, set[str]], bool],
    decision: Decision,
    name_of: Callable[[int], str] = lambda rank: f"rank {rank}",
) -> Step | None:
    """Prove that the parts are the whole state, and commit. None if `may_commit` says no.

    Args:
        layout: path of the index part that holds the layout of the one part. name_of: whose part one of several is.
    Raises:
        Refused: the parts do not cover every tensor exactly once.  StepExists: somebody else has decided.  Unavailable.
    """
    record, index, part_of_entry = combine(record, parts, folder)
    is_joint = len(parts) > 1
    prove_cover(index, (lambda entry: name_of(rank_of(parts[part_of_entry[entry]][1].writer))) if is_joint else None)
    if is_joint:
        whole = Part(writer=WHOLE, step=record.step, attempt=record.attempt)
        ref, layout = publish_part(store, folder, whole, index.columns)
        record = msgspec.structs.replace(record, parts=[ref])
    elif layout != parts[0][2].path:
        record = msgspec.structs.replace(record, references=sorted({*record.references, owner_of(layout)}))
    if not may_commit(record, {f.path for f in index.files()} | {layout}):
        return None
    try:
        decide(store, folder, record)
    except StepExists as error:
        decision.is_taken = error.existing is not None
        raise
    except Unavailable as error:
        decision.is_taken = True  # or not: nobody guesses, and nothing is taken away that others may have seen
        raise _undecided(store, folder, record, error) from error
    decision.is_taken = True
    return Step(record.step, record.attempt, folder, record)


def removed(folder: str) -> StepExists:
    return StepExists(f"{folder} was removed while it was being written: another process took this one for dead")


def _undecided(store: Store, folder: str, record: Commit, cause: Unavailable) -> Unavailable:
    """The error for a decision whose answer was lost or bad. What is certainly not committed is removed.

    A record that is visible after all is not synced again: after a failed fsync a second one may succeed and mean nothing.
    """
    if read_record(store, f"{folder}/commit.json", Commit) == record:
        return type(cause)(f"step {record.step} is visible in {store.url}, but its commit was not confirmed: {cause}")
    with contextlib.suppress(HoldfastError):
        store.delete_dir(folder)
    return type(cause)(f"the commit of step {record.step} could not be written, and the step does not exist: {cause}")
