"""What comes out of `bench.stall`: targets, a table for each loop, memory and correctness, and everything as JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.drive import Result
from bench.report import BEST_PEER, Target, aligned, find, medians
from bench.stall_drive import Measured
from bench.stall_loops import LOOPS


@dataclass(frozen=True)
class Column:
    key: str
    heading: str
    unit: float
    digits: int


COLUMNS = (
    Column("call", "call ms", 1e-3, 2),
    Column("barrier", "barrier ms", 1e-3, 1),
    Column("extra", "first update + ms", 1e-3, 1),
    Column("blocked", "blocked ms", 1e-3, 1),
    Column("lost", "lost s", 1, 3),
    Column("durable", "durable s", 1, 2),
)
CALL, CALL_WORST = "call", "call_p99"
"""Columns over all loops: medians of the rounds, and the 99th percentile of all calls."""

TARGETS = (
    Target("call returns, s", "holdfast", CALL, "", 0.005),
    Target("call returns, p99, s", "holdfast", CALL_WORST, "", 0.020),
    Target("call returns", "holdfast", CALL, "dcp", 1 / 300),
    Target("interval: blocked in all, s", "holdfast", "interval.blocked", "", 0.030),
    Target("interval: blocked in all", "holdfast", "interval.blocked", BEST_PEER, 1 / 8),
    Target("compute: cost of a checkpoint", "holdfast", "compute.lost", BEST_PEER, 0.25),
    Target("launch: cost of a checkpoint", "holdfast", "launch.lost", BEST_PEER, 0.5),
    Target("compute: blocked in all", "holdfast", "compute.blocked", BEST_PEER),
    Target("launch: blocked in all", "holdfast", "launch.blocked", BEST_PEER),
    Target("compute: durable, s", "holdfast", "compute.durable", "", 0.75),
    Target("launch: durable, s", "holdfast", "launch.durable", "", 0.75),
    Target("interval: durable, s", "holdfast", "interval.durable", "", 0.75),
)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that `part` of all do not exceed: with fewer than a hundred, the 99th is the largest."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


def conclude(results: Iterable[Measured]) -> None:
    """Add the columns that are over all loops."""
    for result in results:
        calls = result.pooled("call")
        if calls:
            result.values[CALL] = [median(calls)]
            result.values[CALL_WORST] = [percentile(calls, 0.99)]


def loop_table(loop: str, results: Iterable[Measured]) -> str:
    """Medians over the rounds, and beside the cost the range of the rounds."""
    rows = [[loop, *(column.heading for column in COLUMNS), "lost, rounds", "updates", "late", "others"]]
    for result in results:
        found = {name.removeprefix(f"{loop}."): value for name, value in medians(result).items() if name.startswith(f"{loop}.")}
        if not found:
            continue
        lost, late = result.values[f"{loop}.lost"], result.samples[f"{loop}.late"]
        cells = [f"{found[column.key] / column.unit:.{column.digits}f}" for column in COLUMNS]
        cells += [f"{min(lost):.2f} to {max(lost):.2f}", f"{found['updates']:.0f}"]
        cells += [f"{sum(late):.0f} of {len(late)}", f"{found['others']:.2f}"]
        rows.append([result.title + (" (failed)" if result.failure else ""), *cells])
    return f"{LOOPS[loop].title}:\n\n" + aligned(rows)


def whole_table(results: Iterable[Measured], tensors: int) -> str:
    """Calls over all loops, memory, and whether what is stored is what was saved."""
    headings = ["all loops", "call ms", "p99 ms", "calls", "extra save MB", "kept MB", "tensors wrong", "wrong in overlap"]
    rows = [headings]
    for result in results:
        calls = result.pooled("call")
        if not calls:
            continue
        wrong = [max(values) for name, values in result.values.items() if name.endswith(".wrong")]
        cells = [f"{1e3 * median(calls):.2f}", f"{1e3 * percentile(calls, 0.99):.2f}", f"{len(calls)}"]
        memory = (result.values.get(column) for column in ("save_extra_bytes", "kept_bytes"))
        cells += [f"{median(values) / 1e6:.0f}" if values else "-" for values in memory]
        rows.append([result.title, *cells, f"{max(wrong):.0f} of {tensors}", overlap_cell(result)])
    return aligned(rows)


def overlap_cell(result: Measured) -> str:
    """Tensors wrong in the first and in the second of two overlapping saves: the worst of the rounds."""
    if result.overlap_failure is not None:
        return "FAILED"
    if "overlap.first_wrong" not in result.values:
        return "-"
    first = f"{max(result.values['overlap.first_wrong']):.0f}"
    if not any(result.values["overlap.is_overlapping"]):
        return f"{first}, no overlap"
    second = result.values.get("overlap.second_wrong")
    return f"{first} and {max(second):.0f}" if second else f"{first}, second declined"


def is_wrong(result: Measured) -> bool:
    """Whether any checkpoint that was loaded differed from the state at its call, or could not be loaded."""
    counts = [count for name, values in result.values.items() if name.endswith("wrong") for count in values]
    return any(counts) or result.overlap_failure is not None


def target_row(target: Target, results: dict[str, Measured], judge: bool) -> list[str]:
    finding = find(target, dict(results), Result("disk", "the disk alone"))
    suffix = " x" if target.against else " s"

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}{suffix}"

    verdict = "not measured" if finding.measured is None else ""
    if judge and finding.is_met is not None:
        verdict = "met" if finding.is_met else "MISSED"
    limit = "" if finding.limit is None else f"<= {number(finding.limit)}"
    return [finding.what.removesuffix(", s"), finding.against, number(finding.measured), limit, verdict]


def text(record: dict[str, Any], results: dict[str, Measured]) -> str:
    """The page on standard output. No time makes the command fail."""
    judge = record["size"] == "full"
    heading = ["holdfast", "against", "measured", "target", ""]
    measured = list(results.values())
    state = record["state"]
    parts = [
        aligned([heading, *(target_row(target, results, judge) for target in TARGETS)]),
        *(loop_table(loop, measured) for loop in record["loops"]),
        whole_table(measured, state["tensors"]),
        "\n".join(f"{result.title}: FAILED, {result.failure}" for result in measured if result.failure),
        "\n".join(f"{result.title}, in overlap: {result.overlap_failure}" for result in measured if result.overlap_failure),
        f"{state['tensors']} tensors, {state['bytes'] / 1e9:.3f} GB, {record['rounds']} rounds",
        "\n".join(f"{key}: {value}" for key, value in record["machine"].items()),
        ", ".join(f"{key} {value}" for key, value in record["versions"].items()),
    ]
    return "\n\n".join(part for part in parts if part)


def as_json(record: dict[str, Any], results: dict[str, Measured]) -> dict[str, Any]:
    """`record` with every value, the medians and the findings."""
    findings = [asdict(find(target, dict(results), Result("disk", "the disk alone"))) for target in TARGETS]
    return record | {
        "findings": findings,
        "results": {key: asdict(result) | {"medians": medians(result)} for key, result in results.items()},
    }
