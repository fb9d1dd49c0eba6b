"""Resuming from a run whose newest step is damaged: the step before is taken, and the account says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Checkpointer, Corrupt, Unavailable, Unsupported
from holdfast.format.records import FORMAT

from .refuse import assert_same, live_state
from .wreck import Kinds, flip, rewrite_record

Saved = tuple[Path, dict[int, dict[str, Any]]]


@pytest.mark.parametrize("kind", ["commit", "index", "data", "gone"])
def test_resume_falls_back_to_the_step_before_and_lists_what_it_passed_over(kind: str, run: Path, saved: Saved) -> None:
    files = Kinds(run)
    name = files.name("data" if kind == "gone" else kind)
    if kind == "gone":
        files.path("data").unlink()
    else:
        flip(files.path(kind), (files.path(kind).stat().st_size - 1) * 8)
    state = live_state()
    with Checkpointer(str(run), state, save=holdfast.Every(steps=1)) as checkpointer:
        assert checkpointer.resume() == 2
        assert checkpointer.ledger is not None
        assert checkpointer.ledger.step == 2
        (why,) = checkpointer.ledger.fallbacks
        assert name in why
        assert state.touched is None
        assert_same(holdfast.load(f"{run}@2"), saved[1][2])
        assert state.digest() == restored_digest(run, 2)


def restored_digest(run: Path, step: int) -> str:
    state = live_state()
    holdfast.restore(f"{run}@{step}", state)
    return state.digest()


@pytest.mark.parametrize("kind", ["commit", "index"])
def test_resume_lists_what_it_passed_over_where_one_step_is_left(kind: str, tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(str(tmp_path / "run"), {"a": {"x": step}}, step)
    files = Kinds(tmp_path / "run", 2)
    flip(files.path(kind), 8 * 100)
    with Checkpointer(str(tmp_path / "run"), {"a": {"x": 0}}) as checkpointer:
        assert checkpointer.resume() == 1
        assert checkpointer.ledger is not None
        (why,) = checkpointer.ledger.fallbacks
        assert files.name(kind) in why


def test_a_step_of_a_later_version_is_not_passed_over(run: Path) -> None:
    rewrite_record(Kinds(run).path("commit"), lambda record: record.update(format=FORMAT + 1))
    with pytest.raises(Unsupported, match="upgrade"), Checkpointer(str(run), live_state()) as checkpointer:
        checkpointer.resume()
    assert len(list((run / "attempts").iterdir())) == 1


def test_a_record_that_cannot_be_read_just_now_is_not_passed_over(run: Path) -> None:
    path = Kinds(run).path("commit")
    path.unlink()
    path.mkdir()
    with pytest.raises(Unavailable, match=r"commit\.json"), Checkpointer(str(run), live_state()) as checkpointer:
        checkpointer.resume()
    assert len(list((run / "attempts").iterdir())) == 1


def test_an_older_step_can_be_resumed_from_while_the_newest_is_damaged(run: Path) -> None:
    flip(Kinds(run).path("commit"), 8 * 100)
    with Checkpointer(str(run), live_state()) as checkpointer:
        assert checkpointer.resume(at=2) == 2


def test_resume_says_so_where_no_step_is_intact(run: Path) -> None:
    for step in (1, 2, 3):
        path = Kinds(run, step).path("index")
        flip(path, 4000)
    state = live_state()
    before = state.digest()
    with pytest.raises(Corrupt, match="index"), Checkpointer(str(run), state) as checkpointer:
        checkpointer.resume()
    assert state.digest() == before
    assert state.touched is None


def test_a_step_asked_for_by_number_is_not_replaced_by_another(run: Path) -> None:
    flip(Kinds(run).path("index"), 4000)
    state = live_state()
    with pytest.raises(Corrupt, match="steps/0000000003"), Checkpointer(str(run), state) as checkpointer:
        checkpointer.resume(at=3)
