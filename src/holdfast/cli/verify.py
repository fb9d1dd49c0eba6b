"""`holdfast verify`: read all bytes of a step, or of every step of a run, and name each that is not as it was captured.

It goes on after damage, and says at the end which step is the newest that is intact. Without torch.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from ..address import parse
from ..errors import Corrupt, NoCheckpoint
from ..loading.reading import Damage
from ..run.history import Step
from .amounts import counted, size
from .damage import Checked, as_damage, check_bytes, check_records, check_step, committed_steps
from .place import Place, find_run, open_address
from .terminal import Advance, Json, print_json, progress

DAMAGED = 4


@dataclasses.dataclass
class Report:
    """What a verification found."""

    address: str
    records: list[Damage] = dataclasses.field(default_factory=list)
    """Damaged records: those of the run, and commit records."""
    steps: list[Checked] = dataclasses.field(default_factory=list)
    is_foreign: bool = False
    """Whether it is a checkpoint of others, which has one step, 0, and no digests."""

    @property
    def is_intact(self) -> bool:
        return not self.records and all(step.is_intact or step.is_pruned for step in self.steps)


def verify(
    address: Annotated[str, typer.Argument(help="A step, or a run: then all its steps.", metavar="RUN[@STEP]")],
    all_lines: Annotated[bool, typer.Option("--all", help="Of a run, also the abandoned steps.")] = False,
    as_json: Json = False,
) -> int:
    """Check every stored byte against its digest. Exit code 4 when anything is damaged."""
    with progress() as advance:
        if parse(address).format is not None:
            report = _check_foreign(address, advance)
        else:
            place = find_run(address)
            report = check_one(place, address, advance) if place.is_one_step else check_run(place, advance, all_lines)
    if as_json:
        print_json(_as_dict(report))
    else:
        _tell(report)
    return 0 if report.is_intact else DAMAGED


def check_run(place: Place, advance: Advance, all_lines: bool = False) -> Report:
    """All steps of the lineage, newest first; of every line where it cannot be told which is which.

    Raises:
        NoCheckpoint: nothing is committed.
    """
    report = Report(place.store.url, check_records(place.store))
    steps: list[tuple[Step, str | None]] = []
    try:
        snapshot = place.history.look()
        commits = {path: error for path, error in snapshot.damaged.items() if path.startswith("steps/")}
        report.records += [as_damage(f"{path}/commit.json", error) for path, error in commits.items()]
        wanted = snapshot.steps if all_lines else snapshot.lineage
        steps = [(step, "abandoned" if step.is_abandoned else "lineage") for step in wanted]
    except Corrupt:
        for found in committed_steps(place.store):
            if isinstance(found, Damage):
                report.records.append(found)
            else:
                steps.append((found, None))
    if not steps and not report.records:
        raise NoCheckpoint(f"nothing is committed in {place.store.url}: there is nothing to verify")
    report.steps = [_check(place, step, line, advance) for step, line in reversed(steps)]
    return report


def check_one(place: Place, address: str, advance: Advance) -> Report:
    """One step; a damaged commit record is damage, too.

    Raises:
        NoCheckpoint: there is no such step.
    """
    report = Report(address)
    try:
        step = place.find()
    except Corrupt as error:
        report.records.append(as_damage(error.file, error))
    else:
        report.steps.append(_check(place, step, "abandoned" if step.is_abandoned else "lineage", advance))
    return report


def _check(place: Place, step: Step, line: str | None, advance: Advance) -> Checked:
    return check_step(place, step, line, lambda done, total: advance(f"step {step.step}", done, total))


def _check_foreign(address: str, advance: Advance) -> Report:
    report = Report(address, is_foreign=True)
    found = Checked(0, 0, None)
    try:
        with open_address(address) as checkpoint:
            check_bytes(checkpoint, found, lambda done, total: advance(address, done, total))
    except Corrupt as error:
        found.damages.append(as_damage(address, error))
    report.steps.append(found)
    return report


def _newest_intact(report: Report) -> Checked | None:
    return next((s for s in report.steps if s.is_intact and s.line != "abandoned"), None)


def _as_dict(report: Report) -> dict[str, Any]:
    newest = _newest_intact(report)
    return {
        "address": report.address,
        "intact": report.is_intact,
        "newest_intact": newest.step if newest else None,
        "bytes": sum(step.bytes for step in report.steps),
        "records": [dataclasses.asdict(damage) for damage in report.records],
        "steps": [{"intact": step.is_intact, **dataclasses.asdict(step)} for step in report.steps],
    }


def _tell(report: Report) -> None:
    for damage in report.records:
        print(f"damaged: {_text(damage)}")
    for step in report.steps:
        which = report.address if report.is_foreign else f"step {step.step}"
        print(f"{which}{' (abandoned)' if step.line == 'abandoned' else ''}: {_verdict(step)}")
        for damage in step.damages:
            print(f"  {_text(damage)}")
    if report.is_intact or report.is_foreign:
        return
    newest = _newest_intact(report)
    if newest is None:
        print("none of these steps is intact")
    elif newest is not report.steps[0] or report.records:
        print(f"step {newest.step} is the newest of these that is intact")


def _verdict(step: Checked) -> str:
    if step.is_pruned:
        return "was pruned meanwhile"
    if step.damages:
        return f"DAMAGED in {counted(len(step.damages), 'place')}"
    if step.unchecked_bytes:
        return f"readable, {size(step.bytes)}; {size(step.unchecked_bytes)} of it has no digest to be checked against"
    return f"intact, {size(step.bytes)}"


def _text(damage: Damage) -> str:
    """A damage, or an error that already says where it is."""
    return str(damage) if damage.nbytes or not damage.file or damage.file not in damage.reason else damage.reason
