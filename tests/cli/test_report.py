"""`holdfast report`: one page that needs nothing else and says what is slow, and a trace that viewers load."""

from __future__ import annotations

import functools
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.address import Address
from holdfast.cli.chrome_trace import trace
from holdfast.cli.markup import Html, element, join
from holdfast.cli.overview import Overview, overview
from holdfast.cli.place import Place
from holdfast.cli.report_page import page
from holdfast.cli.saves import saves_of
from holdfast.run.history import History
from holdfast.run.timings import Phase, RankPhases, SaveTimes, keep_times
from holdfast.store.locate import open_store
from holdfast.store.memory import MemoryStore

from .times import BEGAN, GB, INTERVAL, save_times

EVIL = "<script>alert('x')</script> & \"quotes\" \x00\x1b[31m ]]> --> ünï \ud800"


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed in order. Keeps the text, the cells, and what could reach elsewhere."""

    VOID = frozenset({"meta", "br", "hr", "col"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
            if self.rows and self.open[-1:] != ["table"]:
                self.rows[-1][-1:] = [cell + data for cell in self.rows[-1][-1:]]

    @property
    def words(self) -> str:
        return " ".join(self.text)

    def check_is_alone(self) -> None:
        """Nothing is fetched, nothing is run."""
        for tag, attributes in self.tags:
            assert tag not in {"script", "link", "img", "iframe", "object", "embed", "form", "a", "image", "use", "base"}
            assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "xlink:href", "action")]
        assert (
            "meta",
            {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"},
        ) in (self.tags)


def check_page(text: str) -> Reader:
    """A whole, closed, self-contained page, with pictures that are well formed and numbers that are numbers."""
    assert text.startswith('<!doctype html>\n<html lang="en">')
    reader = Reader(text)
    reader.check_is_alone()
    assert not re.search(r"https?://|url\(|@import", text)
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        for node in ElementTree.fromstring(picture.replace("&nbsp;", " ")).iter():
            for name in ("x", "y", "width", "height", "x1", "x2", "y1", "y2"):
                assert name not in node.attrib or -1 <= float(node.attrib[name]) <= 20000, (name, node.attrib)
    return reader


@pytest.fixture
def timed(run: Path) -> Path:
    """The run with records of twelve saves: rank 2 is slow, the last five write slowly, one failed and one was skipped."""
    store = open_store(run)
    for number in range(1, 13):
        fields: dict[str, Any] = {}
        if number == 4:
            fields = {"outcome": "skipped", "reason": "no free version in memory", "new_bytes": 0}
        if number == 11:
            fields = {"outcome": "failed", "reason": EVIL[:-1], "new_bytes": 0}
        keep_times(store, save_times(number, write=1.0 if number < 8 else 4.0, **fields))
    return run


@functools.cache
def store_of_one_step() -> MemoryStore:
    """A run in memory."""
    store = MemoryStore()
    holdfast.save(store, {"w": 1}, 1)
    return store


def look(records: list[SaveTimes]) -> Overview:
    """The overview of a run that holds one step and these records."""
    store = store_of_one_step()
    for name in store.list("timings"):
        store.delete(f"timings/{name}")
    for record in records:
        keep_times(store, record, most=10**6)
    return overview(Place(Address(store), False, store, History(store)), None, BEGAN + 10**6)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_says_what_is_slow_on_which_rank_since_when(command, timed: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    ended = command("report", timed, "-o", target)
    assert (ended.code, ended.err) == (0, "")
    words = check_page(target.read_text()).words
    assert "saves take longer since step 800" in words
    assert "write went from 1 s to 4 s" in words
    assert "rank 2 (node-a) is the slowest" in words
    assert "1 save failed, 1 save skipped of 12" in words
    assert "no free version in memory" in words
    assert "resumes from step 30" in words
    assert f"page: {target}" in ended.out


def test_the_heat_map_has_a_row_for_each_rank_and_marks_the_slowest(command, timed: Path, tmp_path: Path) -> None:
    command("report", timed, "-o", tmp_path / "page.html")
    reader = check_page((tmp_path / "page.html").read_text())
    (head,) = [row for row in reader.rows if "capture" in row]
    assert head == ["", "capture", "barrier, trainer", "wait", "write", "fsync", "commit", "in all", "slowest in"]
    cells = {row[0]: row[1:] for row in reader.rows if row and row[0].startswith(("rank ", "agent "))}
    assert list(cells) == ["rank 0 (node-a)", "rank 1 (node-a)", "rank 2 (node-a)slowest", "rank 3 (node-a)", "agent (node-a)"]
    assert cells["rank 2 (node-a)slowest"][0] == "600 ms"
    assert cells["rank 2 (node-a)slowest"][-1] == "10 saves"
    assert cells["rank 0 (node-a)"][:3] == ["200 ms", "10 ms", "400 ms"]
    assert cells["agent (node-a)"][:3] == ["", "", ""]


def test_what_a_reason_holds_is_text(command, timed: Path, tmp_path: Path) -> None:
    command("report", timed, "-o", tmp_path / "page.html")
    reader = check_page((tmp_path / "page.html").read_text(encoding="utf-8"))
    (row,) = [row for row in reader.rows if row and row[0] == "1100"]
    assert row[3] == "failed"
    assert row[5] == EVIL[:-1].replace("\x00", "\ufffd").replace("\x1b", "\ufffd")


def test_the_picture_of_saves_is_as_high_as_their_seconds(command, timed: Path, tmp_path: Path) -> None:
    command("report", timed, "-o", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    picture = ElementTree.fromstring(next(iter(re.findall(r"<svg.*?</svg>", text, re.DOTALL))))
    columns = picture.findall("g")
    assert len(columns) == 12

    def height(column: ElementTree.Element) -> float:
        return sum(
            float(r.get("height", "")) for r in column.findall("rect") if r.get("class") not in ("hit", "failed", "skipped")
        )

    assert height(columns[8]) / height(columns[0]) == pytest.approx(4.75 / 1.75, rel=0.01)
    marks = [number for number, column in enumerate(columns) for r in column if r.get("class") in ("failed", "skipped")]
    assert marks == [3, 10]
    (turn,) = [float(line.get("x1", "")) for line in picture.findall("line") if line.get("class") == "turn"]
    before, after = (float(columns[n].findall("rect")[0].get("x", "")) for n in (6, 7))
    assert before < turn <= after, "the line stands before step 800"


def test_a_run_without_records_has_a_page_from_its_commits(command, run: Path, tmp_path: Path) -> None:
    assert command("report", run, "-o", tmp_path / "page.html").code == 0
    reader = check_page((tmp_path / "page.html").read_text())
    assert "no save has left a record of its times" in reader.words
    assert "3 committed saves wrote" in reader.words
    assert "resumes from step 30" in reader.words


def test_an_empty_run_has_a_page(command, tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": 1}, 1)
    shutil.rmtree(tmp_path / "run" / "steps")
    assert command("report", tmp_path / "run", "-o", tmp_path / "page.html").code == 0
    assert "There is nothing to resume from." in check_page((tmp_path / "page.html").read_text()).words


def test_damage_is_said_and_the_rest_is_shown(command, timed: Path, tmp_path: Path, flip) -> None:
    flip(timed, None, "attempts/0001.json", 40)
    assert command("report", timed, "-o", tmp_path / "page.html").code == 0
    words = check_page((tmp_path / "page.html").read_text()).words
    assert "attempts/0001.json is damaged" in words
    assert "saves take longer since step 800" in words


# --- the command ------------------------------------------------------------------------------------------------------


def test_json_has_the_same_and_writes_no_file_unless_one_is_named(command, timed: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = command("report", timed, "--json").json
    assert sorted(tmp_path.rglob("*")) == before
    assert found["written"] == {}
    summary = found["summary"]
    assert (summary["committed"], summary["failed"], summary["skipped"], summary["new_bytes"]) == (10, 1, 1, 10 * GB)
    assert (found["slowest"]["rank"], found["slowest"]["phase"], found["slowest"]["slowest_in"]) == (2, "capture", 10)
    assert (found["change"]["step"], found["change"]["phase"]) == (800, "write")
    own = found["saves"][0]["phase_seconds"]
    assert own == pytest.approx(
        {"capture": 0.2 + 0.4 / 4, "wait": 0.4 * 3 / 4, "write": 1, "fsync": 0.1, "commit": 0.05}, abs=1e-5
    )
    assert [size["step"] for size in found["sizes"]][:1] == [100]
    assert {size["step"] for size in found["sizes"]} >= {10, 20, 30}
    named = command("report", timed, "--json", "-o", tmp_path / "page.html", "--trace", tmp_path / "trace.json").json
    assert named["written"] == {"page": str(tmp_path / "page.html"), "trace": str(tmp_path / "trace.json")}
    check_page((tmp_path / "page.html").read_text())


def test_the_page_has_a_name_of_its_own_here_and_is_made_again(command, timed: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for _ in range(2):
        assert command("report", timed).code == 0
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run-report.html"]


def test_nothing_but_a_report_is_written_over(command, timed: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("precious = True\n")
    for option in ("-o", "--trace"):
        ended = command("report", timed, "--json", option, tmp_path / "train.py")
        assert (ended.code, ended.out) == (6, "")
        assert "is no report" in ended.err
    assert (tmp_path / "train.py").read_text() == "precious = True\n"
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["train.py"]


def test_a_place_that_cannot_be_written_is_exit_code_7(command, timed: Path, tmp_path: Path) -> None:
    assert command("report", timed, "-o", tmp_path / "nowhere" / "page.html").code == 7


def test_one_attempt_alone(command, timed: Path) -> None:
    keep_times(open_store(timed), save_times(50, attempt=2, write=9.0))
    holdfast.Run(timed).rollback(20)
    assert command("report", timed, "--json").json["summary"]["committed"] == 11
    first, second = (command("report", timed, "--json", "--attempt", n).json for n in (1, 2))
    assert (first["summary"]["committed"], second["summary"]["committed"]) == (10, 1)
    assert [size["step"] for size in second["sizes"]] == [5000]
    assert first["forecast"]["step"] == second["forecast"]["step"] == 20
    missing = command("report", timed, "--json", "--attempt", 7)
    assert (missing.code, "its newest is 2" in missing.err) == (3, True)


def test_a_report_is_of_a_run(command, timed: Path, tmp_path: Path) -> None:
    assert command("report", f"{timed}@20").code == 2
    assert command("report", tmp_path).code == 3


# --- the forecast -----------------------------------------------------------------------------------------------------


def test_the_forecast_is_of_the_saves_so_far(command, timed: Path) -> None:
    found = command("report", timed, "--json").json["forecast"]
    newest = holdfast.Run(timed).latest()
    assert (found["step"], found["nbytes"], found["writer"]) == (30, newest.nbytes, "running")
    assert found["interval_seconds"] == INTERVAL
    assert found["usual_lost_seconds"] == pytest.approx(INTERVAL / 2 + (1.75 + 4.75) / 2, abs=1.6)
    assert found["worst_lost_seconds"] == pytest.approx(2 * INTERVAL + 4.75)
    assert GB / 4 <= found["bytes_per_second"] <= GB * 1.001
    assert found["read_seconds"] == pytest.approx(newest.nbytes / found["bytes_per_second"])


def test_without_records_the_intervals_are_those_of_the_commits(command, run: Path) -> None:
    found = command("report", run, "--json").json["forecast"]
    times = [step.created for step in holdfast.Run(run).steps()]
    assert found["worst_lost_seconds"] == pytest.approx(max(times[1] - times[0], times[2] - times[1]))
    assert found["read_seconds"] is None


def test_a_newest_step_that_does_not_open_is_not_promised(command, timed: Path) -> None:
    (newest,) = (timed / "steps").glob("0000000030-*")
    (newest / "index-n0000.safetensors").unlink()
    found = command("report", timed, "--json").json
    assert found["forecast"]["step"] == 20
    assert [r["status"] for r in found["remarks"] if r["name"] == "recovery"] == ["failed"]


# --- the trace --------------------------------------------------------------------------------------------------------


def check_trace(found: Any) -> list[dict[str, Any]]:
    """What viewers ask of a trace; its events that have a length."""
    found = json.loads(json.dumps(found, allow_nan=False))
    events = found["traceEvents"]
    names = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    lengths = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} <= {"M", "X"}
    for event in lengths:
        assert isinstance(event["name"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in names
        assert event["pid"] in processes
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in lengths:
        threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in threads.values():
        spans.sort()
        assert all(b[0] >= a[1] - 1 for a, b in pairwise(spans)), "events of a thread overlap by over 1 us"
    return lengths


def test_the_trace_has_every_phase_of_every_rank(command, timed: Path, tmp_path: Path) -> None:
    assert command("report", timed, "--json", "--trace", tmp_path / "trace.json").code == 0
    found = json.loads((tmp_path / "trace.json").read_text())
    lengths = check_trace(found)
    assert len([e for e in lengths if e["cat"] in ("committed", "failed", "skipped")]) == 12
    assert len([e for e in lengths if e["name"] == "capture"]) == 12 * 4
    assert found["otherData"]["began"] == BEGAN + INTERVAL
    (write,) = [e for e in lengths if e["name"] == "write" and e["args"]["step"] == 900]
    assert (write["ts"], write["dur"]) == pytest.approx(((8 * INTERVAL + 0.6) * 1e6, 4e6), abs=1)
    assert write["args"] == {"step": 900, "attempt": 1, "bytes": GB}
    threads = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "thread_name"}
    assert threads >= {"saves", "rank 0", "rank 0 trainer", "agent"}
    processes = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert processes == {"saves", "node node-a"}


def test_saves_that_overlap_do_not_hide_each_other() -> None:
    records = [save_times(n, began=BEGAN + n, ended=BEGAN + n + 5) for n in range(6)]
    check_trace(trace(saves_of(records), "run"))


def test_a_trace_of_nothing_is_one() -> None:
    assert check_trace(trace([], "run")) == []


# --- odd records ------------------------------------------------------------------------------------------------------

_TEXT = st.text(max_size=12) | st.just(EVIL.encode("utf-8", "replace").decode())
_TIMES = st.sampled_from([0.0, 1e-300, 1.0, BEGAN, BEGAN + 1e-7, BEGAN + 3, 1e11]) | st.floats(0, 1e11)
_LENGTHS = st.sampled_from([0.0, 5e-324, 1e-9, 1.0, 1e9]) | st.floats(0, 1e9)
_BYTES = st.sampled_from([0, 1, 2**62]) | st.integers(0, 2**62)
_PHASES = st.builds(
    Phase, st.sampled_from(["capture", "write", "unaccounted", "wait"]) | _TEXT, _TIMES, _LENGTHS, _BYTES, st.just("") | _TEXT
)
_RANKS = st.builds(RankPhases, st.sampled_from([-1, 0, 1, 2**31]), _TEXT, st.lists(_PHASES, max_size=4).map(tuple))
_RECORDS = st.builds(
    SaveTimes, step=st.integers(0, 5) | st.just(10**18 - 1), attempt=st.integers(0, 2), began=_TIMES, ended=_TIMES,
    outcome=st.sampled_from(["committed", "skipped", "failed"]) | _TEXT, reason=_TEXT, raw_bytes=_BYTES, new_bytes=_BYTES,
    stored_ratio=st.floats(0, 1e6), ranks=st.lists(_RANKS, max_size=4).map(tuple),
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_RECORDS, max_size=9))
def test_any_records_give_a_page_and_a_trace(records: list[SaveTimes]) -> None:
    seen = look(records)
    check_page(page(seen))
    check_trace(trace(seen.saves, seen.run))
    json.dumps(seen.as_dict(), allow_nan=True)
    for save in seen.saves:
        assert sum(save.own_seconds.values()) == pytest.approx(save.seconds, rel=1e-3, abs=1e-3)


def test_very_many_saves_and_ranks_give_a_page_that_can_be_read() -> None:
    many = look([save_times(n) for n in range(1, 1001)])
    reader = check_page(page(many))
    assert "1000 saves" in reader.words
    assert "Each column is the slowest of 5." in reader.words
    wide = look([save_times(n, ranks=600, slow_rank=577) for n in range(1, 4)])
    text = page(wide)
    assert "rank 577 (node-a)" in check_page(text).words
    assert "Only the busiest of 601 rows are shown." in text
    assert len(text) < 400_000


def test_of_failures_only_there_is_a_page() -> None:
    seen = look([save_times(n, outcome="failed", reason="disk") for n in range(1, 4)])
    words = check_page(page(seen)).words
    assert "3 saves failed of 3" in words
    assert seen.remarks[0].status == "failed"


def test_failures_of_long_ago_are_no_alarm() -> None:
    seen = look([save_times(1, outcome="failed", reason="disk"), *(save_times(n) for n in range(2, 20))])
    assert [f.status for f in seen.remarks if f.name == "outcomes"] == ["ok"]


def test_time_in_no_phase_is_named() -> None:
    seen = look([msgspec.structs.replace(save_times(n), ended=BEGAN + n * INTERVAL + 3.5) for n in range(1, 5)])
    (remark,) = [f for f in seen.remarks if f.name == "unaccounted"]
    assert "50% of the wall time" in remark.detail


# --- markup -----------------------------------------------------------------------------------------------------------


def test_what_is_not_markup_is_text() -> None:
    made = element("p", "<b>", element("i", "a&b"), None, 1.5, class_='x" onclick="y', data_x=None)
    assert made == '<p class="x&quot; onclick=&quot;y">&lt;b&gt;<i>a&amp;b</i>1.5</p>'
    assert isinstance(join(made, "<"), Html)
