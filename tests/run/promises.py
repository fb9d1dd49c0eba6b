"""The promises of a run, as what must be true once several actors have been at work on it in some order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import HoldfastError, NoCheckpoint, Refused, Run, Superseded, Unavailable
from holdfast.store.base import Store

from .actors import ACTORS, NUMBERS, three_steps
from .schedules import Actor, Make, Scenario
from .world import committed, copy_of

RIGHT = {
    "reads 200": {2},
    "holds 200 and reads": {2},
    "copies 200": {2},
    "opens 200 and reads later": {2},
    "reads latest": {3, 4},
    "resumes": {3, 4},
}
"""What readers may return, by actor."""

MAY_FAIL: dict[str, tuple[type[HoldfastError], ...]] = {
    **dict.fromkeys(
        ("reads 200", "holds 200 and reads", "copies 200", "pins 200", "pins 200 too", "rolls back to 200"), (NoCheckpoint,)
    ),
    **dict.fromkeys(("saves", "saves and prunes", "restarts and saves", "saves something else"), (Superseded, Refused)),
    "saves but hears no answer": (Unavailable,),
}
"""How actors may fail: what is pruned is no checkpoint, and one of two jobs must stop. Nobody else may fail at all."""


def scenario(*names: str, keeps: set[int], more: Mapping[str, Make] | None = None) -> Scenario:
    """Actors on a run of three steps, judged by all promises; `keeps`: steps that must be there in the end whatever happens."""
    begin = three_steps()
    known = {**ACTORS, **(more or {})}

    def judge(store: Store, actors: Mapping[str, Actor]) -> list[str]:
        there = committed(store)
        steps = {step for step, _ in there}
        lines = [
            f"step {step} of attempt {attempt} is {what}" for (step, attempt), what in there.items() if isinstance(what, str)
        ]
        lines += [f"step {step} holds the state {n}" for (step, _), n in there.items() if n not in (NUMBERS[step], 40, f"{n}")]
        lines += [f"step {step} is gone" for step in sorted(keeps - steps)]
        for name, actor in actors.items():
            if actor.error is None:
                lines += promises_broken(name, actor.result, store, steps)
            elif not isinstance(actor.error, MAY_FAIL.get(name, ())):
                lines.append(f"{name} raised {actor.error!r}")
        return lines

    return Scenario(lambda: copy_of(begin), {name: known[name] for name in names}, judge)


def promises_broken(name: str, result: Any, store: Store, steps: set[int]) -> list[str]:
    """What is wrong after an actor has returned `result`."""
    run = Run(store)
    newest = run.latest()
    if newest is None and name != "removes all":
        return ["nothing is left of the run"]
    if name in RIGHT and result not in RIGHT[name]:
        return [f"{name}: {result}"]
    if name in ("saves", "saves and prunes") and 400 not in steps:
        return ["step 400 was announced and is gone"]
    if name.startswith("pins") and not any("good" in step.pins for step in run.steps(abandoned=True)):
        return ["step 200 was pinned and is gone"]
    if name.startswith("rolls back") and (newest is None or newest.step != 200):
        return [f"rolled back to step 200, and the newest is {newest}"]
    return []
