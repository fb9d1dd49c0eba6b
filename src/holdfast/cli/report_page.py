"""The report as one HTML page that needs nothing else: no network, no script, no font. Readable in light and in dark."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..run.timings import AGENT
from ..version import VERSION
from .amounts import counted, duration, size, when
from .findings import FAILED, WARNING, Finding
from .markup import Html, element, join
from .overview import Overview
from .report_charts import Palette, in_groups, lanes, sizes, timeline
from .report_style import STYLE
from .saves import Save, in_order
from .slowness import Change, Heat, Row, Slowest, column_name

GENERATOR = "holdfast report"
"""By this a page is known as one that may be written over."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_MOST_RANKS = 64
_MOST_TROUBLES = 200


def page(seen: Overview) -> str:
    """The whole page."""
    names = {name for save in seen.saves for name in save.own_seconds}
    names |= {p.name for save in seen.saves for rank in save.record.ranks for p in rank.phases}
    palette = Palette(in_order(names))
    title = f"{seen.run}: saves" + (f" of attempt {seen.attempt}" if seen.attempt is not None else "")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="generator", content=GENERATOR),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        element("style", Html(STYLE)),
    )
    zone = time.strftime("%Z", time.localtime(seen.made))
    made = f"{when(seen.made)} {zone}, holdfast {VERSION}" + (f", run {seen.id}" if seen.id else "")
    body = element(
        "body",
        element("header", element("h1", title), element("p", made, class_="quiet")),
        _remarks(seen.remarks),
        _summary(seen),
        _timeline(seen.saves, palette, seen.change),
        _heat(seen.heat, seen.slowest),
        _within(seen.saves, palette),
        _sizes(seen),
        _troubles(seen),
        _recovery(seen),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _section(title: str, *children: Html | str | None) -> Html:
    return element("section", element("h2", title), *children)


def _remarks(found: Sequence[Finding]) -> Html:
    items = [
        element(
            "li", element("b", finding.name), " ", finding.detail, class_={FAILED: "bad", WARNING: "warn"}.get(finding.status)
        )
        for finding in found
    ]
    return element("ul", *(items or [element("li", "Nothing stands out.")]), class_="remarks")


def _summary(seen: Overview) -> Html:
    s = seen.summary
    worst = f"{_seconds(s.worst_seconds)}, step {s.worst_step}" if s.worst_step is not None else "-"
    tiles = [
        ("committed", str(s.committed), ""),
        ("failed", str(s.failed), "bad" if s.failed else ""),
        ("skipped", str(s.skipped), "warn" if s.skipped else ""),
        ("a save takes", _seconds(s.median_seconds), ""),
        ("the longest", worst, ""),
        ("training held up", duration(s.blocked_seconds), ""),
        ("written", size(s.new_bytes), ""),
        ("written at", f"{size(s.bytes_per_second)}/s" if s.bytes_per_second else "-", ""),
        ("from save to save", _seconds(s.interval_seconds), ""),
    ]
    cells = (element("div", element("dt", name), element("dd", value, class_=look or None)) for name, value, look in tiles)
    return element("dl", *cells, class_="tiles")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _timeline(saves: Sequence[Save], palette: Palette, turn: Change | None) -> Html | None:
    if not saves:
        return None
    each = max(len(group) for group in in_groups(saves))
    span = f"{counted(len(saves), 'save')} from {when(saves[0].began)} to {when(saves[-1].began)}."
    several = f" Each column is the slowest of {each}." if each > 1 else ""
    marks = " A red foot: the save failed; an orange one: it was skipped." if any(not s.is_committed for s in saves) else ""
    line = f" The dashed line: step {turn.step}, from which on they take {_kind(turn)}." if turn else ""
    shown = in_order({name for save in saves for name in save.own_seconds})
    chart = timeline(saves, palette, turn.at if turn else None)
    return _section("Saves", element("p", span + several + marks + line), chart, palette.legend(shown))


def _kind(turn: Change) -> str:
    return f"{duration(turn.after_seconds)} instead of {duration(turn.before_seconds)}"


def _heat(found: Heat, slowest: Slowest | None) -> Html | None:
    if not found.rows:
        return None
    shown = _most_busy(found)
    hottest = {column: max(row.medians.get(column, 0.0) for row in found.rows) for column in found.columns}
    busiest = max(row.busy_seconds for row in found.rows)
    titles = ["", *map(column_name, found.columns), "in all", "slowest in"]
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    rows = []
    for row in shown:
        is_slowest = slowest is not None and row == slowest.row
        cells = [_cell(row.medians.get(column), hottest[column]) for column in found.columns]
        cells.append(_cell(row.busy_seconds, busiest))
        cells.append(element("td", counted(row.slowest_in, "save") if row.slowest_in else ""))
        name = element("th", row.name, element("span", "slowest", class_="tag") if is_slowest else None, scope="row")
        rows.append(element("tr", name, *cells, class_="slowest" if is_slowest else None))
    table = element("table", element("thead", head), element("tbody", *rows), class_="heat")
    note = f"Median seconds over {counted(found.saves, 'committed save')}; the stronger, the nearer to the most in its column."
    left = f" Only the busiest of {len(found.rows)} rows are shown." if len(shown) < len(found.rows) else ""
    told = element("p", slowest.words(), ".") if slowest else None
    return _section("Where the time goes", element("p", note + left), told, element("div", table, class_="wide"))


def _most_busy(found: Heat) -> list[Row]:
    """The rows to show, in order: of too many ranks, or agents, the busiest."""
    shown: list[Row] = []
    for rows in (found.ranks, [row for row in found.rows if row.rank == AGENT]):
        busiest = sorted(rows, key=lambda row: -row.busy_seconds)[:_MOST_RANKS]
        shown += [row for row in rows if any(row is other for other in busiest)]
    return shown


def _cell(seconds: float | None, hottest: float) -> Html:
    if seconds is None:
        return element("td", "")
    share = seconds / hottest if hottest else 0.0
    return element("td", duration(seconds), style=f"--heat:{share * 100:.0f}%")


def _within(saves: Sequence[Save], palette: Palette) -> Html | None:
    done = [save for save in saves if save.is_committed and any(rank.phases for rank in save.record.ranks)]
    if not done:
        return None
    worst = max(done, key=lambda save: save.seconds)
    parts = [_one(worst, "The slowest", palette, True)]
    if done[-1] is not worst:
        parts.append(_one(done[-1], "The newest", palette, False))
    shown = in_order({p.name for save in (worst, done[-1]) for rank in save.record.ranks for p in rank.phases})
    return _section("Within one save", *parts, palette.legend(shown))


def _one(save: Save, which: str, palette: Palette, is_open: bool) -> Html:
    what = f"{which}: step {save.step}, {when(save.began)}, {duration(save.seconds)}"
    return element("details", element("summary", what), lanes(save, palette), open="" if is_open else None)


def _sizes(seen: Overview) -> Html | None:
    if not seen.sizes:
        return None
    last = seen.sizes[-1]
    written, raw = sum(s.new_bytes for s in seen.sizes), sum(s.raw_bytes for s in seen.sizes)
    share = f", {written / raw:.1%} of what the states hold" if raw else ""
    ratio = f", its chunks coded to {last.stored_ratio:.1%}" if last.stored_ratio is not None else ""
    words = f"The newest state, step {last.step}, holds {size(last.raw_bytes)}; its save wrote {size(last.new_bytes)}{ratio}."
    total = f"{counted(len(seen.sizes), 'committed save')} wrote {size(written)}{share}."
    keys = [element("span", element("i", class_=f"key {c}"), n) for c, n in (("new", "written"), ("saved", "not needed"))]
    return _section("Sizes", element("p", words, " ", total), sizes(seen.sizes), element("p", *keys, class_="legend"))


def _troubles(seen: Overview) -> Html | None:
    bad = [save for save in reversed(seen.saves) if not save.is_committed]
    rows = [
        (str(s.step), str(s.attempt), when(s.began), s.record.outcome, duration(s.seconds), s.record.reason)
        for s in bad[:_MOST_TROUBLES]
    ]
    left = [(found["path"], found["state"], found["reason"]) for found in seen.leftovers]
    if not rows and not left:
        return None
    more = f"The newest {_MOST_TROUBLES} of {len(bad)}." if len(bad) > len(rows) else None
    return _section(
        "What was not saved",
        element("p", more) if more else None,
        _table(("step", "attempt", "when", "outcome", "took", "why"), rows) if rows else None,
        element("p", "Directories of saves that did not commit:") if left else None,
        _table(("path", "state", "why"), left) if left else None,
    )


def _recovery(seen: Overview) -> Html:
    words = element("p", " ".join(seen.forecast.words()))
    rows = [(finding.name, finding.status, finding.detail) for finding in seen.forecast.findings]
    return _section("If it died now", words, _table(("looked at", "status", "found"), rows) if rows else None)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Html:
    head = element("tr", *(element("th", title, scope="col") for title in titles))
    body = (element("tr", *(element("td", cell) for cell in row)) for row in rows)
    return element("div", element("table", element("thead", head), element("tbody", join(*body))), class_="wide")
