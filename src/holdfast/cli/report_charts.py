"""The pictures of a report, as SVG: saves as columns by phase, sizes, and what each rank did within one save.

Each mark has a title with its numbers, which browsers show under the pointer. Colours are classes; the page says what they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..run.timings import AGENT, RankPhases
from .amounts import duration, size, when
from .markup import Html, element, join
from .overview import Size
from .saves import UNACCOUNTED, Save

WIDTH, HEIGHT = 1000.0, 240.0
_LEFT, _TOP, _BOTTOM = 70.0, 18.0, 34.0
_MOST_COLUMNS = 200
_MOST_LANES = 48
_LANE = 18.0
_LABEL = 170.0
_FAR = 4.0
"""What is so many times as high as nearly all others is cut off, with its number above it."""
_LABEL_EACH = 90.0
"""Labels below columns stand no closer than this."""
_LEAST = 1e-6
"""Of seconds: anything shorter is not to be seen."""
_COLOURS = 10


class Palette:
    """A colour, as the name of a class, for each phase."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = [name for name in names if name != UNACCOUNTED]

    def __getitem__(self, name: str) -> str:
        return f"c{self.names.index(name) % _COLOURS}" if name in self.names else "gap"

    def legend(self, names: Sequence[str]) -> Html:
        marks = (element("span", element("i", class_=f"key {self[name]}"), name) for name in names)
        return element("p", *marks, class_="legend")


@dataclass(frozen=True)
class Bar:
    """A column of a chart."""

    parts: Sequence[tuple[str, float]]
    """Class and height of each part, from below."""
    label: str
    """Below it."""
    title: str
    at: float = 0.0
    """When it was, in seconds since 1970; below the label."""
    mark: str = ""
    """The class of its foot, if it has one."""

    @property
    def height(self) -> float:
        return sum(value for _, value in self.parts)


def timeline(saves: Sequence[Save], palette: Palette, since: float | None) -> Html:
    """A column for each save, as high as its wall time. Where there are too many, the slowest of several stands for them.

    Args:
        since: a line stands before the first save that began then or later, in seconds since 1970.
    """
    groups = in_groups(saves)
    turn = None if since is None else next((n for n, group in enumerate(groups) if group[-1].began >= since), None)
    bars = [_save_bar(max(group, key=lambda s: (s.is_failed, s.seconds)), len(group), palette) for group in groups]
    return columns(bars, duration, "wall time of each save, by phase", turn)


def in_groups(saves: Sequence[Save]) -> list[Sequence[Save]]:
    """The saves, so many at a time that there is a column for each group."""
    each = max(math.ceil(len(saves) / _MOST_COLUMNS), 1)
    return [saves[at : at + each] for at in range(0, len(saves), each)]


def _save_bar(save: Save, count: int, palette: Palette) -> Bar:
    record = save.record
    lines = [f"step {save.step}, attempt {save.attempt}: {record.outcome}", f"{when(save.began)}, {duration(save.seconds)}"]
    lines += [f"{name}: {duration(seconds)}" for name, seconds in save.own_seconds.items()]
    if save.blocked_seconds:
        lines.append(f"training held up: {duration(save.blocked_seconds)}")
    if record.reason:
        lines.append(record.reason)
    if count > 1:
        lines.append(f"(for {count} saves)")
    mark = "failed" if save.is_failed else "" if save.is_committed else "skipped"
    parts = [(palette[name], seconds) for name, seconds in save.own_seconds.items()]
    return Bar(parts, str(save.step), "\n".join(lines), save.began, mark)


def sizes(found: Sequence[Size]) -> Html:
    """A column for each committed save: what it wrote, and what it did not need to."""
    each = max(math.ceil(len(found) / _MOST_COLUMNS), 1)
    return columns([_size_bar(one) for one in found[::each]], size, "bytes of each committed save")


def _size_bar(one: Size) -> Bar:
    ratio = "" if one.stored_ratio is None else f"\ncoded to {one.stored_ratio:.1%}"
    title = f"step {one.step}, attempt {one.attempt}\nstate {size(one.raw_bytes)}\nwritten {size(one.new_bytes)}{ratio}"
    return Bar([("new", one.new_bytes), ("saved", max(one.raw_bytes - one.new_bytes, 0))], str(one.step), title, one.at)


def columns(bars: Sequence[Bar], words: Callable[[float], str], label: str, turn: int | None = None) -> Html:
    """A chart of columns side by side.

    Args:
        words: says an amount. label: what the chart shows, for who does not see it. turn: a line stands before this column.
    """
    top = _top([bar.height for bar in bars])
    base, scale = HEIGHT - _BOTTOM, (HEIGHT - _BOTTOM - _TOP) / top
    pitch = min((WIDTH - _LEFT) / max(len(bars), 1), _LABEL_EACH)
    drawn = [_grid(value, base - value * scale, words) for value in _ticks(top)]
    every = max(math.ceil(_LABEL_EACH / pitch), 1)
    for number, bar in enumerate(bars):
        x = _LEFT + number * pitch
        drawn.append(_column(bar, x, pitch, base, scale, top, words))
        if number % every == 0:
            drawn.append(element("text", bar.label, x=x + pitch / 2, y=base + 16, text_anchor="middle"))
            drawn.append(element("text", _moment(bar.at), x=x + pitch / 2, y=base + 29, text_anchor="middle"))
    if turn is not None:
        x = _LEFT + turn * pitch
        drawn.append(element("line", x1=x, x2=x, y1=_TOP - 8, y2=base, class_="turn"))
    drawn.append(element("text", "step", x=_LEFT - 8, y=base + 16, text_anchor="end"))
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", aria_label=label)


def _column(bar: Bar, x: float, pitch: float, base: float, scale: float, top: float, words: Callable[[float], str]) -> Html:
    width, y, room = max(pitch * 0.86, 0.8), base, top
    drawn = [element("title", bar.title), element("rect", x=x, y=_TOP, width=pitch, height=base - _TOP, class_="hit")]
    for colour, value in bar.parts:
        height = min(value, room) * scale
        room -= min(value, room)
        y -= height
        if height > 0:
            drawn.append(element("rect", x=x, y=y, width=width, height=height, class_=colour))
    if bar.height > top:
        drawn.append(element("text", f"↑ {words(bar.height)}", x=x + width / 2, y=_TOP - 6, text_anchor="middle"))
    if bar.mark:
        drawn.append(element("rect", x=x, y=base + 1, width=width, height=4.0, class_=bar.mark))
    return element("g", *drawn)


def _grid(value: float, y: float, words: Callable[[float], str]) -> Html:
    line = element("line", x1=_LEFT, x2=WIDTH, y1=y, y2=y, class_="grid")
    return join(line, element("text", words(value), x=_LEFT - 8, y=y + 4, text_anchor="end"))


def _moment(at: float) -> str:
    return time.strftime("%d %b %H:%M", time.localtime(at))


def _top(values: Sequence[float]) -> float:
    """How high the chart is: as the highest column, unless that one is far above nearly all others."""
    ordered = sorted(value for value in values if value >= _LEAST)
    if not ordered:
        return 1.0
    usual = ordered[int(0.9 * (len(ordered) - 1))]
    return ordered[-1] if ordered[-1] <= _FAR * usual else 1.5 * usual


def _ticks(top: float) -> list[float]:
    """Three to six round amounts from 0 to `top`."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    each = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.99)
    return [each * n for n in range(int(top / each * 1.0001) + 1)]


def lanes(save: Save, palette: Palette) -> Html:
    """What each rank did within a save, over its wall time. Of very many ranks, those that were at work longest."""
    record = save.record
    rows = _rows(record.ranks)
    height = _TOP + _LANE * len(rows) + _BOTTOM
    begin = min([record.began, *(p.start for _, phases in rows for p in phases.phases)])
    end = max([record.ended, *(p.start + p.seconds for _, phases in rows for p in phases.phases)])
    span = max(end - begin, _LEAST)
    scale = (WIDTH - _LABEL) / span
    drawn = []
    for value in _ticks(span):
        x = _LABEL + value * scale
        drawn.append(element("line", x1=x, x2=x, y1=_TOP, y2=height - _BOTTOM, class_="grid"))
        drawn.append(element("text", duration(value), x=x, y=height - _BOTTOM + 16, text_anchor="middle"))
    for number, (name, one) in enumerate(rows):
        y = _TOP + number * _LANE
        drawn.append(element("text", name, x=_LABEL - 8, y=y + _LANE * 0.7, text_anchor="end"))
        for phase in one.phases:
            title = f"{name}: {phase.name}, {duration(phase.seconds)}" + (f", {size(phase.nbytes)}" if phase.nbytes else "")
            box = {"x": _LABEL + (phase.start - begin) * scale, "width": max(phase.seconds * scale, 0.8)}
            mark = element("rect", element("title", title), y=y + 1, height=_LANE - 3, class_=palette[phase.name], **box)
            drawn.append(mark)
    label = f"what each rank did in the save of step {save.step}"
    return element("svg", *drawn, viewBox=f"0 0 {WIDTH:g} {height:g}", role="img", aria_label=label)


def _rows(ranks: Sequence[RankPhases]) -> list[tuple[str, RankPhases]]:
    """A row for each rank and lane."""
    longest = sorted(ranks, key=lambda rank: (rank.rank != AGENT, -sum(p.seconds for p in rank.phases)))[:_MOST_LANES]
    rows = []
    for rank in sorted(longest, key=lambda rank: (rank.rank == AGENT, rank.rank, rank.node)):
        for lane in sorted({phase.lane for phase in rank.phases}):
            name = "agent" if rank.rank == AGENT else f"rank {rank.rank}"
            label = " ".join(part for part in (name, lane, f"({rank.node})" if rank.node else "") if part)
            phases = tuple(phase for phase in rank.phases if phase.lane == lane)
            rows.append((label if len(label) <= 28 else f"{label[:27]}…", RankPhases(rank.rank, rank.node, phases)))
    return rows
