"""`holdfast ls`: the steps of a run, what interrupted saves left, and what is damaged. Reads records only."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from ..errors import HoldfastError, NoCheckpoint
from ..format.names import parse_step_dir
from ..format.records import Commit
from ..run.history import Snapshot, Step, newest, read_record
from ..run.marks import live_intents
from ..store.base import Store
from .amounts import counted, metrics_text, size, when
from .place import Place, find_run
from .terminal import Json, print_json, print_table

_TITLES = ("step", "line", "kind", "tier", "attempt", "saved", "size", "new", "metrics", "pins")


def ls(
    address: Annotated[str, typer.Argument(help="A run, or one step of it.", metavar="RUN[@STEP]")],
    all_lines: Annotated[
        bool, typer.Option("--all", "--abandoned", help="Also the steps that a rollback has left behind.")
    ] = False,
    as_json: Json = False,
) -> int:
    """List the steps of a run."""
    listing = look(find_run(address), all_lines)
    if as_json:
        print_json(listing)
    else:
        _tell(listing)
    return 0


def look(place: Place, all_lines: bool = False) -> dict[str, Any]:
    """What `--json` prints."""
    snapshot = place.history.look()
    steps = snapshot.steps if all_lines else snapshot.lineage
    if place.is_one_step:
        wanted = place.find()
        steps = [step for step in snapshot.steps if step.path == wanted.path]
    attempt = snapshot.attempts[max(snapshot.attempts)] if snapshot.attempts else None
    return {
        "run": place.store.url,
        "id": _run_id(place),
        "attempt": attempt.attempt if attempt else None,
        "attempt_reason": attempt.reason if attempt else None,
        "latest": _latest(snapshot, place.store.url),
        "steps": [describe(step) for step in steps],
        "hidden": len(snapshot.steps) - len(snapshot.lineage) if not all_lines and not place.is_one_step else 0,
        "damaged": [{"path": path, "error": str(error)} for path, error in snapshot.damaged.items()],
        "leftovers": leftovers(place.store, snapshot),
    }


def describe(step: Step) -> dict[str, Any]:
    """A step as JSON has it."""
    commit = step.commit
    return {
        "step": step.step,
        "attempt": step.attempt,
        "line": "abandoned" if step.is_abandoned else "lineage",
        "kind": step.kind,
        "tier": commit.tier or "local",
        "created": step.created,
        "bytes": step.nbytes,
        "new_bytes": commit.new_bytes,
        "codecs": commit.codecs,
        "lossy": commit.lossy,
        "tensors": commit.tensors,
        "metrics": step.metrics,
        "pins": list(step.pins),
        "refers_to": [{"step": ref.step, "attempt": ref.attempt} for ref in commit.references],
        "content_digest": commit.content_digest,
        "path": step.path,
    }


def leftovers(store: Store, snapshot: Snapshot) -> list[dict[str, str]]:
    """The directories without a commit: `saving` now, `interrupted`, `aborted` with the reason; or `pruned`, but for files that
    later steps refer to."""
    writing = {(i.step, i.attempt) for i in live_intents(store)}
    referred = {(ref.step, ref.attempt) for step in snapshot.steps for ref in step.commit.references}
    found = []
    for path in snapshot.undecided:
        parsed = parse_step_dir(path.removeprefix("steps/")) or (-1, -1, 0)
        record = None
        with contextlib.suppress(HoldfastError):
            record = read_record(store, f"{path}/commit.json", Commit)
        if record is not None:
            found.append({"path": path, "state": "aborted", "reason": record.reason})
        else:
            state = "saving" if parsed[:2] in writing else "pruned" if parsed[:2] in referred else "interrupted"
            found.append({"path": path, "state": state, "reason": ""})
    return found


def _run_id(place: Place) -> str | None:
    with contextlib.suppress(HoldfastError):
        record = place.history.run_record()
        return record.run if record else None
    return None


def _latest(snapshot: Snapshot, where: str) -> int | None:
    try:
        return newest(snapshot, where).step
    except NoCheckpoint:
        return None
    except HoldfastError:
        return snapshot.lineage[-1].step if snapshot.lineage else None


def _tell(listing: dict[str, Any]) -> None:
    steps = listing["steps"]
    attempt = f", attempt {listing['attempt']} ({listing['attempt_reason']})" if listing["attempt"] else ""
    print(f"{listing['run']}: {counted(len(steps), 'step') if steps else 'no committed step'}{attempt}")
    if steps:
        print_table(_TITLES, [_row(step) for step in steps], right=("step", "attempt", "size", "new"))
    for damage in listing["damaged"]:
        print(f"damaged: {damage['error']}")
    for left in listing["leftovers"]:
        print(f"{left['path']}: {_WHY[left['state']]}" + (f": {left['reason']}" if left["reason"] else ""))
    if listing["hidden"]:
        print(f"not shown: {counted(listing['hidden'], 'abandoned step')}; --all shows them")


_WHY = {
    "saving": "a save under way",
    "pruned": "what later steps still refer to of a step that was pruned",
    "interrupted": "an interrupted save; `holdfast prune` removes it",
    "aborted": "an aborted save",
}


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(step["step"]),
        step["line"],
        step["kind"] + (f", lossy {' '.join(step['lossy'])}" if step["lossy"] else ""),
        step["tier"],
        str(step["attempt"]),
        when(step["created"]),
        size(step["bytes"]),
        size(step["new_bytes"]),
        metrics_text(step["metrics"]),
        " ".join(step["pins"]),
    )
