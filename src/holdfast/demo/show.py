"""`holdfast demo`: the same training twice, once left alone and once killed at random instants, and the comparison.

Exit codes: 0 when every loss and the final state are bit-equal, 5 when anything differs, 1 when training itself failed,
2 for a usage that makes no sense.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from holdfast.demo.drive import Plan, Storm, TrainingFailed, run_storm, run_uninterrupted
from holdfast.demo.plot import NoMatplotlib, plot
from holdfast.demo.report import Report
from holdfast.demo.verdict import Verdict, judge

STEPS, KILLS, EVERY, SEED = 300, 5, 10, 0

EQUAL, FAILED, USAGE, DIFFERENT = 0, 1, 2, 5


def run_demo(
    directory: str | Path | None = None,
    steps: int = STEPS,
    kills: int = KILLS,
    seed: int = SEED,
    keep_files: bool = False,
    *,
    every: int = EVERY,
    as_json: bool = False,
) -> int:
    """Run it and tell what happens; the exit code.

    Args:
        directory: where the run, the journals and the picture go, created if absent; a new temporary one unless given.
            It must hold nothing from an earlier demo.
        steps: of training. kills: how often the process gets SIGKILL. every: steps between saves.
        seed: of the model, the data, and the aims of the kills.
        keep_files: leave the run and the journals for a look at them; otherwise only the picture stays.
        as_json: the result as one JSON object on standard output, and the lines on standard error.
    """
    if steps < 1 or kills < 0 or every < 1:
        print("holdfast demo: steps and every must be at least 1, kills at least 0", file=sys.stderr)
        return USAGE
    plan = Plan(steps=steps, kills=kills, every=every, seed=seed)
    place = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    work = place / "work"
    try:
        work.mkdir(parents=True)
    except FileExistsError:
        print(f"holdfast demo: {work} is there from an earlier demo; remove it or name another directory", file=sys.stderr)
        return USAGE
    try:
        with Report(to_stderr=as_json) as report:
            return _show(plan, place / "losses.png", work, report, as_json=as_json)
    except TrainingFailed as failure:
        print(f"holdfast demo: {failure}", file=sys.stderr)
        return FAILED
    finally:
        if not keep_files:
            shutil.rmtree(work)
            if directory is None and not any(place.iterdir()):
                place.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m holdfast.demo`, for where the `holdfast` command is not on the path."""
    parser = argparse.ArgumentParser(prog="holdfast demo", description=__doc__)
    parser.add_argument("directory", nargs="?", help="where the files go (default: a new temporary directory)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--every", type=int, default=EVERY, help="steps between saves")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--keep-files", action="store_true", help="leave the run and the journals")
    parser.add_argument("--json", action="store_true", dest="as_json", help="the result as JSON on standard output")
    return run_demo(**vars(parser.parse_args(argv)))


def _show(plan: Plan, picture: Path, work: Path, report: Report, *, as_json: bool) -> int:
    report.say(f"training a transformer for {plan.steps} steps, left alone and without checkpoints: what must come out")
    calm = run_uninterrupted(plan, work / "uninterrupted.journal", report.progress)
    report.say(f"done; the last loss is {float.fromhex(calm.losses[-1].loss):.4f}")
    report.say(f"the same training with holdfast and {plan.kills} kills (SIGKILL: nothing can be tidied up)")
    storm = run_storm(plan, work / "killed.journal", work / "run", report.say, report.progress)
    verdict = judge(calm, storm, plan.steps)
    _tell(plan, storm, verdict, report)
    try:
        plot(calm, storm, picture)
        report.say(f"picture: {picture}")
    except NoMatplotlib as missing:
        report.say(str(missing))
    if as_json:
        print(json.dumps(_as_dict(plan, storm, verdict, report.seconds), indent=2))
    return DIFFERENT if verdict.differences else EQUAL


def _tell(plan: Plan, storm: Storm, verdict: Verdict, report: Report) -> None:
    inside = sum(kill.cut_save is not None for kill in storm.kills)
    report.say(f"finished; kills: {len(storm.kills)} of {plan.kills} planned, {inside} of them inside a save")
    if not verdict.differences:
        report.say(
            f"bit-equal: {verdict.compared} losses of {plan.steps} steps ({verdict.repeated} done again), "
            "and the final state by its digest"
        )
    for difference in verdict.differences[:10]:
        report.say(f"they differ: {difference}")
    if len(verdict.differences) > 10:
        report.say(f"they differ: {len(verdict.differences) - 10} more")


def _as_dict(plan: Plan, storm: Storm, verdict: Verdict, seconds: float) -> dict[str, object]:
    return {
        "plan": asdict(plan),
        "kills": [asdict(kill) for kill in storm.kills],
        "resumed": [step for step, _ in storm.story.starts[1:]],
        "losses_compared": verdict.compared,
        "steps_repeated": verdict.repeated,
        "differences": verdict.differences,
        "final_digest": storm.story.digest,
        "seconds": round(seconds, 1),
    }
