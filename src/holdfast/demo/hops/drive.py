"""Takes one training through several layouts: starts it under one, kills all its ranks, starts it under the next.

What a step holds is looked at when every process is dead and nothing moves. What the next job made of it is looked at in the
step that its ranks save, under their own layout, before they train on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.demo.drive import Aim, Kill, Plan, Say, Trainer, aims
from holdfast.demo.hops.layout import ONE, Layout
from holdfast.demo.hops.stored import Stored, differences, look
from holdfast.demo.hops.words import shown
from holdfast.demo.journal import Story, samples_of

KILLED_BY = 0.8
"""The last kill falls before this share of the steps is done, so that training does not end before it."""

Samples = dict[int, list[int]]


@dataclass(frozen=True, slots=True)
class Leg:
    """What was trained under one layout, from a start to a kill, or to the end."""

    layout: Layout
    start: int
    """The step it began at."""
    losses: range
    """Which of the story's losses are its own."""
    samples: list[Samples]
    """What each rank read in each step."""
    before: Stored | None = None
    """The newest committed step, as the layout before has stored it; None in the first leg."""
    after: Stored | None = None
    """What the ranks of this layout held when they had resumed."""
    kill: Kill | None = None


@dataclass(frozen=True, slots=True)
class Journey:
    """The whole training, and the same without interruption in one process."""

    plan: Plan
    story: Story
    alone: Story
    alone_samples: Samples
    legs: list[Leg]

    @property
    def ranks(self) -> dict[int, int]:
        """On how many ranks each step was done, the last time that it was."""
        return {self.story.losses[number].step: leg.layout.ranks for leg in self.legs for number in leg.losses}


def travel(plan: Plan, layouts: Sequence[Layout], work: Path, say: Say, tell: Say, progress: Say) -> Journey:
    """Train under each of the layouts in turn, killed between them. `plan.kills` is not read.

    Raises:
        TrainingFailed: a rank ended by itself, or training ended before the last kill.
    """
    run, journal = work / "run", work / "journal"
    legs: list[Leg] = []
    alone_place = work / "alone"
    alone_place.mkdir(parents=True)
    with Trainer(_command(plan, ONE, alone_place), plan, alone_place / "journal", None, progress) as alone:
        for number, (layout, aim) in enumerate(zip(layouts, [*_aims(plan, len(layouts) - 1), None], strict=True)):
            place = work / f"leg{number}"
            place.mkdir()
            before = look(run, legs[-1].kill.committed) if legs and legs[-1].kill else None
            command = _command(plan, layout, place, journal, run)
            with Trainer(command, plan, journal, run, progress) as trainer:
                start, first = trainer.begin(), len(legs) and legs[-1].losses.stop
                after = look(place / "again", start) if before is not None and start else None
                say(_arrival(layout, plan, start, before, after))
                for line in shown(before, after):
                    tell(line)
                kill = trainer.kill(aim) if aim is not None else None
                story = trainer.finish() if kill is None else trainer.story
            samples = [samples_of(place / "samples" / f"rank{rank}") for rank in range(layout.ranks)]
            legs.append(Leg(layout, start, range(first, len(story.losses)), samples, before, after, kill))
            if kill is None:
                break
            whom = f" all {layout.ranks} ranks" if layout.ranks > 1 else ""
            say(f"killed{whom} at step {kill.step}, {kill.place}; step {kill.committed} is the newest committed")
        reference = alone.finish()
    return Journey(plan, story, reference, samples_of(alone_place / "samples" / "rank0"), legs)


def _aims(plan: Plan, kills: int) -> list[Aim]:
    """Where to kill, at the earliest after the first save."""
    early = replace(plan, steps=int(KILLED_BY * plan.steps), kills=kills)
    return [replace(aim, after_step=max(aim.after_step, plan.every + 1)) for aim in aims(early)]


def _command(plan: Plan, layout: Layout, place: Path, journal: Path | None = None, run: Path | None = None) -> list[str]:
    """One process is started as it is; several by torchrun, as users do."""
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={layout.ranks}"]
    torchrun += [f"--log-dir={place}", "-m"]
    command = [sys.executable, "-m", *(torchrun if layout.ranks > 1 else []), "holdfast.demo.hops.train"]
    command += [f"--data={layout.data}", f"--tensor={layout.tensor}", f"--samples={place / 'samples'}"]
    command += [f"--journal={journal or place / 'journal'}", f"--again={place / 'again'}"]
    command += [f"--steps={plan.steps}", f"--every={plan.every}", f"--seed={plan.seed}"]
    return [*command, *([f"--checkpoints={run}"] if run else [])]


def _arrival(layout: Layout, plan: Plan, start: int, before: Stored | None, after: Stored | None) -> str:
    if before is None:
        return f"started on {layout}, saving every {plan.every} steps"
    where = f"resumed at step {start} on {layout}"
    if after is None:
        return f"{where}, with nothing"
    if different := differences(before, after):
        return f"{where}: they differ from what was stored in {len(different)} names"
    return f"{where}: all {len(after.tensors)} tensors have the digests that they were stored with"
