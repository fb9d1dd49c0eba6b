"""How commands speak: one JSON object, or lines and tables; progress only on a terminal. Loads rich only for a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]
Advance = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done, and the bytes in all."""

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "DAMAGED": "bold red", "remove": "red", "abandoned": "dim"}
"""Of whole cells, by their text."""


def print_json(result: Any) -> None:
    """Print a dataclass or a dict as one JSON object. Numbers that JSON lacks become the strings nan, inf and -inf."""
    print(json.dumps(_plain(result), indent=2))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Print rows below their titles.

    Args:
        right: titles of the columns whose cells stand at the right.
    """
    if sys.stdout.isatty():
        from rich.console import Console

        Console(file=sys.stdout).print(rich_table(titles, rows, right))
        return
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(titles, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> Table:
    """The same table for a terminal, not printed yet."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left")
    for row in rows:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return table


@contextlib.contextmanager
def progress() -> Iterator[Advance]:
    """A bar on standard error while the block runs; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        doing = ""

        def advance(what: str, done: int, total: int) -> None:
            nonlocal doing
            if what != doing:
                doing = what
                bar.reset(task, description=what, total=total)
            bar.update(task, completed=done, total=total)

        yield advance
