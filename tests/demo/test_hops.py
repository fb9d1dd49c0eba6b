"""The demo's second part does what it says, with real ranks and kills; and each of its checks is shown a fault."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.demo import run_demo
from holdfast.demo.drive import Kill, Plan
from holdfast.demo.hops.drive import Journey, Leg, Samples
from holdfast.demo.hops.layout import BATCH, LAYOUTS, ONE, SAMPLES, Layout
from holdfast.demo.hops.stored import Stored, differences, look
from holdfast.demo.hops.verdict import judge
from holdfast.demo.hops.words import curve, pieces, shown
from holdfast.demo.job import Job
from holdfast.demo.journal import Loss, Story, samples_of
from holdfast.demo.journal import Samples as Writer
from holdfast.demo.plot import plot

TWO_BY_TWO, THREE = LAYOUTS[0], LAYOUTS[-1]


@pytest.mark.slow
def test_a_training_goes_on_bit_equal_under_another_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"parts": ["layouts"], "layouts": [TWO_BY_TWO, ONE], "layout_steps": 16}
    assert run_demo(tmp_path, keep_files=True, as_json=True, **options) == 0  # type: ignore[arg-type]
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["equal"]
    assert result["one_process"] is None
    first, second = result["layouts"]["legs"]
    assert first["digests"] is None
    assert first["kill"]["committed"] == second["start"] > 0
    assert len(second["digests"]) > 50
    assert all(before == after for before, after in second["digests"].values())
    assert sorted(map(int, result["layouts"]["losses"])) == list(range(1, 17))
    assert result["layouts"]["farthest_loss"] < result["layouts"]["tolerance"]
    assert told.err.count("killed all 4 ranks at step") == 1
    assert "4 of 32x32 -> whole 64x64" in told.err
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_a_job_is_killed_with_processes_that_left_its_session(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', %r], start_new_session=True); %s"
    sleeper = f"open({str(tmp_path / 'there')!r}, 'w').close(); import time; time.sleep(60)"
    job = Job([sys.executable, "-c", code % (sleeper, "time.sleep(60)")], tmp_path / "log")
    try:
        end = time.monotonic() + 30
        while not (tmp_path / "there").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert len(job._all()) == 2
    finally:
        job.kill()
    assert job._all() == []
    assert job.exit_code() == -9


def test_a_job_that_has_ended_can_be_killed(tmp_path: Path) -> None:
    job = Job([sys.executable, "-c", ""], tmp_path / "log")
    assert job.wait() == 0
    job.kill()


def test_sigterm_ends_the_demo_with_its_jobs(tmp_path: Path) -> None:
    code = """
import pathlib, sys
from holdfast.demo.job import Job, tidy_end
with tidy_end():
    job = Job([sys.executable, "-c", "import time; time.sleep(60)"], pathlib.Path(sys.argv[1]))
    try:
        print(job._all()[0], flush=True)
        job.wait()
    finally:
        job.kill()
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        inner = int(demo.stdout.readline())
        demo.terminate()
        assert demo.wait(30) == 143
    assert not Path(f"/proc/{inner}").exists()


# --- the verdict ------------------------------------------------------------------------------------------------------

STEPS = 2


def stored(step: int = 1, **changed: str) -> Stored:
    return Stored(step, {"model.w": "a", "optimizer.m": "b", **changed}, {"data.position": "c"}, {"model.w": [(2, 2)]})


def order() -> Samples:
    return {step: list(range(BATCH * (step - 1), BATCH * step)) for step in range(1, STEPS + 1)}


def split(samples: Samples, layout: Layout) -> list[Samples]:
    """What each rank of a layout reads of it."""
    share = BATCH // layout.data
    return [
        {step: read[rank // layout.tensor * share :][:share] for step, read in samples.items()} for rank in range(layout.ranks)
    ]


def journey(**changes: object) -> Journey:
    """One step on 4 ranks, killed, one on 3: as it must be, but for the changes to the second leg."""
    losses = [Loss(step, (3.0 - step).hex(), 100.0 + step) for step in (1, 2)]
    alone = Story([(0, 100.0)], list(losses), "-", STEPS)
    first = Leg(TWO_BY_TWO, 0, range(1), split(order(), TWO_BY_TWO), kill=Kill(1, 101.5, None, 1))
    second = Leg(THREE, 1, range(1, 2), split(order(), THREE), stored(), stored())
    second = dataclasses.replace(second, **changes)  # type: ignore[arg-type]
    return Journey(Plan(STEPS, 1, 1, 0), Story([(0, 100.0), (1, 102.0)], losses, "-", STEPS), alone, order(), [first, second])


def only(journey: Journey, legs: int = 2) -> str:
    (line,) = judge(journey, legs).differences
    return line


def test_a_journey_as_it_must_be_has_no_differences() -> None:
    verdict = judge(journey(), 2)
    assert verdict.differences == ()
    assert (verdict.tensors, verdict.samples, verdict.repeated) == (2, 2 * BATCH, 0)


def test_another_digest_after_a_hop_is_a_difference() -> None:
    assert "optimizer.m was b as stored, and is B as resumed" in only(journey(after=stored(**{"optimizer.m": "B"})))


def test_a_tensor_that_is_lost_or_new_is_a_difference() -> None:
    less = dataclasses.replace(stored(), tensors={"model.w": "a"})
    assert "not there as resumed" in only(journey(after=less))
    assert "not there as stored" in only(journey(before=less))


def test_a_value_that_changed_is_a_difference() -> None:
    assert "data.position" in only(journey(after=dataclasses.replace(stored(), values={"data.position": "d"})))


def test_a_committed_step_that_was_not_resumed_is_a_difference() -> None:
    assert only(journey(start=0, after=None)).startswith("step 1 was committed")


def test_a_sample_lost_swapped_or_read_twice_is_a_difference() -> None:
    for wrong in ({2: list(range(13, 25))}, {2: [13, 12, *range(14, 24)]}, {2: [12, 12, *range(14, 24)]}):
        assert (
            only(journey(samples=split(wrong, THREE)))
            == "step 2: 3 ranks (FSDP2) read other samples than the uninterrupted training"
        )


def test_a_rank_that_read_nothing_is_a_difference() -> None:
    assert "read [" in only(journey(samples=[*split(order(), THREE)[:2], {}]))


def test_ranks_of_one_sample_that_read_two_are_a_difference() -> None:
    ranks = split(order(), TWO_BY_TWO)
    ranks[1] = ranks[2]
    assert "share samples" in only(journey(layout=TWO_BY_TWO, samples=ranks))


def test_a_loss_far_off_or_not_a_number_or_missing_is_a_difference() -> None:
    for loss in (1.01, float("nan")):
        wrong = journey()
        wrong.story.losses[1] = Loss(2, loss.hex(), 0.0)
        assert only(wrong).startswith("step 2: the loss is off")
    wrong = journey(losses=range(0))
    wrong.story.losses.pop()
    assert only(wrong) == "no layout has a loss for step 2"


def test_an_order_that_reads_a_sample_twice_is_a_difference() -> None:
    wrong = journey()
    plan = dataclasses.replace(wrong.plan, steps=SAMPLES // BATCH)
    wrong.alone_samples.update({step: [0] * BATCH for step in range(3, plan.steps + 1)})
    lines = judge(dataclasses.replace(wrong, plan=plan), 2).differences
    assert "epoch 0 of the uninterrupted training has not every sample once" in lines


def test_a_layout_that_was_never_reached_is_a_difference() -> None:
    assert only(journey(), 3) == "training ended under layout 2 of 3"


# --- its parts --------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_looked_at_by_name(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    for step, number in ((1, 4), (2, 5)):
        holdfast.save(tmp_path, {"w": weight, "tied": weight, "n": number}, step)
    one, two = look(tmp_path, 1), look(tmp_path, 2)
    assert one.tensors == two.tensors
    assert one.pieces == {"tied": [(2, 3)], "w": [(2, 3)]}
    assert one.digest != two.digest
    (line,) = differences(one, two)
    assert line.startswith("n was ")


def test_pieces_and_digests_in_words() -> None:
    assert pieces([(4, 2), (4, 2)]) == "2 of 4x2"
    assert pieces([(4, 2), (3, 2)]) == "4x2 3x2"
    assert pieces([()]) == "whole scalar"
    assert shown(None, None) == []
    assert "differs from" in shown(stored(), stored(**{"model.w": "x"}))[-1]


def test_the_curve_has_a_bar_for_each_step_and_the_ranks_below() -> None:
    bars, ranks = curve({1: 4.0, 2: 3.0, 3: 2.0}, {1: 4, 2: 4, 3: 1})
    assert bars == "loss   █▅▁  4.00 -> 2.00"
    assert ranks == "ranks  441"
    assert len(curve(dict.fromkeys(range(1, 1000), 1.0), dict.fromkeys(range(1, 1000), 1))[1]) == len("ranks  ") + 64
    assert curve({}, {}) == []


def test_samples_are_read_back_but_for_a_line_that_was_cut(tmp_path: Path) -> None:
    with Writer(tmp_path / "new" / "rank0") as samples:
        samples.read(3, [7, 8])
    with (tmp_path / "new" / "rank0").open("a") as file:
        file.write("4 9")
    assert samples_of(tmp_path / "new" / "rank0") == {3: [7, 8]}
    assert samples_of(tmp_path / "absent") == {}


def test_every_layout_divides_the_batch() -> None:
    assert all(BATCH % layout.data == 0 for layout in LAYOUTS)
    assert [layout.ranks for layout in LAYOUTS] == [4, 2, 1, 3]


def test_the_picture_shows_a_journey(tmp_path: Path) -> None:
    plot(tmp_path / "losses.png", None, journey())
    assert (tmp_path / "losses.png").stat().st_size > 10_000
