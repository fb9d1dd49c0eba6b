"""Outcomes of a call that ranks make together, and the judgement: one outcome for all, in time, and the run intact."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import holdfast
from holdfast import HoldfastError

from .states import whole, wrong_tensors

SLACK_SECONDS = 2.5
"""What a call may take beyond its deadline: one look at the store and at the board, on a machine with other work."""
MEET_SECONDS = 45.0


@dataclass(frozen=True)
class Outcome:
    """What a call ended with on one rank."""

    step: int | None
    """The step that was committed, or that was loaded; None after an error."""
    error: str = ""
    """Name of the class, as users know it."""
    text: str = ""
    seconds: float = 0.0

    @property
    def is_error(self) -> bool:
        return self.step is None


def tried(call: Callable[[], Any]) -> Outcome:
    """The outcome of a call that returns a Handle, a Ledger, or a step."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call()
    except HoldfastError as error:
        kind = next(base.__name__ for base in type(error).__mro__ if base.__name__ in holdfast.__all__)
        return Outcome(None, kind, str(error), time.monotonic() - start)
    return Outcome(getattr(result, "step", result), seconds=time.monotonic() - start)


def meet(directory: Path, name: str, rank: int, ranks: Iterable[int]) -> None:
    """Wait until all of `ranks` have come here. Through files: it works whatever else is gone."""
    (directory / f"{name}.{rank}").touch()
    until = time.monotonic() + MEET_SECONDS
    missing = list(ranks)
    while missing := [r for r in missing if not (directory / f"{name}.{r}").exists()]:
        if time.monotonic() > until:
            raise AssertionError(f"rank {rank} waited {MEET_SECONDS:.0f} s at {name!r} for {missing}")
        time.sleep(0.01)


def judge_outcomes(outcomes: Sequence[Outcome], deadline: float, late: Sequence[int] = ()) -> list[str]:
    """In which way outcomes of one call are not one outcome, in time. `late`: those that the fault itself holds up."""
    wrong = []
    if len({o.step for o in outcomes}) > 1:
        wrong.append("not one outcome")
    slow = [o.seconds for number, o in enumerate(outcomes) if number not in late and o.seconds > deadline + SLACK_SECONDS]
    if slow:
        wrong.append(f"took {max(slow):.1f} s, the deadline is {deadline:g} s")
    wrong += [f"{o.error} is no answer" for o in outcomes if o.error == "HoldfastError"]
    return [f"{line}: {[(o.step, o.error, o.text, round(o.seconds, 1)) for o in outcomes]}" for line in wrong]


def judge_run(run: Path, steps: dict[int, dict[str, Any]]) -> list[str]:
    """In which way a run does not hold exactly these steps, intact and right in every bit."""
    found = [step.step for step in holdfast.Run(run).steps()]
    wrong = [] if found == sorted(steps) else [f"the run has the steps {found}, not {sorted(steps)}"]
    for step in found:
        with contextlib.suppress(KeyError):
            wrong += [f"step {step}: {line}" for line in wrong_tensors(run, step, steps[step])]
    return wrong


def judge_story(
    run: Path, world: int, first: Sequence[Outcome], then: Sequence[Outcome], deadline: float, **more: Any
) -> list[str]:
    """Step 1 was saved by all; `first` are the outcomes of step 2 under a fault, `then` those of step 3 without one.

    Args:
        more: `late`: see above; `live`: the ranks that saved step 3; all, if it is not given.
    """
    live = more.pop("live", None)
    everybody = list(range(world))
    wrong = judge_outcomes(first, deadline, **more)
    wrong += [f"after it: {line}" for line in judge_outcomes(then, deadline)]
    if {o.step for o in then} != {3}:
        wrong.append(f"training does not go on: {list(then)}")
    steps = {1: whole(1, everybody), 3: whole(3, live or everybody, sharded=live is None)}
    if all(o.step == 2 for o in first):
        steps[2] = whole(2, everybody)
    return wrong + judge_run(run, steps)
