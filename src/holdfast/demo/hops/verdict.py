"""Compares a training that changed its layout with one that did not: states, samples, losses.

The state must be equal in every bit at each hop, and the samples must be the same ones in the same order. The losses are equal
within a tolerance only: another layout adds the same numbers in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.demo.hops.drive import Journey, Leg
from holdfast.demo.hops.layout import BATCH, SAMPLES
from holdfast.demo.hops.stored import differences
from holdfast.demo.journal import Loss

TOLERANCE = 1e-3
"""Relative, for a loss in float32. What is seen is 1e-7 or so; a step, a batch or the moments of Adam lost show far above it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found."""

    differences: tuple[str, ...]
    """A sentence for each; empty when all is as it must be."""
    tensors: int
    """Of the state."""
    samples: int
    """That were read, steps done again left out."""
    repeated: int
    """Steps done again, from the step resumed at."""
    farthest: float
    """The largest difference between a loss and that of the uninterrupted training, relative."""


def judge(journey: Journey, legs: int) -> Verdict:
    """Judge a journey that was to have so many legs."""
    story, expected = journey.story, losses_of(journey.alone.losses)
    done = [at.step for at in story.losses]
    off = {at.step: abs(float.fromhex(at.loss) / expected[at.step] - 1) for at in story.losses if at.step in expected}
    steps = range(1, journey.plan.steps + 1)
    return Verdict(
        differences=(
            *([f"training ended under layout {len(journey.legs)} of {legs}"] if len(journey.legs) < legs else []),
            *(line for leg in journey.legs for line in _hop(leg)),
            *(f"the uninterrupted training has no loss for step {step}" for step in steps if step not in expected),
            *(f"no layout has a loss for step {step}" for step in steps if step not in done),
            *(f"step {step}: the loss is off by {100 * by:.2g} %" for step, by in off.items() if not by <= TOLERANCE),
            *_order(journey),
            *(line for leg in journey.legs for line in _read(journey, leg)),
        ),
        tensors=max((len(leg.after.tensors) for leg in journey.legs if leg.after), default=0),
        samples=BATCH * len(set(done)),
        repeated=len(done) - len(set(done)),
        farthest=max(off.values(), default=0.0),
    )


def losses_of(losses: list[Loss]) -> dict[int, float]:
    """The last loss of each step."""
    return {at.step: float.fromhex(at.loss) for at in losses}


def _hop(leg: Leg) -> Iterator[str]:
    if leg.before is None:
        return
    if leg.start < leg.before.step:
        yield f"step {leg.before.step} was committed, and {leg.layout} resumed at {leg.start}"
    if leg.after is not None:
        yield from (f"{leg.layout}: {line}" for line in differences(leg.before, leg.after))


def _order(journey: Journey) -> Iterator[str]:
    """The uninterrupted training reads every sample once in each epoch."""
    read = [sample for step in sorted(journey.alone_samples) for sample in journey.alone_samples[step]]
    if len(read) != BATCH * journey.plan.steps:
        yield f"the uninterrupted training has read {len(read)} samples in {journey.plan.steps} steps"
    for epoch in range(len(read) // SAMPLES):
        if sorted(read[epoch * SAMPLES : (epoch + 1) * SAMPLES]) != list(range(SAMPLES)):
            yield f"epoch {epoch} of the uninterrupted training has not every sample once"


def _read(journey: Journey, leg: Leg) -> Iterator[str]:
    """All ranks together read, in each step, what the uninterrupted training read in it."""
    for number in leg.losses:
        step = journey.story.losses[number].step
        shares = [rank.get(step) for rank in leg.samples]
        parts = [shares[first : first + leg.layout.tensor] for first in range(0, leg.layout.ranks, leg.layout.tensor)]
        if any(share != part[0] or share is None for part in parts for share in part):
            yield f"step {step}: the ranks that share samples on {leg.layout} read {shares}"
        elif [sample for part in parts for sample in part[0] or ()] != journey.alone_samples.get(step):
            yield f"step {step}: {leg.layout} read other samples than the uninterrupted training"
