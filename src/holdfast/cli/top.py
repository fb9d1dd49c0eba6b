"""`holdfast top`: a run live. Asks its agent; where none answers, the run's records tell what they can."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from ..address import UsageError
from ..errors import HoldfastError
from .amounts import one_line
from .glance import Ask, Glance, Table, blocks, glance
from .place import Place, find_run
from .terminal import Json, print_json, print_table, rich_table

if TYPE_CHECKING:
    from rich.console import RenderableType


def top(
    run: Annotated[str, typer.Argument(help="A run.", metavar="RUN")],
    once: Annotated[bool, typer.Option("--once", help="Look once, and end; so without a terminal, and with --json.")] = False,
    interval: Annotated[float, typer.Option("--interval", metavar="SECONDS", help="From look to look.")] = 2.0,
    as_json: Json = False,
) -> int:
    """Show a run as it goes: its agent, what is being saved, its last saves and where their time went."""
    if not 0.1 <= interval <= 86400:
        raise UsageError(f"--interval {interval:g}: give seconds, from 0.1 to a day")
    place, ask = find_run(run), _agent_of()
    if place.is_one_step:
        raise UsageError(f"top shows a run, not a step: give {place.address.path}")
    first = glance(place, ask, time.time())
    if as_json:
        print_json(first.as_dict())
    elif once or not sys.stdout.isatty():
        _print(blocks(first))
    else:
        _watch(place, ask, first, interval)
    return 0


def _agent_of() -> Ask:
    """What asks an agent."""
    from ..agent.client import status_of

    return status_of


def _print(shown: Iterable[str | Table]) -> None:
    for block in shown:
        if isinstance(block, Table):
            print_table(block.titles, block.rows, block.right)
        else:
            print(block)


def _watch(place: Place, ask: Ask, seen: Glance, interval: float) -> None:
    """Show one look after the other until somebody interrupts. A look that fails says why, and the next one may not."""
    from rich.live import Live

    trouble: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), Live(_drawn(blocks(seen)), auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                seen, trouble = glance(place, ask, time.time()), []
            except HoldfastError as error:
                trouble = ["", f"the last look failed: {one_line(str(error))}"]
            live.update(_drawn([*blocks(seen), *trouble]), refresh=True)


def _drawn(shown: Iterable[str | Table]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(*(rich_table(b.titles, b.rows, b.right) if isinstance(b, Table) else Text(b) for b in shown))
