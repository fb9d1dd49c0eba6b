"""`holdfast report`: how the saves of a run went, as one HTML page and as a trace. Reads records; of data, nothing."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any

import typer

from ..address import UsageError
from ..errors import NoCheckpoint, Refused
from .amounts import counted, duration, one_line, size
from .chrome_trace import PRODUCER, trace
from .overview import Overview, overview
from .place import find_run
from .report_page import GENERATOR, page
from .terminal import Json, print_json

_HEAD_BYTES = 1000
"""Within so many bytes, what a report has written says that it did."""


def report(
    run: Annotated[str, typer.Argument(help="A run.", metavar="RUN")],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="FILE", help="The page; NAME-report.html here, unless told.")
    ] = "",
    trace_file: Annotated[
        str, typer.Option("--trace", metavar="FILE", help="Also a trace, for Perfetto or chrome://tracing.")
    ] = "",
    attempt: Annotated[
        int, typer.Option("--attempt", metavar="N", help="Only the saves of this attempt.", show_default=False)
    ] = 0,
    as_json: Json = False,
) -> int:
    """Make one HTML page of how a run's saves went: what is slow, on which rank, since when; with --json none unless named."""
    place = find_run(run)
    if place.is_one_step:
        raise UsageError(f"a report is of a run, not of a step: give {place.address.path}")
    numbers = place.history.attempt_numbers()
    if attempt and attempt not in numbers:
        raise NoCheckpoint(f"{place.store.url} has no attempt {attempt}; its newest is {max(numbers, default=0)}")
    seen = overview(place, attempt or None, time.time())
    target = output or ("" if as_json else f"{_name(place.store.url)}-report.html")
    written: dict[str, str] = {}
    if target:
        written["page"] = _write(target, page(seen), GENERATOR)
    if trace_file:
        written["trace"] = _write(trace_file, json.dumps(trace(seen.saves, seen.run)), PRODUCER)
    if as_json:
        print_json({**seen.as_dict(), "written": written})
    else:
        _tell(seen, written)
    return 0


def _name(url: str) -> str:
    """The last part of a run's path, fit for the name of a file."""
    last = url.rstrip("/").rpartition("/")[2]
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in last).lstrip(".") or "run"


def _write(path: str, text: str, producer: str) -> str:
    """Write a file whole, over an earlier one of its kind; returns its path.

    Raises:
        Refused: there is something else.
    """
    if os.path.lexists(path):
        with open(path, "rb") as file:
            if producer.encode() not in file.read(_HEAD_BYTES):
                raise Refused(f"{path} is there and is no report: give another name, or remove it first")
    temporary = f"{path}.{os.getpid()}.part"
    try:
        with open(temporary, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return path


def _tell(seen: Overview, written: dict[str, Any]) -> None:
    s = seen.summary
    parts = [counted(s.committed, "save")]
    parts += [f"{number} {word}" for number, word in ((s.failed, "failed"), (s.skipped, "skipped")) if number]
    if s.median_seconds is not None and s.worst_seconds is not None:
        parts.append(f"{duration(s.median_seconds)} in the median, {duration(s.worst_seconds)} at most (step {s.worst_step})")
    if s.bytes_per_second:
        parts.append(f"{size(s.new_bytes)} written at {size(s.bytes_per_second)}/s")
    print(f"{seen.run}: {', '.join(parts)}")
    for remark in seen.remarks:
        print(f"{remark.name} ({remark.status}): {one_line(remark.detail)}")
    for sentence in seen.forecast.words():
        print(sentence)
    for what, path in written.items():
        print(f"{what}: {path}")
