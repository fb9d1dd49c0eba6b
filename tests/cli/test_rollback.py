"""`holdfast rollback`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import holdfast
from holdfast.run.session import Session
from holdfast.store.local import LocalStore


def test_the_step_is_what_resumes_and_later_ones_stay_readable(command, run: Path) -> None:
    ended = command("rollback", f"{run}@10", "--json")
    assert ended.code == 0
    assert ended.json == {"run": str(run), "step": 10, "attempt": 2, "abandoned": [20, 30], "skipped_samples": []}
    assert holdfast.Run(run).latest().step == 10
    assert holdfast.load(f"{run}@30")["progress"]["samples"] == 240


def test_the_step_may_stand_beside_the_run_and_may_be_a_pin(command, run: Path) -> None:
    holdfast.Run(run).pin(20, "good")
    for step in ("20", "good"):
        assert command("rollback", run, step).out.startswith(f"{run} resumes from step 20")


def test_samples_to_skip_are_recorded_for_the_data_loader(command, run: Path) -> None:
    ended = command("rollback", f"{run}@20", "--skip-samples", "160:200", "--skip-samples", "300:310")
    assert ended.code == 0
    assert "samples 160 to 199" in ended.out
    attempt = json.loads((run / "attempts" / "0002.json").read_text())
    assert attempt["skipped_samples"] == [[160, 200], [300, 310]]


@pytest.mark.parametrize(
    "words", [["{run}"], ["{run}@10", "10"], ["{run}", "10", "--skip-samples", "9:3"], ["{run}", "10", "--skip-samples", "9"]]
)
def test_an_unclear_wish_is_a_usage_error_and_changes_nothing(command, run: Path, words) -> None:
    ended = command("rollback", *(word.format(run=run) for word in words))
    assert ended.code == 2
    assert holdfast.Run(run).latest().step == 30


def test_an_unknown_step_is_named_with_those_there_are(command, run: Path) -> None:
    ended = command("rollback", f"{run}@15")
    assert ended.code == 3
    assert "has no step 15; it has 10, 20, 30" in ended.err


def test_a_job_that_still_writes_is_stopped(command, run: Path) -> None:
    job = Session(LocalStore(run), {})
    assert command("rollback", f"{run}@20").code == 0
    with pytest.raises(holdfast.Superseded):
        job.check_newest()
