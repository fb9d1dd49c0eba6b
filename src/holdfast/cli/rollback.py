"""`holdfast rollback`: go back to a step; what comes after it is kept, and no longer resumed. Without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from ..address import UsageError
from ..runs import Run
from .amounts import counted
from .place import find_run
from .terminal import Json, print_json

_RANGE = re.compile(r"(\d+):(\d+)\Z")


def rollback(
    address: Annotated[str, typer.Argument(help="The run, and the step to go back to.", metavar="RUN@STEP")],
    step: Annotated[str | None, typer.Argument(help="The step, where it is not part of the address.")] = None,
    skip_samples: Annotated[
        list[str] | None,
        typer.Option(metavar="A:B", help="Samples A to B-1 are left out on the new line; repeatable. The data loader does it."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Make a step what the next start resumes from. Deletes nothing; a job that still writes to the run stops."""
    place = find_run(address)
    if place.is_one_step == (step is not None):
        raise UsageError(f"say once which step to go back to: `holdfast rollback {place.address.path}@STEP`")
    ranges = _ranges(skip_samples or ())
    run = Run(place.store)
    found = run.find(step if step is not None else place.address.at)
    left = [s.step for s in run.steps() if s.step > found.step]
    attempt = run.rollback(found.step, skip_samples=ranges or None)
    if as_json:
        names = ("run", "step", "attempt", "abandoned", "skipped_samples")
        print_json(dict(zip(names, (run.path, found.step, attempt, left, ranges), strict=True)))
        return 0
    print(f"{run.path} resumes from step {found.step}, as attempt {attempt}")
    if left:
        print(f"left behind, and still readable: {counted(len(left), 'step')} from {left[0]} to {left[-1]}")
    for start, stop in ranges:
        print(f"to be skipped by the data loader: samples {start} to {stop - 1}")
    return 0


def _ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Half-open ranges of samples.

    Raises:
        UsageError: not A:B, or empty.
    """
    found = []
    for text in texts:
        match = _RANGE.match(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise UsageError(f"--skip-samples {text!r}: give A:B with A below B, such as 12800:14400")
        found.append((int(match[1]), int(match[2])))
    return found
