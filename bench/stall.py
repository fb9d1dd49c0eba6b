"""The command `python -m bench.stall`: what saving costs a training loop that goes on meanwhile.

Prints the targets and a table for each loop, and leaves all values as JSON in `bench/results/` (small ones in its `scratch/`,
where the checkpoints are written too). A method that is missing or fails is reported. No time makes the exit code 1; a
checkpoint of ours that is not what was saved does, and where nothing could be measured.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import machine, stall_report
from bench.command import RESULTS
from bench.drive import to_stderr
from bench.stall_drive import Driver, Plan
from bench.stall_loops import LOOPS
from bench.stall_methods import METHODS
from bench.state import SIZES, layout, new_segment

ROUNDS = {"full": 3, "small": 1}
SECONDS = {"full": 15.0, "small": 0.3}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.stall", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default=os.environ.get("SIZE", "full"))
    parser.add_argument("--rounds", type=int, default=os.environ.get("ROUNDS"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--seconds", type=float, help="of each loop in each turn, about")
    parser.add_argument("--directory", type=Path, help="where checkpoints go: a place on the disk to measure")
    parser.add_argument("--results", type=Path, help="where the JSON goes")
    chosen = parser.parse_args()
    chosen.rounds = int(chosen.rounds or ROUNDS[chosen.size])
    chosen.seconds = chosen.seconds or SECONDS[chosen.size]
    return chosen


def main() -> int:
    chosen = arguments()
    parent = chosen.directory or RESULTS / "scratch"
    parent.mkdir(parents=True, exist_ok=True)
    segment = new_segment(SIZES[chosen.size])
    methods = {key: METHODS[key] for key in chosen.methods}
    with tempfile.TemporaryDirectory(dir=parent, prefix="stall-", ignore_cleanup_errors=True) as place:
        plan = Plan(methods, tuple(chosen.loops), chosen.rounds, chosen.size, chosen.seconds, Path(place).resolve())
        record = describe(plan)
        driver = Driver(plan, segment, to_stderr)
        driver.run()
    stall_report.conclude(driver.results.values())
    print(stall_report.text(record, driver.results))
    results = chosen.results or (RESULTS if chosen.size == "full" else RESULTS / "scratch")
    results.mkdir(parents=True, exist_ok=True)
    name = f"{record['date'].replace(':', '').replace('-', '')}-stall-{plan.size}.json"
    (results / name).write_text(json.dumps(stall_report.as_json(record, driver.results), indent=1) + "\n")
    to_stderr(f"wrote {name}")
    measured = [result for result in driver.results.values() if result.values]
    return 1 if not measured or any(result.is_ours and stall_report.is_wrong(result) for result in measured) else 0


def describe(plan: Plan) -> dict[str, Any]:
    """All that a reader of the result needs besides the values."""
    nbytes = [4 * shape.numel() for shape, _ in layout(SIZES[plan.size])[0].values()]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": f"python -m bench.stall --size {plan.size} --rounds {plan.rounds} --methods {' '.join(plan.methods)} "
        f"--loops {' '.join(plan.loops)} --seconds {plan.seconds:g}",
        "size": plan.size,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "loops": list(plan.loops),
        "state": {"tensors": len(nbytes), "bytes": sum(nbytes)},
        "load_average": os.getloadavg()[0],
        "machine": machine.describe(plan.directory),
        "versions": machine.versions(),
    }


if __name__ == "__main__":
    sys.exit(main())
