"""`holdfast cp`: copy a step, with what it refers to, into another run. Without torch."""

from __future__ import annotations

from typing import Annotated

import typer

from ..address import UsageError, parse
from ..runs import Run
from .amounts import size
from .ls import describe
from .place import find_run
from .terminal import Json, print_json


def cp(
    source: Annotated[str, typer.Argument(help="A step; without @, the latest.", metavar="RUN[@STEP]")],
    target: Annotated[str, typer.Argument(help="Another run, made if missing. The step becomes its newest.", metavar="RUN")],
    as_json: Json = False,
) -> int:
    """Copy a step into another run. The copy refers to nothing outside."""
    place = find_run(source)
    if parse(target).format is not None or target.endswith(f"@{parse(target).at}"):
        raise UsageError(f"{target} is not a run to copy into: give a directory, without @")
    copied = Run(place.store).copy(place.address.at, target)
    if as_json:
        print_json({"source": source, "target": target, **describe(copied)})
    else:
        print(f"step {copied.step} of {place.store.url} is now in {target}: {size(copied.nbytes)}, checked against its source")
    return 0
