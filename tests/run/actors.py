"""Actors: what processes do to one run, each in two parts. First it makes ready; what it returns is then interleaved.

The run they meet holds the steps 100, 200 and 300 of attempt 1, with the states 1, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.policy.keep import Keep
from holdfast.run.history import History
from holdfast.run.prune import remove_steps
from holdfast.run.session import Session
from holdfast.runs import Run
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore

from .world import FROZEN, LIBRARIES, MOMENT, WEIGHT, arrays, contents, number_in, read, save

NUMBERS = {100: 1, 200: 2, 300: 3, 400: 4}
"""Step to state, of all that the actors save but for `saves_something_else`."""


def three_steps() -> Store:
    store = MemoryStore()
    save(store, (100, 1), (200, 2), (300, 3))
    return store


def saves(store: Store) -> Callable[[], Any]:
    """Goes on from step 300, whose file of frozen weights it may refer to, and saves step 400."""
    session = Session(store, LIBRARIES)
    return lambda: session.save(contents(4), 400).step


def restarts_and_saves(store: Store) -> Callable[[], Any]:
    return lambda: Session(store, LIBRARIES).save(contents(4), 400).attempt


def saves_something_else(store: Store) -> Callable[[], Any]:
    """Another job, of the same steps, with other states."""
    return lambda: Session(store, LIBRARIES).save(contents(40), 400).attempt


def saves_and_prunes(store: Store) -> Callable[[], Any]:
    session, run = Session(store, LIBRARIES), Run(store)

    def act() -> int:
        session.save(contents(4), 400)
        run.prune(Keep(last=1))
        return 400

    return act


def prunes(store: Store) -> Callable[[], Any]:
    """Keeps the newest step only."""
    run = Run(store)
    run.steps()
    return lambda: run.prune(Keep(last=1)).removed


def prunes_less(store: Store) -> Callable[[], Any]:
    run = Run(store)
    return lambda: run.prune(Keep(last=2)).removed


def removes_all(store: Store) -> Callable[[], Any]:
    """Deletes whatever step there is, also the one that the next save would refer to."""
    history = History(store)
    victims = history.look().steps
    return lambda: remove_steps(history, victims).steps


def ages(store: Store) -> Callable[[], Any]:
    """Keeps all steps, the older ones without their optimizer state."""
    run = Run(store)
    return lambda: run.prune(Keep(last=None, weights=1)).weights_only


def reads_200(store: Store) -> Callable[[], Any]:
    return lambda: read(store, 200)


def reads_latest(store: Store) -> Callable[[], Any]:
    return lambda: read(store)


def holds_200_and_reads(store: Store) -> Callable[[], Any]:
    run = Run(store)
    run.steps()

    def act() -> Any:
        with run.hold(200):
            try:
                return read(store, 200)
            except Exception as error:
                return f"held, and then {error!r}"

    return act


def pins_200(store: Store) -> Callable[[], Any]:
    run = Run(store)
    run.steps()

    def act() -> str:
        run.pin(200, "good")
        return "pinned"

    return act


def rolls_back_to_200(store: Store) -> Callable[[], Any]:
    run = Run(store)
    return lambda: run.rollback(200)


def resumes(store: Store) -> Callable[[], Any]:
    """A job that starts while another may still be at work; returns the state that it goes on from, 0 for none."""
    import torch

    from holdfast import Checkpointer

    zeros = {name: torch.zeros(array.shape) for name, array in arrays(0).items()}
    state = {
        "model": {"frozen": zeros[FROZEN], "weight": zeros[WEIGHT]},
        "optimizer": {"weight": {"exp_avg": zeros[MOMENT]}},
        "progress": {"number": 0},
    }
    checkpointer = Checkpointer(store, state)

    def act() -> int:
        checkpointer.resume()
        number = state["progress"]["number"]
        whole = arrays(number) if number else {name: array * 0 for name, array in arrays(0).items()}
        for name, tensor in zeros.items():
            assert tensor.numpy().tobytes() == whole[name].tobytes(), f"{name} is not that of the state {number}"
        return number

    return act


def copies_200(store: Store) -> Callable[[], Any]:
    def act() -> int:
        target = MemoryStore()
        Run(store).copy(200, target)
        return read(target, 200)

    return act


def opens_200_and_reads_later(store: Store) -> Callable[[], Any]:
    """Opens the step before the others begin, and reads it while they are at work."""
    import holdfast

    checkpoint = holdfast.open(store, step=200)

    def act() -> int:
        with checkpoint:
            return number_in(checkpoint)

    return act


ACTORS: dict[str, Callable[[Store], Callable[[], Any]]] = {
    made.__name__.replace("_", " "): made
    for made in (
        saves, restarts_and_saves, saves_something_else, saves_and_prunes, prunes, prunes_less, removes_all, ages, reads_200,
        reads_latest, holds_200_and_reads, pins_200, rolls_back_to_200, resumes, copies_200, opens_200_and_reads_later,
    )
}  # fmt: skip
