"""What could be recovered from a run now, and from where; what interrupted saves left; who writes to it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Corrupt, HoldfastError
from ..run.history import Snapshot, Step
from ..run.identity import is_gone, this_process
from .amounts import counted, size, when
from .damage import check_records, check_step
from .findings import FAILED, OK, WARNING, Finding
from .ls import leftovers
from .place import Place, open_found
from .terminal import Advance

CORRUPT = 4


@dataclass(frozen=True)
class Outlook:
    """What a run says about itself."""

    findings: tuple[Finding, ...]
    newest_intact: int | None
    next_bytes: int | None
    """Of the next checkpoint, if it is as large as the newest and shares nothing with it."""
    recycled_bytes: int


def outlook(place: Place, is_quick: bool, advance: Advance) -> Outlook:
    """Look at a run, and read its steps from the newest on until one is intact.

    Args:
        is_quick: only open the steps, read none of their data.
    """
    broken = check_records(place.store)
    findings = [Finding("records", FAILED, str(d.reason), {"file": d.file}, CORRUPT) for d in broken]
    try:
        snapshot = place.history.look()
    except Corrupt as error:
        advice = f"the history cannot be read ({error}); `holdfast verify {place.store.url}` tells which steps are intact"
        return Outlook((*findings, Finding("recovery", FAILED, advice, exit_code=CORRUPT)), None, None, 0)
    commits = {path: error for path, error in snapshot.damaged.items() if path.startswith("steps/")}
    findings += [Finding("records", FAILED, str(e), {"file": path}, CORRUPT) for path, e in commits.items()]
    recycled = _recycled_bytes(place)
    intact, recovery = _recovery(place, snapshot, is_quick, advance)
    findings += [recovery, *writer(snapshot), *_leftovers(place, snapshot, recycled)]
    next_bytes = snapshot.lineage[-1].nbytes if snapshot.lineage else None
    return Outlook(tuple(findings), intact, next_bytes, recycled)


def _recovery(place: Place, snapshot: Snapshot, is_quick: bool, advance: Advance) -> tuple[int | None, Finding]:
    whole = [step for step in snapshot.lineage if step.kind != "partial"]
    if not whole:
        return None, Finding("recovery", WARNING, "nothing is committed: there is nothing to recover")
    damaged: list[int] = []
    for step in reversed(whole):
        why = _open_only(place, step) if is_quick else _read_whole(place, step, advance)
        if why:
            damaged.append(step.step)
            continue
        facts = {"step": step.step, "attempt": step.attempt, "tier": step.commit.tier or "local", "damaged": damaged}
        how = f"opens, and none of its {size(step.nbytes)} was read" if is_quick else f"all {size(step.nbytes)} read"
        detail = f"step {step.step}, saved {when(step.created)}, from {place.store.url}: {how}"
        if damaged:
            newer = f"{', '.join(map(str, damaged))} damaged: see `holdfast verify {place.store.url}`"
            return step.step, Finding("recovery", FAILED, f"{detail}; newer ones are not to be had, {newer}", facts, CORRUPT)
        return step.step, Finding("recovery", OK, detail, facts)
    detail = f"none of {counted(len(whole), 'step')} is intact; see `holdfast verify {place.store.url}`"
    return None, Finding("recovery", FAILED, detail, {"damaged": damaged}, CORRUPT)


def _open_only(place: Place, step: Step) -> str:
    """Why the step cannot be opened; empty where it can."""
    try:
        checkpoint = open_found(place, step)
    except HoldfastError as error:
        return str(error)
    if checkpoint is None:
        return "pruned meanwhile"
    checkpoint.close()
    return ""


def _read_whole(place: Place, step: Step, advance: Advance) -> str:
    """Why the step is not intact; empty where it is."""
    checked = check_step(place, step, None, lambda done, total: advance(f"step {step.step}", done, total))
    if checked.is_pruned:
        return "pruned meanwhile"
    return str(checked.damages[0]) if checked.damages else ""


def writer(snapshot: Snapshot) -> Iterator[Finding]:
    """Who began the newest attempt, and whether it still runs; nothing where there is none."""
    if not snapshot.attempts:
        return
    attempt = snapshot.attempts[max(snapshot.attempts)]
    by = attempt.by
    if by.host != this_process().host:
        state = "on another machine, so that only that one knows whether it lives"
    else:
        state = "no longer running" if is_gone(by) else "running"
    detail = f"attempt {attempt.attempt} ({attempt.reason}), process {by.pid} on {by.host.partition('/')[0]}: {state}"
    yield Finding("writer", OK, detail, {"attempt": attempt.attempt, "host": by.host, "pid": by.pid, "state": state})


def _leftovers(place: Place, snapshot: Snapshot, recycled_bytes: int) -> Iterator[Finding]:
    left = leftovers(place.store, snapshot)
    dead = [found["path"] for found in left if found["state"] != "saving"]
    nbytes = sum(_bytes_below(place, path) for path in dead)
    facts = {"paths": dead, "bytes": nbytes, "recycled_bytes": recycled_bytes}
    kept = f"{size(recycled_bytes)} of retired files are kept to be written over" if recycled_bytes else ""
    if dead:
        detail = f"{counted(len(dead), 'interrupted save')} left {size(nbytes)}: `holdfast prune` removes that"
        yield Finding("leftovers", WARNING, f"{detail}; {kept}" if kept else detail, facts)
    else:
        yield Finding("leftovers", OK, kept or "none", facts)


def _bytes_below(place: Place, folder: str) -> int:
    return sum(place.store.size(f"{folder}/{name}") for name in place.store.list(folder) if not name.endswith("/"))


def _recycled_bytes(place: Place) -> int:
    """Bytes of files that the next save may be written over; the store lists them to nobody."""
    try:
        with os.scandir(os.path.join(place.store.url, ".recycle")) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except FileNotFoundError:
        return 0
