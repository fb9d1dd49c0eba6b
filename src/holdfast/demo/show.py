"""`holdfast demo`: trainings that are killed at random instants, and the proof that nothing was lost and nothing changed.

The first part is one process, compared bit by bit with one left alone. In the second, several ranks train one model, and after
each kill other numbers of ranks go on under another layout.

Exit codes: 0 when all is equal that must be, 5 when anything differs, 1 when training itself failed, 2 for a usage that makes
no sense.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.demo.drive import Plan, Storm, TrainingFailed, run_both
from holdfast.demo.hops import verdict as hops
from holdfast.demo.hops.drive import Journey, Leg, travel
from holdfast.demo.hops.layout import LAYOUTS, Layout
from holdfast.demo.hops.words import curve
from holdfast.demo.job import tidy_end
from holdfast.demo.journal import Story
from holdfast.demo.plot import NoMatplotlib, plot
from holdfast.demo.report import Report
from holdfast.demo.verdict import Verdict, judge

STEPS, KILLS, EVERY, SEED = 120, 3, 10, 0
LAYOUT_STEPS, LAYOUT_EVERY = 60, 4

EQUAL, FAILED, USAGE, DIFFERENT = 0, 1, 2, 5

PARTS = ("one", "layouts")


def run_demo(
    directory: str | Path | None = None,
    steps: int = STEPS,
    kills: int = KILLS,
    seed: int = SEED,
    keep_files: bool = False,
    *,
    every: int = EVERY,
    as_json: bool = False,
    parts: Sequence[str] = PARTS,
    layouts: Sequence[Layout] = LAYOUTS,
    layout_steps: int = LAYOUT_STEPS,
) -> int:
    """Run it and tell what happens; the exit code.

    Args:
        directory: where the runs, the journals and the picture go, created if absent; a new temporary one unless given.
            It must hold nothing from an earlier demo.
        steps: of the first part's training. kills: how often its process gets SIGKILL. every: steps between its saves.
        seed: of the models, the data, and the aims of the kills.
        keep_files: leave the runs and the journals for a look at them; otherwise only the picture stays.
        as_json: the result as one JSON object on standard output, and the lines on standard error.
        parts: `one`, `layouts` or both. layouts: what the second part goes through. layout_steps: of its training.
    """
    if steps < 1 or kills < 0 or every < 1:
        print("holdfast demo: steps and every must be at least 1, kills at least 0", file=sys.stderr)
        return USAGE
    place = Path(directory) if directory is not None else Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    work = place / "work"
    try:
        work.mkdir(parents=True)
    except FileExistsError:
        print(f"holdfast demo: {work} is there from an earlier demo; remove it or name another directory", file=sys.stderr)
        return USAGE
    try:
        with tidy_end(), Report(to_stderr=as_json) as report:
            one = _one(Plan(steps, kills, every, seed), work, report) if "one" in parts else None
            plan = Plan(layout_steps, len(layouts) - 1, LAYOUT_EVERY, seed)
            many = _layouts(plan, layouts, work / "layouts", report) if "layouts" in parts else None
            return _end(one, many, place / "losses.png", report, as_json=as_json)
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
    parser.add_argument("--steps", type=int, default=STEPS, help="of the first part")
    parser.add_argument("--kills", type=int, default=KILLS, help="of the first part")
    parser.add_argument("--every", type=int, default=EVERY, help="steps between saves, of the first part")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--part", choices=PARTS, action="append", dest="parts", help="run only this part")
    parser.add_argument("--keep-files", action="store_true", help="leave the runs and the journals")
    parser.add_argument("--json", action="store_true", dest="as_json", help="the result as JSON on standard output")
    asked = vars(parser.parse_args(argv))
    return run_demo(**{**asked, "parts": asked["parts"] or PARTS})


@dataclass(frozen=True)
class One:
    """What the first part has shown."""

    plan: Plan
    calm: Story
    storm: Storm
    verdict: Verdict


@dataclass(frozen=True)
class Many:
    """What the second part has shown."""

    journey: Journey
    verdict: hops.Verdict


def _one(plan: Plan, work: Path, report: Report) -> One:
    report.title("One process: it is killed again and again, and must end bit-equal to one left alone")
    report.say(f"a transformer of {plan.steps} steps; beside it the same one with holdfast and {plan.kills} kills (SIGKILL)")
    calm, storm = run_both(plan, work, report.say, report.progress)
    verdict = judge(calm, storm, plan.steps)
    inside = sum(kill.cut_save is not None for kill in storm.kills)
    report.say(f"finished; kills: {len(storm.kills)} of {plan.kills} planned, {inside} of them inside a save")
    if not verdict.differences:
        report.say(
            f"bit-equal: {verdict.compared} losses of {plan.steps} steps ({verdict.repeated} done again), "
            "and the final state by its digest"
        )
    _tell(verdict.differences, report)
    return One(plan, calm, storm, verdict)


def _layouts(plan: Plan, layouts: Sequence[Layout], work: Path, report: Report) -> Many:
    numbers = ", ".join(str(layout.ranks) for layout in layouts)
    report.title(f"Many ranks: one training on {numbers} ranks in turn, all of them killed in between")
    journey = travel(plan, layouts, work, report.say, report.detail, report.progress)
    verdict = hops.judge(journey, len(layouts))
    report.say(f"finished {plan.steps} steps, {verdict.repeated} of them done again")
    for line in curve(hops.losses_of(journey.story.losses), journey.ranks):
        report.detail(line)
    if not verdict.differences:
        report.say(f"state: bit-equal at each of {len(journey.legs) - 1} hops, all {verdict.tensors} tensors and all values")
        report.say(f"data: {verdict.samples} samples, those of one process in the same order; none lost, none repeated")
        report.say(
            f"loss: that of one process left alone, within {verdict.farthest:.0e} of it ({hops.TOLERANCE:.0e} is allowed: "
            "other layouts add the same numbers in another order)"
        )
    _tell(verdict.differences, report)
    return Many(journey, verdict)


def _tell(differences: Sequence[str], report: Report) -> None:
    for difference in differences[:10]:
        report.say(f"they differ: {difference}")
    if len(differences) > 10:
        report.say(f"they differ: {len(differences) - 10} more")


def _end(one: One | None, many: Many | None, picture: Path, report: Report, *, as_json: bool) -> int:
    try:
        plot(picture, (one.calm, one.storm) if one else None, many.journey if many else None)
        report.say(f"picture: {picture}")
    except NoMatplotlib as missing:
        report.say(str(missing))
    differences = [*(one.verdict.differences if one else ()), *(many.verdict.differences if many else ())]
    killed = len(one.storm.kills if one else ()) + len([leg for leg in (many.journey.legs if many else ()) if leg.kill])
    report.title("Verdict")
    if differences:
        report.say(f"they differ, in {len(differences)} ways")
    else:
        report.say(f"killed {killed} times, all equal: nothing that was committed is lost, and nothing changed on the way")
    if as_json:
        result = {
            "equal": not differences,
            "one_process": _one_as_dict(one) if one else None,
            "layouts": _many_as_dict(many) if many else None,
            "seconds": round(report.seconds, 1),
        }
        print(json.dumps(result, indent=2))
    return DIFFERENT if differences else EQUAL


def _one_as_dict(one: One) -> dict[str, object]:
    return {
        "plan": asdict(one.plan),
        "kills": [asdict(kill) for kill in one.storm.kills],
        "resumed": [step for step, _ in one.storm.story.starts[1:]],
        "losses_compared": one.verdict.compared,
        "steps_repeated": one.verdict.repeated,
        "differences": one.verdict.differences,
        "final_digest": one.storm.story.digest,
    }


def _many_as_dict(many: Many) -> dict[str, object]:
    return {
        "plan": asdict(many.journey.plan),
        "legs": [
            {
                "layout": {**asdict(leg.layout), "ranks": leg.layout.ranks},
                "start": leg.start,
                "kill": asdict(leg.kill) if leg.kill else None,
                "digests": _digests(leg),
            }
            for leg in many.journey.legs
        ],
        "losses": hops.losses_of(many.journey.story.losses),
        "losses_of_one_process": hops.losses_of(many.journey.alone.losses),
        "farthest_loss": many.verdict.farthest,
        "tolerance": hops.TOLERANCE,
        "samples": many.verdict.samples,
        "steps_repeated": many.verdict.repeated,
        "differences": many.verdict.differences,
    }


def _digests(leg: Leg) -> dict[str, list[str | None]] | None:
    """For each tensor, as stored and as resumed."""
    if leg.before is None or leg.after is None:
        return None
    names = sorted({*leg.before.tensors, *leg.after.tensors})
    return {name: [leg.before.tensors.get(name), leg.after.tensors.get(name)] for name in names}
