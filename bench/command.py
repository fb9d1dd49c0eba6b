"""What the commands have in common: `run` measures some methods, and reports.

Prints the tables and leaves all values as JSON, and a picture, in `bench/results/` (small ones in its `scratch/`, where
the checkpoints are written too). A method that is missing or fails is reported; the exit code is 1 only where nothing
could be measured.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import machine, measure, plot, report
from bench.drive import Driver, Plan, to_stderr
from bench.methods import Method
from bench.state import SIZES, layout, new_segment, probe

RESULTS = Path(__file__).parent / "results"
ROUNDS = {"full": 9, "small": 1}


def arguments(program: str, methods: Sequence[str]) -> argparse.Namespace:
    size = os.environ.get("SIZE", "full")
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default=size)
    parser.add_argument("--rounds", type=int, default=os.environ.get("ROUNDS"))
    parser.add_argument("--methods", nargs="+", choices=methods, default=list(methods))
    parser.add_argument("--directory", type=Path, help="where checkpoints go: a place on the disk to measure")
    parser.add_argument("--results", type=Path, help="where the JSON and the picture go")
    chosen = parser.parse_args()
    chosen.rounds = int(chosen.rounds or ROUNDS[chosen.size])
    return chosen


def run(program: str, methods: Mapping[str, type[Method]], targets: Sequence[report.Target]) -> int:
    """The whole of `python -m PROGRAM`; returns the exit code."""
    chosen = arguments(program, list(methods))
    parent = chosen.directory or RESULTS / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    segment = new_segment(SIZES[chosen.size])
    with tempfile.TemporaryDirectory(dir=parent, prefix="run-", ignore_cleanup_errors=True) as place:
        plan = Plan({key: methods[key] for key in chosen.methods}, chosen.rounds, chosen.size, Path(place).resolve())
        record = describe(program, plan)
        driver = Driver(plan, segment, to_stderr)
        driver.run()
    print(report.text(record, driver.results, driver.disk, targets))
    results = chosen.results or (RESULTS if chosen.size == "full" else RESULTS / "scratch")
    results.mkdir(parents=True, exist_ok=True)
    kind = f"{program.removeprefix('bench').removeprefix('.')}-{plan.size}".removeprefix("-")
    name = f"{record['date'].replace(':', '').replace('-', '')}-{kind}"
    found = report.as_json(record, driver.results, driver.disk, targets)
    (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    plot.draw(driver.results, results / f"{name}.png")
    to_stderr(f"wrote {name}.json and {name}.png")
    return 0 if any(result.values for result in driver.results.values()) else 1


def describe(program: str, plan: Plan) -> dict[str, Any]:
    """All that a reader of the result needs besides the values."""
    size = SIZES[plan.size]
    nbytes = {name: 4 * shape.numel() for name, (shape, _) in layout(size)[0].items()}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": f"SIZE={plan.size} ROUNDS={plan.rounds} python -m {program} --methods {' '.join(plan.methods)}",
        "size": plan.size,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "state": {
            "tensors": len(nbytes),
            "bytes": sum(nbytes.values()),
            "one_tensor": probe(size),
            "one_tensor_bytes": nbytes[probe(size)],
        },
        "cold_measured": measure.can_drop_caches(),
        "load_average": os.getloadavg()[0],
        "machine": machine.describe(plan.directory),
        "versions": machine.versions(),
    }
