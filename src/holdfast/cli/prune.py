"""`holdfast prune`: delete the steps that a policy does not keep, and say for each step why it stays or goes. Without torch."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import typer

from ..address import UsageError
from ..policy.keep import MODES, Keep
from ..run.history import Step
from ..runs import Pruned, Run
from .amounts import counted, size
from .place import find_run
from .terminal import Json, print_json, print_table


def prune(
    run: Annotated[str, typer.Argument(help="The run.", metavar="RUN")],
    last: Annotated[int, typer.Option(min=1, help="Keep so many of the newest steps.")] = 3,
    every: Annotated[int | None, typer.Option(min=1, help="Keep multiples of this.")] = None,
    best: Annotated[int, typer.Option(min=0, help="Keep so many of the best by --metric.")] = 0,
    metric: Annotated[str | None, typer.Option(help="The name of a metric.")] = None,
    mode: Annotated[str, typer.Option(metavar="|".join(MODES), help="Which end of the metric is the good one.")] = "min",
    weights: Annotated[int | None, typer.Option(min=1, help="Of kept steps older than so many, keep the weights alone.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, do nothing.")] = False,
    as_json: Json = False,
) -> int:
    """Delete the steps that no rule keeps.

    And what interrupted saves left. The newest step, pinned ones and held ones stay, whatever the rules say.
    """
    if mode not in MODES:
        raise UsageError(f"--mode {mode!r}: give {' or '.join(MODES)}")
    if best and metric is None:
        raise UsageError("--best needs --metric: the best by which one?")
    place = find_run(run)
    if place.is_one_step:
        raise UsageError(f"prune works on a run, not on a step: give {place.address.path}")
    opened = Run(place.store)
    before = opened.steps(abandoned=True)
    keep = Keep(last=last, every=every, best=best, metric=metric, mode=mode, weights=weights)
    result = explain(before, opened.prune(keep, dry_run=dry_run)) | {"run": opened.path, "dry_run": dry_run}
    if as_json:
        print_json(result)
    else:
        _tell(result)
    return 0


def explain(before: list[Step], pruned: Pruned) -> dict[str, Any]:
    """What became of each step, with the reason in words."""
    in_lineage = [s.step for s in before if not s.is_abandoned]
    gone_from_lineage = {step for step in in_lineage if step in pruned.removed and step not in pruned.kept}
    gone_elsewhere = Counter(pruned.removed) - Counter(gone_from_lineage)
    steps = []
    for step in before:
        is_gone = step.step in (gone_elsewhere if step.is_abandoned else gone_from_lineage)
        verdict, reason = _fate(step, pruned, is_gone)
        steps.append({"step": step.step, "attempt": step.attempt, "verdict": verdict, "reason": reason})
    return {"steps": steps, "freed_bytes": pruned.freed_bytes}


def _fate(step: Step, pruned: Pruned, is_gone: bool) -> tuple[str, str]:
    if is_gone:
        return "remove", "abandoned by a rollback" if step.is_abandoned else "no rule keeps it"
    if step.is_abandoned:
        return "keep", "pinned or held" if step.pins else "the last of an abandoned line, or held"
    if step.step in pruned.kept:
        return ("weights" if step.step in pruned.weights_only else "keep"), pruned.kept[step.step]
    return "keep", pruned.spared.get(step.step, "another process has taken it away")


def _tell(result: dict[str, Any]) -> None:
    rows = [(str(s["step"]), str(s["attempt"]), s["verdict"], s["reason"]) for s in result["steps"]]
    if rows:
        print_table(("step", "attempt", "verdict", "reason"), rows, right=("step", "attempt"))
    removed = counted(sum(row[2] == "remove" for row in rows), "step")
    freed = size(result["freed_bytes"])
    print(f"would remove {removed} and free {freed}" if result["dry_run"] else f"removed {removed} and freed {freed}")
