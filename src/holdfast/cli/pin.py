"""`holdfast pin`: give a step a name that keeps it from pruning, take one off, or list them. Without torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..address import UsageError
from ..runs import Run
from .place import find_run
from .terminal import Json, print_json, print_table


def pin(
    address: Annotated[str, typer.Argument(help="The step; without @, the latest.", metavar="RUN[@STEP]")],
    name: Annotated[str | None, typer.Argument(help="Its name from now on: RUN@NAME. Without one: list the pins.")] = None,
    remove: Annotated[str | None, typer.Option(metavar="NAME", help="Take this name off.")] = None,
    as_json: Json = False,
) -> int:
    """Keep a step for good, under a name."""
    place = find_run(address)
    run = Run(place.store)
    if remove is not None and (name is not None or place.is_one_step):
        raise UsageError(f"`holdfast pin {place.address.path} --remove {remove}` takes a run and nothing else")
    if remove is None and name is None and place.is_one_step:
        raise UsageError(f"say under which name: `holdfast pin {address} NAME`")
    said = ""
    if remove is not None:
        run.unpin(remove)
        said = f"{remove} is no longer a pin; its step may be pruned"
    elif name is not None:
        run.pin(place.address.at, name)
        said = f"step {run.find(name).step} is now {run.path}@{name}"
    pins = _pins(run)
    if as_json:
        print_json({"run": run.path, "pinned": name, "removed": remove, "pins": pins})
    elif said:
        print(said)
    elif pins:
        print_table(("pin", "step", "attempt"), [tuple(str(v) for v in p.values()) for p in pins], right=("step", "attempt"))
    else:
        print(f"{run.path} has no pins")
    return 0


def _pins(run: Run) -> list[dict[str, Any]]:
    return [
        {"name": name, "step": step.step, "attempt": step.attempt}
        for step in run.steps(abandoned=True)
        for name in sorted(step.pins)
    ]
