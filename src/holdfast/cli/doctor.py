"""`holdfast doctor`: whether a place is sound for a run, and what could be recovered from it now. Without torch.

It tries what saves need, in a scratch directory that it removes, and reads the newest steps until one is intact.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import NoCheckpoint
from .amounts import parse_size
from .checkup import check_machine, check_place, check_room
from .control_groups import agent_status, check_control_group
from .findings import FAILED, Finding
from .machine import versions
from .place import Place, existing_directory, find_run
from .recovery import Outlook, outlook
from .terminal import Json, print_json, print_table, progress


def doctor(
    path: Annotated[str, typer.Argument(help="A run, or any directory that runs shall be in.", metavar="PATH")],
    quick: Annotated[bool, typer.Option("--quick", help="Measure no speed, read no data: open the newest step only.")] = False,
    probe_size: Annotated[str, typer.Option(metavar="SIZE", help="Of the file by which speed is measured.")] = "128MiB",
    as_json: Json = False,
) -> int:
    """Check a place, and what could be recovered from a run. The exit code is that of the first thing that failed."""
    directory, probe_bytes = existing_directory(path), parse_size(probe_size)
    place = _run_at(directory)
    run = Outlook((), None, None, 0)
    with progress() as advance:
        findings = list(check_place(directory, None if quick else probe_bytes))
        if place is not None:
            run = outlook(place, quick, advance)
    status = agent_status(place.store.url) if place is not None else None
    findings += [
        check_room(directory, run.next_bytes, run.recycled_bytes),
        *check_machine(run.next_bytes),
        check_control_group(directory if place is not None else None, status),
        *run.findings,
    ]
    failed = [finding for finding in findings if finding.status == FAILED]
    if as_json:
        print_json(
            {
                "path": directory,
                "is_run": place is not None,
                "healthy": not failed,
                "newest_intact": run.newest_intact,
                "findings": [_as_dict(finding) for finding in findings],
                "versions": versions(),
            }
        )
    else:
        print(f"{directory}: {'a run' if place is not None else 'no run, a directory'}")
        print_table(("looked at", "status", "found"), [(f.name, f.status, f.detail) for f in findings])
        print("versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()))
    return failed[0].exit_code if failed else 0


def _run_at(directory: str) -> Place | None:
    try:
        return find_run(directory)
    except NoCheckpoint:
        return None


def _as_dict(finding: Finding) -> dict[str, Any]:
    return {"name": finding.name, "status": finding.status, "detail": finding.detail, "facts": finding.facts}
