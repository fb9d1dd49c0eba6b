"""Planning, index, cover proof and load plan at 1,024 to 16,384 ranks, with the shipped code and without a tensor.

`python -m bench.scale [--ranks 1024 4096 16384] [--model llama moe]` prints a table in Markdown, and leaves all values as JSON
and the growth as a picture in `bench/results/`. Parts of all ranks are made first, as files, by other processes. Then each
measurement runs in a process of its own on one core: see `scale_measure.py`. Needs 5 GB of disk, and as many open files as ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import machine
from bench.plot import OUR_COLOUR
from bench.scale_models import JOBS

RESULTS = Path(__file__).parent / "results"
RANKS = [1024, 4096, 16384]


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    title: str
    key: str
    unit: float
    form: str
    limit: float | None = None
    """The most that is accepted, at any number of ranks."""


LINES = [
    Line("tensors", "tensors", 1, ",.0f"),
    Line("state, TB", "state_bytes", 1e12, ".2f"),
    Line("chunks, million", "chunks", 1e6, ".2f"),
    Line("parts of all ranks, GB", "part_bytes", 1e9, ".2f"),
    Line("whole index, GB", "index_bytes", 1e9, ".2f"),
    Line("a rank's share of the plan, ms (worst)", "share_worst_seconds", 1e-3, ".1f", 0.5),
    Line("leader: compare all structures, ms", "leader_compare_seconds", 1e-3, ".1f"),
    Line("a rank's plan at a steady save, ms", "steady_plan_seconds", 1e-3, ".1f"),
    Line("what a rank says at a steady save, bytes", "steady_bytes_of_a_rank", 1, ".0f"),
    Line("read and check all parts, s", "gather_seconds", 1, ".2f"),
    Line("merge, content digest, s", "combine_seconds", 1, ".2f"),
    Line("prove cover, s", "prove_cover_seconds", 1, ".2f"),
    Line("write the whole index, s", "publish_part_seconds", 1, ".2f"),
    Line("look for all data files, s", "may_commit_seconds", 1, ".2f"),
    Line("write the commit record, s", "decide_seconds", 1, ".2f"),
    Line("all of the commit, s", "commit_seconds", 1, ".2f", 20),
    Line("its peak memory, GB", "commit_peak_bytes", 1e9, ".2f", 4e9),
    Line("open the step, checked, s", "open_seconds", 1, ".2f"),
    Line("its peak memory, GB", "load_peak_bytes", 1e9, ".2f"),
    Line("load plan of one rank (worst), s", "load_plan_seconds", 1, ".2f", 1),
    Line("load of the machine meanwhile", "load_average_after", 1, ".1f"),
]


def run(module: str, *arguments: str) -> dict[str, Any]:
    found = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(found.stdout)
    return result


def measure(model: str, ranks: int, directory: Path) -> dict[str, Any]:
    """All values of one job."""
    root = directory / f"scale-{model}-{ranks}-{os.getpid()}"
    found: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    try:
        for what in ("share", "commit", "load"):
            if what == "commit":
                found |= run("bench.scale_parts", model, str(ranks), str(root))
            values = run("bench.scale_measure", what, model, str(ranks), str(root))
            for name in ("peak_bytes", "mapped_bytes_at_the_end"):
                found[f"{what}_{name}"] = values.pop(name)
            found |= values
            print(f"{model} {ranks}: {what} measured, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found | {"load_average_after": os.getloadavg()[0]}


def table(title: str, results: dict[int, dict[str, Any]]) -> str:
    """One model's values in Markdown, a column for each number of ranks; in brackets the time of the processor alone."""
    rows = [["", *(f"{ranks:,} ranks" for ranks in results), "limit"], ["---", *("---:" for _ in results), "---:"]]
    for line in LINES:
        limit = "" if line.limit is None else f"{line.limit / line.unit:g}"
        cells = []
        for found in results.values():
            cell = format(found[line.key] / line.unit, line.form)
            if (busy := line.key.replace("_seconds", "_cpu_seconds")) != line.key and busy in found:
                cell += f" ({format(found[busy] / line.unit, line.form)})"
            missed = line.limit is not None and found[line.key] > line.limit
            cells.append(cell + (" MISSED" if missed else ""))
        rows.append([line.title, *cells, limit])
    return "\n".join([f"**{title}**", "", *("| " + " | ".join(row) + " |" for row in rows)])


def draw(results: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {
        "share_worst_seconds": ("one rank's share of the save plan", "s"), "load_plan_seconds": ("one rank's load plan", "s"),
        "commit_seconds": ("all of the commit, one core", "s"), "prove_cover_seconds": ("of it, the cover proof", "s"),
        "commit_peak_bytes": ("peak memory of the commit", "B"),
        "steady_bytes_of_a_rank": ("what a rank says at a steady save", "B"),
    }  # fmt: skip
    limits = {line.key: line.limit for line in LINES}
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), sharex=True, layout="constrained")
    for axis, (key, (title, unit)) in zip(axes.T.flat, shown.items(), strict=True):
        for (model, found), colour, mark in zip(results.items(), (OUR_COLOUR, "#b4532a"), "os", strict=False):
            values = [of_ranks[key] for of_ranks in found.values()]
            axis.plot(list(found), values, mark + "-", color=colour, label=JOBS[model](16384).title.split(",")[0])
            if (busy := key.replace("_seconds", "_cpu_seconds")) != key:
                axis.plot(list(found), [of_ranks[busy] for of_ranks in found.values()], mark + ":", color=colour, alpha=0.6)
        if limits.get(key) is not None:
            axis.axhline(limits[key], color="black", linewidth=1, linestyle="--")
        ticks = next(iter(results.values()))
        axis.set(xscale="log", yscale="log", title=f"{title}, {unit}")
        axis.set_xticks(list(ticks), [f"{ranks:,}" for ranks in ticks], minor=False)
        axis.set_xticks([], minor=True)
        axis.grid(True, which="major", linewidth=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        if key == "steady_bytes_of_a_rank":
            axis.set_ylim(10, 10_000)
    axes[0, 0].legend(frameon=False, loc="lower right")
    title = "Growth with the number of ranks. Dotted: the processor's time alone; dashed: the most that is accepted"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="multiples of 1,024")
    parser.add_argument("--model", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--directory", type=Path, default=RESULTS / "scratch", help="where parts and the index go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON and the picture go")
    chosen = parser.parse_args()
    if any(ranks % 1024 for ranks in chosen.ranks):
        parser.error("--ranks: multiples of 1,024")
    return chosen


def main() -> int:
    chosen = arguments()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the leader maps all parts, and an open step has all files open
    chosen.directory.mkdir(parents=True, exist_ok=True)
    results = {
        model: {ranks: measure(model, ranks, chosen.directory) for ranks in sorted(chosen.ranks)} for model in chosen.model
    }
    said = run("bench.scale_measure", "messages", "-", "0", "-")["said"]
    now = datetime.now(timezone.utc)
    record = {"date": now.isoformat(timespec="seconds"), "machine": machine.describe(chosen.directory),
              "versions": machine.versions(), "results": results, "said": said}  # fmt: skip
    for model, found in results.items():
        print(table(JOBS[model](max(found)).title, found), end="\n\n")
    steady = sorted({one["steady_bytes_of_a_rank"] for one in said})
    print(f"Steady saves of 2 to 16 ranks in threads, 10 to 1,000 tensors: each rank posts {steady[0]} to {steady[-1]} bytes.")
    path = chosen.results / f"{now:%Y-%m-%d}-scale.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    draw(results, path.with_suffix(".png"))
    print(f"\n{path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
