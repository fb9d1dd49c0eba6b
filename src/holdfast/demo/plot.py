"""Draws what happened: the loss curves with the kills marked, and the interrupted run's way through time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.demo.drive import Kill, Storm
from holdfast.demo.hops.drive import Journey
from holdfast.demo.journal import Loss, Story
from holdfast.errors import HoldfastError

CALM, STORM, IN_TRAINING, IN_SAVE = "#9ecae1", "#08306b", "#fd8d3c", "#cb181d"


class NoMatplotlib(HoldfastError):
    """The picture needs matplotlib, which is not installed; nothing else of the demo does."""


def plot(target: Path, one: tuple[Story, Storm] | None, journey: Journey | None = None) -> None:
    """Write a PNG of the uninterrupted and the interrupted training in one process, or of the journey, or of both.

    Raises:
        NoMatplotlib: it cannot be imported.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("no picture: matplotlib is not installed; `pip install matplotlib`, and run again") from error
    heights = [*((3, 2) if one else ()), *((3,) if journey else ())]
    figure = Figure(figsize=(10, 2.4 * len(heights) + 1), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    if one:
        _losses(panels.pop(0), *one)
        _way(panels.pop(0), one[1])
    if journey:
        _journey(panels.pop(0), journey)
    figure.savefig(target, dpi=120)


def _losses(axes: Any, calm: Story, storm: Storm) -> None:
    """Both curves, and where the kills fell."""
    _line(axes, calm.losses, color=CALM, lw=5, label="uninterrupted")
    _line(axes, storm.story.losses, color=STORM, lw=1, label="killed and resumed")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training, with and without being killed")
    _mark(axes, storm.kills)
    axes.legend(frameon=False)


def _way(axes: Any, storm: Storm) -> None:
    """The interrupted run's way through time."""
    story, began = storm.story, storm.story.starts[0][1]
    axes.plot([at.time - began for at in story.losses], [at.step for at in story.losses], ".", ms=2, color=STORM)
    axes.set(xlabel="seconds since the first start", ylabel="step")
    for begin, when in story.starts[1:]:
        axes.plot(when - began, begin, ">", color=STORM, ms=6)
    for kill in storm.kills:
        axes.plot(kill.time - began, kill.step, "X", color=_look(kill)[0], ms=8)
    axes.plot([], [], ">", color=STORM, label="resumed")
    axes.legend(frameon=False, loc="lower right")


def _journey(axes: Any, journey: Journey) -> None:
    """One curve over all layouts, in a colour for each, above that of the training that was left alone."""
    _line(axes, journey.alone.losses, color=CALM, lw=5, label="1 process, uninterrupted")
    for number, leg in enumerate(journey.legs):
        _line(axes, [journey.story.losses[n] for n in leg.losses], color=f"C{number + 1}", lw=1.2, label=str(leg.layout))
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="One training under several layouts, killed in between")
    _mark(axes, [leg.kill for leg in journey.legs if leg.kill])
    axes.legend(frameon=False)


def _line(axes: Any, losses: Sequence[Loss], **style: Any) -> None:
    last = {at.step: value(at.loss) for at in losses}
    axes.plot(list(last), list(last.values()), **style)


def _mark(axes: Any, kills: Sequence[Kill]) -> None:
    labelled = set()
    for kill in kills:
        color, label = _look(kill)
        axes.axvline(kill.step, color=color, lw=1.2, ls="--", label=None if label in labelled else label)
        labelled.add(label)


def _look(kill: Kill) -> tuple[str, str]:
    return (IN_TRAINING, "SIGKILL while training") if kill.cut_save is None else (IN_SAVE, "SIGKILL inside a save")


def value(loss: str) -> float:
    return float.fromhex(loss)
