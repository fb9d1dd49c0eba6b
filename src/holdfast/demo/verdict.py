"""Compares an interrupted run with an uninterrupted one, bit by bit, and says where they differ."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.demo.drive import Storm
from holdfast.demo.journal import Story


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found."""

    compared: int
    """Losses of the interrupted run that were compared, those of steps done again included."""
    repeated: int
    """How many of them came from doing a step again."""
    differences: tuple[str, ...]
    """A sentence for each; empty when the two runs are bit-equal and no committed step was lost."""


def judge(calm: Story, storm: Storm, steps: int) -> Verdict:
    """Compare all losses and the final states, and what each restart resumed with what had been committed."""
    expected = {loss.step: loss.loss for loss in calm.losses}
    done = [loss.step for loss in storm.story.losses]
    return Verdict(
        compared=len(done),
        repeated=len(done) - len(set(done)),
        differences=(
            *_absent("the uninterrupted run", set(expected), steps),
            *_absent("the interrupted run", set(done), steps),
            *(
                f"step {loss.step}: the loss is {loss.loss}, uninterrupted {expected.get(loss.step)}"
                for loss in storm.story.losses
                if loss.loss != expected.get(loss.step)
            ),
            *_lost_commits(storm),
            *_final_state(calm, storm.story),
        ),
    )


def _absent(whose: str, done: set[int], steps: int) -> list[str]:
    return [f"{whose} has no loss for step {step}" for step in range(1, steps + 1) if step not in done]


def _lost_commits(storm: Storm) -> list[str]:
    resumed = [step for step, _ in storm.story.starts[1:]]
    return [
        f"step {kill.committed} was committed, and the start after the kill at step {kill.step} resumed at {start}"
        for kill, start in zip(storm.kills, resumed, strict=True)
        if start < kill.committed
    ]


def _final_state(calm: Story, storm: Story) -> list[str]:
    if calm.digest is not None and calm.digest == storm.digest:
        return []
    return [f"the digest of the final state is {storm.digest}, uninterrupted {calm.digest}"]
