"""Deleting steps: bury, look again, take the commit record away, and only then the files.

A step's commit record goes first, durably; then its files, except those that a remaining step refers to. Whatever instant the
process dies at, each step that is listed is whole, and the next pruning finishes the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import HoldfastError
from ..format.index import Index, read_index
from ..format.names import safe_path, step_dir
from ..format.records import StepRef
from ..store.base import Store
from .history import History, Snapshot, Step, live_pins, newest
from .marks import burying, clear_marks, live_intents
from .parts import read_part


@dataclass(frozen=True)
class Removed:
    """What a removal did."""

    steps: tuple[StepRef, ...]
    spared: dict[StepRef, str]
    """Steps that were to go, and why they stay."""
    freed_bytes: int


@dataclass(frozen=True)
class Replacement:
    """What was written to stand in the place of the one victim."""

    path: str
    """Its directory, committed."""
    is_whole: bool
    """Whether it has all that the victim has: pins and holds are then on it."""


def remove_steps(
    history: History, victims: Sequence[Step], recycle_bytes: int = 0, *, replacement: Replacement | None = None
) -> Removed:
    """Delete steps, and what dead writers and interrupted deletions left.

    The order carries the proof. A directory that is undecided before the intents are read, has no live intent, and is undecided
    after, has no writer. A save that may refer to a victim has published its intent before (then the victim is spared), or
    finds the tombstone, or the record gone, when it looks after publishing.

    Args:
        recycle_bytes: keep up to so many bytes of files for later saves to write over.
        replacement: of the one victim; nothing is removed unless it is there.
    """
    store = history.store
    with burying(store, [step.ref for step in victims]):
        first = history.look()
        undecided, hidden = set(first.undecided), set(first.hidden)
        intents = live_intents(store)
        busy = {ref: f"the save of step {i.step} may refer to it" for i in intents for ref in i.parents}
        if replacement is None or not replacement.is_whole:
            busy |= {StepRef(p.step, p.attempt): "pinned, or held by a reader" for p in live_pins(store)}
        snapshot = history.look()
        with contextlib.suppress(HoldfastError):
            if replacement is None or not replacement.is_whole:
                busy.setdefault(newest(snapshot, store.url).ref, "it has become the newest")
        writing = {step_dir(i.step, i.attempt) for i in intents}
        stale = (undecided & set(snapshot.undecided)) | (hidden & set(snapshot.hidden))
        stale = {path for path in stale if _original(path) not in writing}
        wanted = {step.path for step in victims if step.ref not in busy}
        gone = [step for step in snapshot.steps if step.path in wanted]
        if replacement is not None:
            gone = gone if replacement.path in snapshot.hidden else []
            stale.discard(replacement.path)
        # what survives must be on the disk before anything goes: its writer may have been killed before it synced
        survivors = {step.path for step in snapshot.steps if _original(step.path) in set(map(_original, stale))}
        if gone:
            survivors.add(replacement.path if replacement else _newest_kept(snapshot, gone))
        for path in survivors:
            store.sync(path)
        doomed = sorted({step.path for step in gone} | stale)
        for path in doomed:  # undecided ones too: their record may be gone only from the cache of a process that was killed
            store.delete(f"{path}/commit.json", sync=True)
        remaining = [p for p in (*(s.path for s in snapshot.steps), *snapshot.hidden, *snapshot.damaged) if p not in doomed]
        needed = _needed(store, remaining, {s.path: s for s in snapshot.steps})
        freed = sum(_sweep(store, path, needed, recycle_bytes) for path in doomed)
    clear_marks(store)
    freed += store.sweep(recycle_bytes)
    spared = {step.ref: busy[step.ref] for step in victims if step.ref in busy}
    return Removed(tuple(s.ref for s in gone), spared, freed)


def _original(path: str) -> str:
    """The directory in which a step was first written, of any in which it was written."""
    return path.partition("-r")[0]


def _newest_kept(snapshot: Snapshot, gone: Sequence[Step]) -> str:
    """The directory of the newest step of the lineage that stays."""
    kept = [s for s in snapshot.lineage if s not in gone] or list(gone)
    return max(kept, key=lambda s: s.step).path


def _needed(store: Store, folders: Sequence[str], steps: dict[str, Step]) -> set[str]:
    """The files outside their own directories that the steps in `folders` refer to; whole directories end in `/`.

    Where an index cannot be read, everything in the directories that its step refers to counts as needed.
    """
    needed: set[str] = set()
    for folder in folders:
        step = steps.get(folder)
        if step is not None and not step.commit.references:
            continue
        try:
            for name in store.list(folder):
                if name.startswith("index-"):
                    columns, _, _ = read_part(store, f"{folder}/{name}")
                    needed |= {f.path for f in Index(columns, folder).files() if not f.is_foreign}
                    needed.add(_layout_holder(store, f"{folder}/{name}"))
        except (HoldfastError, FileNotFoundError):
            needed |= {f"{step_dir(r.step, r.attempt)}/" for r in (step.commit.references if step else [])}
    return needed


def _layout_holder(store: Store, path: str) -> str:
    return safe_path(read_index(store.map(path), path)[1].get("layout_of", path), path)


def _sweep(store: Store, folder: str, needed: set[str], recycle_bytes: int) -> int:
    """Remove what is in `folder` and not needed, then it; returns bytes freed."""
    if f"{folder}/" in needed:
        return 0
    freed, is_empty = 0, True
    for name in store.list(folder):
        path = f"{folder}/{name}"
        if path in needed:
            is_empty = False
        elif name.startswith("n") and recycle_bytes:
            freed += store.retire(path, recycle_bytes)
        else:
            with contextlib.suppress(FileNotFoundError):
                freed += store.size(path)
            store.delete(path)
    if is_empty:
        store.delete_dir(folder)
    return freed
