"""Draws what happened: both loss curves with the kills marked, and the interrupted run's way through time."""

from __future__ import annotations

from pathlib import Path

from holdfast.demo.drive import Storm
from holdfast.demo.journal import Story
from holdfast.errors import HoldfastError

CALM, STORM, IN_TRAINING, IN_SAVE = "#9ecae1", "#08306b", "#fd8d3c", "#cb181d"


class NoMatplotlib(HoldfastError):
    """The picture needs matplotlib, which is not installed; nothing else of the demo does."""


def plot(calm: Story, storm: Storm, target: Path) -> None:
    """Write a PNG.

    Raises:
        NoMatplotlib: it cannot be imported.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("no picture: matplotlib is not installed; `pip install matplotlib`, and run again") from error
    figure = Figure(figsize=(10, 7), layout="constrained")
    losses, way = figure.subplots(2, 1, height_ratios=(3, 2))
    story, began = storm.story, storm.story.starts[0][1]

    losses.plot([at.step for at in calm.losses], [value(at.loss) for at in calm.losses], color=CALM, lw=5, label="uninterrupted")
    last = {at.step: value(at.loss) for at in story.losses}
    losses.plot(list(last), list(last.values()), color=STORM, lw=1, label="killed and resumed")
    losses.set(xlabel="step", ylabel="loss (nats per byte)", title="The same training, with and without being killed")

    way.plot([at.time - began for at in story.losses], [at.step for at in story.losses], ".", ms=2, color=STORM)
    way.set(xlabel="seconds since the first start", ylabel="step")
    for begin, when in story.starts[1:]:
        way.plot(when - began, begin, ">", color=STORM, ms=6)

    labelled = set()
    for kill in storm.kills:
        color, label = (IN_TRAINING, "SIGKILL while training") if kill.cut_save is None else (IN_SAVE, "SIGKILL inside a save")
        losses.axvline(kill.step, color=color, lw=1.2, ls="--", label=None if label in labelled else label)
        way.plot(kill.time - began, kill.step, "X", color=color, ms=8)
        labelled.add(label)
    way.plot([], [], ">", color=STORM, label="resumed")
    losses.legend(frameon=False)
    way.legend(frameon=False, loc="lower right")
    for axes in (losses, way):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, dpi=120)


def value(loss: str) -> float:
    return float.fromhex(loss)
