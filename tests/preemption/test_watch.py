"""What counts as a wish to stop: a file, a deadline of the user's or the launcher's; and how long is left."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import holdfast
from holdfast import Preemption
from holdfast.preemption import watch as watch_module
from holdfast.preemption.watch import Watch

HOUR = 3600.0


def left(preemption: Preemption) -> float | None:
    watch = Watch(preemption)
    watch.close()
    return watch.seconds_left()


def wanted(preemption: Preemption) -> str:
    watch = Watch(preemption)
    watch.close()
    return watch.wanted()


def test_a_file_that_exists_means_stop_and_sets_no_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_FILE_SECONDS", 0.0)
    path = tmp_path / "stop"
    watch = Watch(Preemption(file=path))
    watch.close()
    assert watch.wanted() == ""
    path.touch()
    assert watch.wanted() == f"the file {path}"
    path.unlink()
    assert watch.wanted() == f"the file {path}", "a wish is not taken back"
    assert watch.seconds_left() is None


def test_the_file_is_looked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = [100.0], []
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch_module.os.path, "exists", lambda path: bool(looks.append(path)))
    watch = Watch(Preemption(file=tmp_path / "stop"))
    watch.close()
    for _ in range(100):
        watch.wanted()
        clock[0] += 0.1
    assert 15 <= len(looks) <= 21


def test_without_a_word_there_is_no_deadline() -> None:
    assert left(Preemption()) is None


def test_a_deadline_in_unix_seconds() -> None:
    found = left(Preemption(deadline=time.time() + HOUR))
    assert found is not None
    assert HOUR - 60 < found <= HOUR
    assert wanted(Preemption(deadline=time.time() + HOUR)) == ""


def test_a_deadline_from_the_start_of_the_process() -> None:
    """This process runs for less than a day, and has begun before now."""
    found = left(Preemption(deadline="2d"))
    assert found is not None
    assert 24 * HOUR < found < 48 * HOUR
    assert left(Preemption(deadline=0.001)) == 0


def test_a_deadline_from_the_start_of_the_job_as_slurm_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(int(time.time() - 5 * HOUR)))
    found = left(Preemption(deadline="6h"))
    assert found is not None
    assert HOUR - 60 < found <= HOUR


@pytest.mark.parametrize("name", ["HOLDFAST_DEADLINE", "SLURM_JOB_END_TIME"])
def test_the_launcher_says_when_the_job_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, str(int(time.time() + HOUR)))
    found = left(Preemption())
    assert found is not None
    assert HOUR - 60 < found <= HOUR


def test_of_several_deadlines_the_earliest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, hours in (("HOLDFAST_DEADLINE", 2), ("SLURM_JOB_END_TIME", 3)):
        monkeypatch.setenv(name, str(time.time() + hours * HOUR))
    for hours, earliest in ((1, 1), (4, 2)):
        found = left(Preemption(deadline=time.time() + hours * HOUR))
        assert found is not None
        assert earliest * HOUR - 60 < found <= earliest * HOUR


def test_the_job_stops_a_window_before_its_deadline() -> None:
    assert wanted(Preemption(deadline=time.time() + 100, window="3m")).startswith("the deadline in ")
    assert wanted(Preemption(deadline=time.time() + 600, window="3m")) == ""


def test_the_job_stops_earlier_where_a_save_takes_longer_than_the_window() -> None:
    watch = Watch(Preemption(deadline=time.time() + 600))
    watch.close()
    assert watch.wanted() == ""
    watch.need(1000.0)
    assert watch.wanted().startswith("the deadline in ")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"window": "soon"}, "window='soon'"),
        ({"window": 0}, "window=0"),
        ({"deadline": "tomorrow"}, "deadline='tomorrow'"),
        ({"deadline": -5}, "deadline=-5"),
        ({"signals": ["SIGNAL"]}, "'SIGNAL' is not a signal"),
        ({"signals": [1000]}, "1000 is not a signal"),
        ({"signals": ["SIGKILL"]}, "SIGKILL cannot be caught"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Preemption(**wrong)  # type: ignore[arg-type]


def test_a_wrong_word_of_the_environment_is_told_before_training_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_DEADLINE", "noon")
    with pytest.raises(ValueError, match="HOLDFAST_DEADLINE='noon'"):
        holdfast.Checkpointer(tmp_path, {"x": 1})
