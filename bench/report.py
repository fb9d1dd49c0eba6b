"""What comes out: ratios beside their targets, the table, and everything as JSON. Pure; no time is asserted.

A ratio is one of medians; the range beside it is that of the rounds, each method against the other in the same round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.drive import Result

MEGABYTE = 1e6
BEST_PEER = "best peer"


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    unit: float
    """What a printed 1 stands for, in seconds or bytes."""
    digits: int


COLUMNS = (
    Column("stall", "stall s", 1, 2),
    Column("durable", "durable s", 1, 2),
    Column("load_cold", "load cold s", 1, 2),
    Column("load_warm", "load warm s", 1, 2),
    Column("one_cold", "one cold ms", 1e-3, 1),
    Column("one_warm", "one warm ms", 1e-3, 1),
    Column("stored_bytes", "disk GB", 1e9, 3),
    Column("save_extra_bytes", "extra save MB", MEGABYTE, 0),
    Column("load_extra_bytes", "extra load MB", MEGABYTE, 0),
    Column("kept_bytes", "kept MB", MEGABYTE, 0),
)


@dataclass(frozen=True)
class Target:
    """A claim about one of our columns: against a peer, or absolute where `against` is empty."""

    what: str
    ours: str
    column: str
    against: str = ""
    limit: float | None = None
    """The largest ratio, or the largest value in seconds or bytes; None: only shown."""


TARGETS = (
    Target("durable, fresh blocks", "holdfast", "durable", "dcp", 0.42),
    Target("durable, fresh blocks", "holdfast", "durable", BEST_PEER),
    Target("durable, recycled", "holdfast_recycled", "durable", "dcp", 0.30),
    Target("durable, recycled", "holdfast_recycled", "durable", BEST_PEER),
    Target("cold load", "holdfast", "load_cold", "dcp", 0.48),
    Target("cold load", "holdfast", "load_cold", BEST_PEER, 0.8),
    Target("warm load", "holdfast", "load_warm", "dcp", 0.2),
    Target("warm load", "holdfast", "load_warm", "safetensors", 0.6),
    Target("warm load", "holdfast", "load_warm", BEST_PEER),
    Target("stall of a save", "holdfast_recycled", "stall", "dcp"),
    Target("stall of a save", "holdfast_recycled", "stall", BEST_PEER),
    Target("one tensor, cold", "holdfast", "one_cold", "", 0.020),
    Target("one tensor, cold", "holdfast", "one_cold", BEST_PEER),
    Target("extra memory, save", "holdfast", "save_extra_bytes", "", 256 * MEGABYTE),
    Target("extra memory, load", "holdfast", "load_extra_bytes", "", 256 * MEGABYTE),
    Target("durable, fresh blocks", "holdfast", "durable", "disk"),
    Target("durable, recycled", "holdfast_recycled", "durable", "disk"),
    Target("cold load", "holdfast", "load_cold", "disk"),
)


@dataclass(frozen=True)
class Finding:
    """A target and what was measured; `measured` is None where one of the two sides is missing."""

    what: str
    against: str
    limit: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None
    is_met: bool | None = None


def medians(result: Result) -> dict[str, float]:
    return {column: median(values) for column, values in result.values.items()}


def best_peer(results: Iterable[Result], column: str) -> Result | None:
    """The peer with the lowest median; one that failed anywhere is not trusted to be the best."""
    peers = [result for result in results if not result.is_ours and result.failure is None and column in result.values]
    return min(peers, key=lambda peer: median(peer.values[column]), default=None)


def find(target: Target, results: dict[str, Result], disk: Result) -> Finding:
    ours = results[target.ours].values.get(target.column, []) if target.ours in results else []
    if not target.against:
        nothing = Finding(target.what, "", target.limit, None)
        return judged(nothing, median(ours), ours) if ours else nothing
    if target.against == BEST_PEER:
        peer = best_peer(results.values(), target.column)
        name = f"{BEST_PEER} ({peer.title})" if peer else BEST_PEER
        theirs = peer.values[target.column] if peer else []
    elif target.against == "disk":
        name = disk.title
        written = "write_over" if "recycled" in target.ours else "write_fresh"
        theirs = disk.values.get("read" if target.column == "load_cold" else written, [])
    else:
        peer = results.get(target.against)
        name = peer.title if peer else target.against
        theirs = peer.values.get(target.column, []) if peer else []
    nothing = Finding(target.what, name, target.limit, None)
    if not ours or not theirs:
        return nothing
    ratios = [our / their for our, their in zip(ours, theirs, strict=False)]
    return judged(nothing, median(ours) / median(theirs), ratios)


def judged(finding: Finding, measured: float, spread: list[float]) -> Finding:
    is_met = None if finding.limit is None else measured <= finding.limit
    return Finding(finding.what, finding.against, finding.limit, measured, min(spread), max(spread), is_met)


def show_finding(finding: Finding, judge: bool) -> list[str]:
    """The cells of one line of the first table."""
    unit, suffix = 1.0, " x"
    if not finding.against:
        unit, suffix = (1e-3, " ms") if "tensor" in finding.what else (MEGABYTE, " MB")

    def number(value: float | None) -> str:
        return "" if value is None else f"{value / unit:.3g}{suffix}"

    verdict = "not measured" if finding.measured is None else ""
    if judge and finding.is_met is not None:
        verdict = "met" if finding.is_met else "MISSED"
    spread = "" if finding.low is None else f"{number(finding.low).removesuffix(suffix)} to {number(finding.high)}"
    limit = "" if finding.limit is None else f"<= {number(finding.limit)}"
    return [finding.what, finding.against, number(finding.measured), spread, limit, verdict]


def aligned(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, the first one as heading; the first column is left-aligned."""
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(rows[0]))]
    rule = ["-" * width if i == 0 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    lines = [
        " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [rows[0], rule, *rows[1:]]
    ]
    return "\n".join(f"| {line} |" for line in lines)


def table(results: Iterable[Result]) -> str:
    rows = [["median", *(column.heading for column in COLUMNS)]]
    for result in results:
        middle = medians(result)
        rows.append(
            [
                result.title + (" (failed)" if result.failure else ""),
                *(f"{middle[column.key] / column.unit:.{column.digits}f}" if column.key in middle else "-" for column in COLUMNS),
            ]
        )
    return aligned(rows)


def text(record: dict[str, Any], results: dict[str, Result], disk: Result, targets: Sequence[Target]) -> str:
    """The page on standard output: ratios first, then all medians, what failed, and what it was measured on."""
    judge = record["size"] == "full"
    findings = [find(target, results, disk) for target in targets]
    heading = ["holdfast", "against", "measured", "rounds", "target", ""]
    parts = [
        aligned([heading, *(show_finding(finding, judge) for finding in findings)]),
        table(results.values()),
    ]
    if disk.values:
        seconds = medians(disk)
        parts.append(
            "the disk alone, same bytes by direct I/O, 8 threads of 16 MiB: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in seconds.items())
        )
    failures = [result for result in (*results.values(), disk) if result.failure]
    parts.append("\n".join(f"{result.title}: FAILED, {result.failure}" for result in failures))
    if not record["cold_measured"]:
        parts.append("cold columns: not measured; dropping the page cache needs root")
    parts.append(
        f"{record['state']['tensors']} tensors, {record['state']['bytes'] / 1e9:.3f} GB, "
        f"{record['rounds']} rounds, one tensor = {record['state']['one_tensor_bytes'] / 1e6:.1f} MB; "
        "every load was compared bit by bit"
    )
    parts.append("\n".join(f"{key}: {value}" for key, value in record["machine"].items()))
    parts.append(", ".join(f"{key} {value}" for key, value in record["versions"].items()))
    return "\n\n".join(part for part in parts if part)


def as_json(record: dict[str, Any], results: dict[str, Result], disk: Result, targets: Sequence[Target]) -> dict[str, Any]:
    """`record` with every value, the medians and the findings."""
    return record | {
        "findings": [asdict(find(target, results, disk)) for target in targets],
        "results": {result.key: asdict(result) | {"medians": medians(result)} for result in (*results.values(), disk)},
    }
