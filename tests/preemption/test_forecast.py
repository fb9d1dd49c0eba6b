"""What a save will take, and when it is not begun any more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.policy.forecast import LAST, MARGIN, Forecast, Past, forecast, may_begin

SECONDS = st.floats(0.001, 1e5)
PAST = st.lists(st.builds(Past, SECONDS, st.integers(0, 10**12)), min_size=1, max_size=9)


def test_without_a_past_there_is_no_forecast() -> None:
    assert forecast([]) is None


def test_the_slowest_of_the_last_saves_counts() -> None:
    past = [Past(90.0), Past(3.0), Past(7.0), Past(2.0), Past(2.0), Past(1.0)]
    assert forecast(past) == Forecast(7.0, 7.0 * MARGIN)


def test_a_larger_state_takes_longer_in_proportion_and_a_smaller_one_not_less() -> None:
    past = [Past(10.0, 100)]
    assert [forecast(past, nbytes) for nbytes in (0, 50, 100, 300)] == [
        Forecast(seconds, seconds * MARGIN) for seconds in (10.0, 10.0, 10.0, 30.0)
    ]


@given(PAST, st.integers(0, 10**12))
def test_a_forecast_is_never_below_what_was_seen_lately(past: list[Past], nbytes: int) -> None:
    found = forecast(past, nbytes)
    assert found is not None
    assert found.likely >= max(one.seconds for one in past[-LAST:])
    assert found.worst >= found.likely


CASES = [
    (Forecast(60.0, 90.0), None, 7, True, "nobody says that the job is killed"),
    (Forecast(60.0, 90.0), 100.0, 7, True, "it ends in time"),
    (Forecast(60.0, 90.0), 70.0, 7, True, "it is likely to end in time, and harms nothing if not"),
    (Forecast(60.0, 90.0), 30.0, 7, False, "it would be killed"),
    (Forecast(60.0, 90.0), 30.0, None, True, "there is nothing to lose"),
    (Forecast(60.0, 90.0), 0.0, 7, True, "the job still runs beyond its deadline: it was none"),
    (None, 30.0, 7, True, "it may be fast, and harms nothing"),
]


@pytest.mark.parametrize(("expected", "left", "last_good", "may", "why"), CASES, ids=[case[4] for case in CASES])
def test_a_save_that_harms_nothing_is_begun_if(
    expected: Forecast | None, left: float | None, last_good: int | None, may: bool, why: str
) -> None:
    assert may_begin(expected, left, last_good)[0] == may


def test_a_refusal_names_the_forecast_what_is_left_and_the_last_good_step() -> None:
    _, reason = may_begin(Forecast(60.0, 90.0), 12.34, 1000)
    assert "about 60.0 s" in reason
    assert "12.3 s are left" in reason
    assert "Step 1000 is the last good one, and stays as it is" in reason
    assert "Preemption(window=)" in reason
