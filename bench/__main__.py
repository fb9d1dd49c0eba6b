"""The command: `python -m bench`, with SIZE=full|small and ROUNDS=n in the environment.

Prints the table and leaves all values as JSON, and a picture, in `bench/results/` (small ones in its `scratch/`, where
the checkpoints are written too). A method that is missing or fails is reported; the exit code is 1 only where nothing
could be measured.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import machine, measure, plot, report
from bench.drive import Driver, Plan, to_stderr
from bench.methods import METHODS
from bench.state import SIZES, layout, new_segment, probe

RESULTS = Path(__file__).parent / "results"
ROUNDS = {"full": 9, "small": 1}


def arguments() -> argparse.Namespace:
    size = os.environ.get("SIZE", "full")
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default=size)
    parser.add_argument("--rounds", type=int, default=os.environ.get("ROUNDS"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--directory", type=Path, help="where checkpoints go: a place on the disk to measure")
    parser.add_argument("--results", type=Path, help="where the JSON and the picture go")
    chosen = parser.parse_args()
    chosen.rounds = int(chosen.rounds or ROUNDS[chosen.size])
    return chosen


def main() -> int:
    chosen = arguments()
    parent = chosen.directory or RESULTS / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    segment = new_segment(SIZES[chosen.size])
    with tempfile.TemporaryDirectory(dir=parent, prefix="run-", ignore_cleanup_errors=True) as place:
        plan = Plan(tuple(chosen.methods), chosen.rounds, chosen.size, Path(place).resolve())
        record = describe(plan)
        driver = Driver(plan, segment, to_stderr)
        driver.run()
    print(report.text(record, driver.results, driver.disk))
    results = chosen.results or (RESULTS if chosen.size == "full" else RESULTS / "scratch")
    results.mkdir(parents=True, exist_ok=True)
    name = f"{record['date'].replace(':', '').replace('-', '')}-{plan.size}"
    found = report.as_json(record, driver.results, driver.disk)
    (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    plot.draw(driver.results, results / f"{name}.png")
    to_stderr(f"wrote {name}.json and {name}.png")
    return 0 if any(result.values for result in driver.results.values()) else 1


def describe(plan: Plan) -> dict[str, Any]:
    """All that a reader of the result needs besides the values."""
    size = SIZES[plan.size]
    nbytes = {name: 4 * shape.numel() for name, (shape, _) in layout(size)[0].items()}
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": f"SIZE={plan.size} ROUNDS={plan.rounds} python -m bench --methods {' '.join(plan.methods)}",
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
        "machine": machine.describe(plan.directory),
        "versions": machine.versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
