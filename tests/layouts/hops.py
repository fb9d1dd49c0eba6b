"""What the ranks of the matrix do: train and save under one layout; restore, check, save again and train under another.

A hop into a layout is checked in the ranks where it is about live objects (ties, losses), and by the test where it is about
what was stored.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import holdfast

from .jobs import Job
from .layouts import build
from .truth import Tensors, hyper_of, live_tensors, local_of, part_of, put_whole, same_bits, whole_tensors

STEPS_BEFORE, STEPS_AFTER = 2, 5


@dataclass(frozen=True)
class Source:
    """A layout's save, and what torch says was saved."""

    layout: str
    run: Path
    truth: Path


@dataclass
class Hop:
    """What one rank saw when a source was restored."""

    wrong: list[str]
    """Live tensors that do not hold what torch gathered under the source."""
    is_tied: bool
    keeps_its_tensors: bool
    """The model's tensors and the optimizer's parameters are the objects that they were."""
    losses: list[float]
    expected: list[float]
    hyper: Any
    expected_hyper: Any


def save_source(layout: str, run: str, large: bool) -> tuple[Tensors, Any]:
    """Train and save; returns whole tensors as torch gathers them, and what is not a tensor."""
    job = build(layout, 1, large)
    job.train(STEPS_BEFORE)
    whole, hyper = whole_tensors(job), hyper_of(job)
    holdfast.save(run, holdfast.State(rng=False, **job.roles), STEPS_BEFORE)
    return whole, hyper


def hop_into(layout: str, sources: Sequence[Source], again: str, large: bool) -> list[Hop | str]:
    """Restore each source into one job of a layout; what was restored is saved into the directory `again`.

    A hop that raises gives its traceback, and the others go on.
    """
    job = build(layout, 2, large)
    hops: list[Hop | str] = []
    for at, source in enumerate(sources):
        try:
            hops.append(_hop(job, source, f"{again}/{source.layout}", is_fresh=at % 2 == 0))
        except Exception:
            hops.append(traceback.format_exc())
    return hops


def _hop(job: Job, source: Source, again: str, is_fresh: bool) -> Hop:
    _spoil(job, is_fresh)
    truth, hyper = torch.load(source.truth, mmap=True)
    before = _objects(job)
    state = holdfast.State(rng=False, **job.roles)
    holdfast.restore(source.run, state)
    wrong, is_tied, now = wrong_tensors(job, truth), job.is_tied(), hyper_of(job)
    keeps = before == _objects(job)
    holdfast.save(again, state, STEPS_BEFORE)
    losses = job.train(STEPS_AFTER)
    put_whole(job, truth, hyper)
    return Hop(wrong, is_tied, keeps, losses, job.train(STEPS_AFTER), now, hyper)


def wrong_tensors(job: Job, truth: Tensors) -> list[str]:
    """Names of live tensors whose local part is not the part of the truth."""
    return [name for name, tensor in live_tensors(job).items() if not same_bits(local_of(tensor), part_of(truth[name], tensor))]


def _spoil(job: Job, is_fresh: bool) -> None:
    """Leave nothing in a job that a restore could be right by: other weights, other moments or none."""
    if is_fresh:
        for optimizer in job.optimizers:
            optimizer.state.clear()
    with torch.no_grad():
        for tensor in live_tensors(job).values():
            local_of(tensor).fill_(77)
    job.progress.update(step=77, name="spoilt")
    for group in [group for alike in job.groups for group in alike]:
        group["lr"] = 77.0


def _objects(job: Job) -> dict[str, int]:
    """The identity of the model's tensors; moments may be made anew."""
    return {name: id(tensor) for name, tensor in _model_tensors(job).items()}


def _model_tensors(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model in job.models:
        found |= dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    return found
