"""The metrics are what Prometheus reads: each line by the grammar of exposition format 0.0.4, and the status's numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.metrics import CONTENT_TYPE, prometheus
from holdfast.run.status import ErrorStatus, RankStatus, SaveStatus, Status

# --- a reader of the format -------------------------------------------------------------------------------------------

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)\Z")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|\Z)')
_UNESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass
class Metric:
    kind: str
    help: str
    samples: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Metric]:
    """The metrics in a text, which must follow the format to the letter."""
    assert text.endswith("\n")
    found: dict[str, Metric] = {}
    about = ("", "")
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            assert name not in found, f"{name} is described twice"
            about = (name, words)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert about[0] == name, f"the type of {name} does not follow its help"
            assert kind in ("counter", "gauge")
            found[name] = Metric(kind, about[1])
        else:
            match = _SAMPLE.match(line)
            assert match, f"not a sample: {line!r}"
            name, labels, value = match.groups()
            assert name == list(found)[-1], f"{name} is outside of its group"
            key = frozenset(parse_labels(labels or "").items())
            assert key not in found[name].samples, f"twice the same sample: {line!r}"
            found[name].samples[key] = float(value)
    return found


def parse_labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        assert match, f"not labels: {text[at:]!r}"
        assert match[1] not in found
        found[match[1]] = re.sub(r"\\.", lambda m: _UNESCAPED[m[0]], match[2])
        at = match.end()
    return found


def value(metrics: dict[str, Metric], name: str, **labels: str) -> float:
    """The value of the one sample with these labels, besides that of the run."""
    (found,) = [v for key, v in metrics[name].samples.items() if {k: v for k, v in key if k != "run"} == labels]
    return found


STATUS = Status(
    pid=41, version="1.2", node="node-a", run="/runs/gpt", run_id="00ff", attempt=3, at=2e9, uptime_seconds=60.5,
    resident_bytes=10**9, arena_bytes=2**53 + 1, memory_budget_bytes=2**54, versions_held=2,
    ranks=(RankStatus(0, 1, True, 300, 1.25), RankStatus(1, 2, False)),
    saves=(SaveStatus(200, "writing", 60, 100, 2e9), SaveStatus(300, "filling", 5, 100, 2e9), SaveStatus(310, "filling", 0, 7)),
    committed_step=100, committed_at=1.9e9, committed_saves=7, skipped_saves=2, failed_saves=1, written_bytes=10**15,
    phase_seconds={"write": 2.5, "capture": 0.125}, errors=(ErrorStatus(1.0, "no room"),),
)  # fmt: skip


# --- what the text says -----------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_status() -> None:
    found = parse(prometheus(STATUS))
    assert value(found, "holdfast_info", version="1.2", node="node-a", url="/runs/gpt") == 1
    assert value(found, "holdfast_uptime_seconds") == 60.5
    assert value(found, "holdfast_saves_total", outcome="committed") == 7
    assert value(found, "holdfast_saves_total", outcome="skipped") == 2
    assert value(found, "holdfast_saves_total", outcome="failed") == 1
    assert value(found, "holdfast_written_bytes_total") == 10**15
    assert value(found, "holdfast_phase_seconds_total", phase="write") == 2.5
    assert value(found, "holdfast_rank_blocked_seconds_total", rank="0") == 1.25
    assert (value(found, "holdfast_rank_connected", rank="0"), value(found, "holdfast_rank_connected", rank="1")) == (1, 0)
    assert (value(found, "holdfast_committed_step"), value(found, "holdfast_committed_timestamp_seconds")) == (100, 1.9e9)
    assert value(found, "holdfast_pending_bytes") == 40 + 95 + 7


def test_saves_are_counted_by_level_and_levels_without_one_are_zero() -> None:
    found = parse(prometheus(STATUS))
    counts = {level: value(found, "holdfast_saves_in_memory", level=level) for level in ("filling", "writing", "durable")}
    assert counts == {"filling": 2, "writing": 1, "durable": 0}


def test_integers_keep_all_of_their_digits() -> None:
    assert f'holdfast_arena_bytes{{run="00ff"}} {2**53 + 1}\n' in prometheus(STATUS)


def test_every_sample_names_its_run() -> None:
    metrics = parse(prometheus(STATUS))
    assert all(("run", "00ff") in key for metric in metrics.values() for key in metric.samples)


def test_names_follow_the_conventions() -> None:
    """Counters, and nothing else, end in _total; units are seconds and bytes."""
    for name, metric in parse(prometheus(STATUS)).items():
        assert name.startswith("holdfast_")
        assert (metric.kind == "counter") == name.endswith("_total"), name
        assert metric.help.endswith(".")
        assert not re.search(r"_(ms|kb|mb|gb|milliseconds|minutes|percent)(_|\Z)", name)


def test_what_is_not_known_is_left_out() -> None:
    found = parse(prometheus(Status(pid=1)))
    assert "holdfast_committed_step" not in found
    assert "holdfast_rank_connected" not in found
    assert "holdfast_phase_seconds_total" not in found
    assert value(found, "holdfast_saves_total", outcome="committed") == 0


def test_a_rank_that_is_listed_twice_has_one_sample() -> None:
    status = Status(pid=1, ranks=(RankStatus(0, 1, False), RankStatus(0, 2, True)))
    assert value(parse(prometheus(status)), "holdfast_rank_connected", rank="0") == 1


@pytest.mark.parametrize("odd", ['a"b', "a\\b", "a\nb", "a\\nb", 'x",evil="1', "}", "naïve ☃", "\\", "a\rb\x85c\u2028d", ""])
def test_labels_come_back_whatever_is_in_them(odd: str) -> None:
    found = parse(prometheus(Status(pid=1, run=odd, node=odd, phase_seconds={odd: 1.0})))
    assert value(found, "holdfast_info", version="", node=odd, url=odd) == 1
    assert value(found, "holdfast_phase_seconds_total", phase=odd) == 1


def test_a_path_that_is_not_utf_8_does_not_break_the_text() -> None:
    prometheus(Status(pid=1, run="/runs/\udcff")).encode("utf-8")


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e300, 5e-324, 0.1])
def test_every_float_is_a_number_to_prometheus(number: float) -> None:
    assert value(parse(prometheus(Status(pid=1, uptime_seconds=number))), "holdfast_uptime_seconds") == number


def test_not_a_number_is_said_so() -> None:
    assert 'holdfast_uptime_seconds{run=""} NaN\n' in prometheus(Status(pid=1, uptime_seconds=math.nan))


_FLOATS = st.floats(0, 1e12)
_INTS = st.integers(0, 2**62)
_SAVES = st.builds(SaveStatus, _INTS, st.text(max_size=8), _INTS, _INTS, _FLOATS)
_RANKS = st.builds(RankStatus, _INTS, _INTS, st.booleans(), st.none() | _INTS, _FLOATS)


@given(
    st.builds(
        Status, pid=_INTS, run=st.text(max_size=20), run_id=st.text(max_size=20), ranks=st.lists(_RANKS, max_size=4).map(tuple),
        saves=st.lists(_SAVES, max_size=4).map(tuple), phase_seconds=st.dictionaries(st.text(max_size=8), _FLOATS, max_size=4),
        committed_step=st.none() | _INTS, written_bytes=_INTS,
    )
)  # fmt: skip
def test_any_status_is_a_text_that_can_be_read(status: Status) -> None:
    found = parse(prometheus(status))
    assert value(found, "holdfast_written_bytes_total") == float(status.written_bytes)
    levels = found["holdfast_saves_in_memory"].samples
    assert sum(levels.values()) == len(status.saves)


def test_the_content_type_names_the_version() -> None:
    assert "version=0.0.4" in CONTENT_TYPE
