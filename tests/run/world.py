"""A small run without torch, whose states are made from one number each, so that whatever is read can be told apart.

Every state has weights that never change, which later steps leave in the file of the first, and weights and optimizer state
that differ from number to number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import holdfast
from holdfast.loading.checkpoint import Checkpoint
from holdfast.policy.keep import Keep
from holdfast.run.contents import Contents, TensorItem
from holdfast.run.history import History
from holdfast.run.image import ArraySource
from holdfast.run.session import Session
from holdfast.runs import Run
from holdfast.store.base import Store
from holdfast.store.memory import MemoryStore

FROZEN, WEIGHT, MOMENT = "model.frozen", "model.weight", "optimizer.weight.exp_avg"
LIBRARIES = {"holdfast": "test"}


class WrongBytes(AssertionError):
    """What was read is not what was saved."""


def arrays(number: int) -> dict[str, np.ndarray]:
    """The tensors of the state `number`."""
    return {
        FROZEN: np.arange(48, dtype=np.float32),
        WEIGHT: np.full(8, number, np.float32),
        MOMENT: np.full((2, 4), -number, np.float32),
    }


def contents(number: int) -> Contents:
    """The state `number`, as a save is given it."""
    items = [
        TensorItem(
            name,
            tuple(name.split(".")),
            "float32",
            array.shape,
            name.split(".")[0],
            ArraySource(array.view(np.uint8).reshape(-1)),
        )
        for name, array in arrays(number).items()
    ]
    roles = {"model": "module", "optimizer": "optimizer", "progress": "object"}
    return Contents(items, [[["progress", "number"], number]], {}, roles)


def save(store: Store, *steps: tuple[int, int]) -> Session:
    """Open a session and save (step, number) pairs."""
    session = Session(store, LIBRARIES)
    for step, number in steps:
        session.save(contents(number), step)
    return session


def number_in(checkpoint: Checkpoint) -> int:
    """The number that an open checkpoint holds in all its bytes.

    Raises:
        WrongBytes: it holds no state whole.
    """
    number = checkpoint.values["progress.number"]
    wanted = arrays(number)
    if checkpoint.commit.kind == "partial":
        wanted = {name: array for name, array in wanted.items() if name != MOMENT}
    if checkpoint.names != sorted(wanted):
        raise WrongBytes(f"step {checkpoint.step} has the tensors {checkpoint.names}")
    for name, array in wanted.items():
        if checkpoint.read_bytes(checkpoint.tensor(name)).tobytes() != array.tobytes():
            raise WrongBytes(f"{name} of step {checkpoint.step} is not that of the state {number}")
    return number


def read(store: Store, at: str | int | None = None) -> int:
    """Open a step as a user does, and read all of it; returns its number."""
    with holdfast.open(store, step=None if at is None else Run(store).find(at).step) as checkpoint:
        return number_in(checkpoint)


def committed(store: Store) -> dict[tuple[int, int], int | str]:
    """(step, attempt) to number of every committed step, abandoned ones too; or, in its place, what is wrong with it."""
    from holdfast.api import open_and_lock

    found: dict[tuple[int, int], int | str] = {}
    for step in History(store).look().steps:
        try:
            with open_and_lock(store, step) as checkpoint:
                found[step.step, step.attempt] = number_in(checkpoint)
        except (holdfast.HoldfastError, FileNotFoundError, WrongBytes) as error:
            found[step.step, step.attempt] = f"{type(error).__name__}: {error}"
    return found


def damage(store: Store) -> list[str]:
    """One line for each committed step that does not load whole."""
    return [
        f"step {step} of attempt {attempt}: {what}" for (step, attempt), what in committed(store).items() if isinstance(what, str)
    ]


def files(store: Store, folder: str = "") -> list[str]:
    """All files below a folder, except the store's own."""
    found = []
    for name in store.list(folder):
        path = f"{folder}/{name}".lstrip("/")
        found += files(store, path.rstrip("/")) if name.endswith("/") else [path]
    return found


def copy_of(store: Store, into: Store | None = None) -> Store:
    """The same files in another store, by default in memory."""
    into = into or MemoryStore()
    for path in files(store):
        into.create(path, store.read(path), sync=False)
    return into


def steps_of(store: Store) -> list[int]:
    return [s.step for s in Run(store).steps()]


def prune(store: Store, keep: Keep | None = None) -> list[int]:
    """Prune to the newest step, or as told; returns the steps that went."""
    return Run(store).prune(keep or Keep(last=1)).removed


def new_directory(store: Store, path: Path) -> Path:
    """A directory with the files of `store`, quicker than saves are."""
    for name in files(store):
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(store.read(name))
    return path
