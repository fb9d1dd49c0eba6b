"""When to save and what to keep, as pure functions: for any steps, metrics and wishes, the rules hold."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast import Every, Keep
from holdfast.policy.keep import Candidate, Verdict, best_of

NUMBERS = st.floats(-10, 10) | st.integers(-10, 10)
METRICS: st.SearchStrategy[Any] = NUMBERS | st.sampled_from([math.nan, math.inf, "nan", None, True])
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(1, 60), st.dictionaries(st.sampled_from(["loss", "accuracy"]), METRICS), st.booleans()),
    min_size=1,
    max_size=25,
    unique_by=lambda candidate: candidate.step,
)


@st.composite
def keeps(draw: st.DrawFn) -> Keep:
    best = draw(st.integers(0, 4))
    return Keep(
        last=draw(st.none() | st.integers(1, 6)),
        every=draw(st.none() | st.integers(1, 12)),
        best=best,
        metric=draw(st.sampled_from(["loss", "accuracy", "absent"])) if best else None,
        mode=draw(st.sampled_from(["min", "max"])),
        weights=draw(st.none() | st.integers(1, 6)),
    )


def after(candidates: list[Candidate], verdict: Verdict) -> list[Candidate]:
    """What is left once a verdict was carried out."""
    return [c for c in candidates if c.step not in verdict.remove]


# --- what to keep -----------------------------------------------------------------------------------------------------


@given(keeps(), CANDIDATES)
def test_every_step_is_either_kept_with_a_reason_or_removed(keep: Keep, candidates: list[Candidate]) -> None:
    verdict = keep.decide(candidates)
    assert sorted([*verdict.keep, *verdict.remove]) == sorted(c.step for c in candidates)
    assert all(verdict.keep.values())
    assert list(verdict.keep) == sorted(verdict.keep)


@given(keeps(), CANDIDATES)
def test_the_newest_and_the_protected_are_always_kept_whole(keep: Keep, candidates: list[Candidate]) -> None:
    verdict = keep.decide(candidates)
    safe = {max(c.step for c in candidates)} | {c.step for c in candidates if c.is_protected}
    assert safe <= set(verdict.keep)
    assert not safe & set(verdict.weights_only)


@given(keeps(), CANDIDATES)
def test_never_fewer_are_kept_than_were_asked_for(keep: Keep, candidates: list[Candidate]) -> None:
    kept = set(keep.decide(candidates).keep)
    steps = sorted(c.step for c in candidates)
    assert kept >= set(steps if keep.last is None else steps[-keep.last :])
    assert kept >= {s for s in steps if keep.every and s % keep.every == 0}
    assert kept >= {c.step for c in best_of(candidates, keep.metric, keep.mode)[: keep.best]}
    assert kept >= {s for s in steps if keep.is_kept_forever(s)}


@given(st.integers(1, 6), CANDIDATES)
def test_no_more_are_kept_than_were_asked_for(last: int, candidates: list[Candidate]) -> None:
    verdict = Keep(last=last).decide([Candidate(c.step, c.metrics) for c in candidates])
    assert len(verdict.keep) == min(last, len(candidates))


@given(keeps(), CANDIDATES)
def test_pruning_twice_is_pruning_once(keep: Keep, candidates: list[Candidate]) -> None:
    once = keep.decide(candidates)
    twice = keep.decide(after(candidates, once))
    assert set(twice.keep) == set(once.keep)
    assert not twice.remove
    assert set(twice.weights_only) <= set(once.weights_only), "what was kept whole must not lose its state the second time"


@given(keeps(), CANDIDATES, st.randoms(use_true_random=False))
def test_the_order_in_which_steps_are_given_does_not_matter(keep: Keep, candidates: list[Candidate], chance: Any) -> None:
    shuffled = list(candidates)
    chance.shuffle(shuffled)
    assert keep.decide(shuffled) == keep.decide(candidates)


@given(keeps(), CANDIDATES)
def test_pruning_after_each_save_ends_where_pruning_once_does_for_what_depends_on_age_alone(
    keep: Keep, candidates: list[Candidate]
) -> None:
    by_age = Keep(last=keep.last, every=keep.every)
    left: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: c.step):
        left.append(candidate)
        left = after(left, by_age.decide(left))
    assert {c.step for c in left} == set(by_age.decide(candidates).keep)


@given(keeps(), CANDIDATES)
def test_only_what_is_kept_and_old_loses_its_optimizer(keep: Keep, candidates: list[Candidate]) -> None:
    verdict = keep.decide(candidates)
    assert set(verdict.weights_only) <= set(verdict.keep)
    if keep.weights is None:
        assert verdict.weights_only == ()
    else:
        recent = sorted(c.step for c in candidates)[-keep.weights :]
        assert not set(verdict.weights_only) & set(recent)


@given(st.integers(1, 4), CANDIDATES)
@example(2, [Candidate(3), Candidate(4), Candidate(5)])
def test_of_the_kept_steps_so_many_of_the_newest_stay_whole(weights: int, candidates: list[Candidate]) -> None:
    keep = Keep(last=1, every=3, weights=weights)
    verdict = keep.decide(candidates)
    whole = [step for step in verdict.keep if step not in verdict.weights_only]
    assert len(whole) >= min(weights, len(verdict.keep))


@given(CANDIDATES, st.sampled_from(["min", "max"]))
def test_the_best_are_those_of_the_best_metric_and_the_newest_among_equals(candidates: list[Candidate], mode: str) -> None:
    ranked = best_of(candidates, "loss", mode)
    scored = [c for c in candidates if isinstance(c.metrics.get("loss"), (int, float)) and c.metrics["loss"] is not True]
    assert {c.step for c in ranked} == {c.step for c in scored if math.isfinite(c.metrics["loss"])}
    for better, worse in itertools.pairwise(ranked):
        a, b = better.metrics["loss"], worse.metrics["loss"]
        assert a < b if mode == "min" and a != b else a > b if a != b else better.step > worse.step


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "least"}, {"best": 2}, {"last": 0}, {"every": 0}, {"best": -1, "metric": "loss"}, {"weights": 0}],
    ids=str,
)
def test_a_wish_that_makes_no_sense_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
        Keep(**wrong)


def test_reasons_are_words() -> None:
    candidates = [Candidate(step, {"loss": step}, step == 50) for step in (10, 50, 90, 100, 110, 120)]
    assert Keep(last=2, every=100, best=1, metric="loss").decide(candidates).keep == {
        10: "among the best 1 by loss",
        50: "pinned or held",
        100: "a multiple of 100",
        110: "among the last 2",
        120: "newest",
    }


# --- when to save -----------------------------------------------------------------------------------------------------

STEPS = st.integers(0, 1000)


@given(st.integers(1, 50), STEPS, st.integers(1, 120))
def test_a_multiple_is_saved_when_it_is_reached_or_passed(every: int, last: int, further: int) -> None:
    step = last + further
    has_passed = any(n % every == 0 for n in range(last + 1, step + 1))
    assert Every(steps=every).is_due(step, last, 0.0) == has_passed


@given(st.integers(1, 50), st.lists(st.integers(1, 7), min_size=1, max_size=80))
def test_saves_are_never_further_apart_than_asked_for(every: int, strides: list[int]) -> None:
    step = last = 0
    for stride in strides:
        step += stride
        if Every(steps=every).is_due(step, last, 0.0):
            assert step - last <= 2 * every + max(strides)
            last = step
        assert step // every == last // every, "no multiple passes without a save"


@given(STEPS, STEPS, st.floats(0, 1e6), st.floats(0.01, 1e4))
def test_time_alone_makes_a_save_due_but_never_of_the_same_step(step: int, last: int, seconds: float, minutes: float) -> None:
    assert Every(minutes=minutes).is_due(step, last, seconds) == (step > last and seconds >= minutes * 60)


@given(STEPS, STEPS, st.floats(0, 1e6), st.integers(1, 50), st.floats(0.01, 1e4))
def test_steps_and_minutes_together_are_due_when_either_is(
    step: int, last: int, seconds: float, steps: int, minutes: float
) -> None:
    either = Every(steps=steps).is_due(step, last, seconds) or Every(minutes=minutes).is_due(step, last, seconds)
    assert Every(steps=steps, minutes=minutes).is_due(step, last, seconds) == either


@pytest.mark.parametrize("wrong", [{}, {"steps": 0}, {"minutes": 0}, {"minutes": -1.0}], ids=str)
def test_a_rhythm_that_makes_no_sense_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Every"):
        Every(**wrong)
