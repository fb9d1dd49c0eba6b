"""What the processes of one job do when several write a step together: each its part, one of them the decision."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from holdfast.format.records import Commit
from holdfast.run.assemble import build_columns
from holdfast.run.contents import TensorItem
from holdfast.run.cover import prove_cover
from holdfast.run.decide import abort, combine, decide, gather_parts, publish_part
from holdfast.run.files import FilesWriter
from holdfast.run.image import ArraySource
from holdfast.run.parts import Part
from holdfast.store.base import Store
from holdfast.store.local import LocalStore

Box = tuple[tuple[int, ...], tuple[int, ...]]
FOLDER = "steps/0000000100-a0001"
STEP, ATTEMPT = 100, 1
NAME = "model.weight"
SHAPE = (10, 3)


def whole(number: int = 1, shape: Sequence[int] = SHAPE) -> np.ndarray:
    """The tensor that the writers share."""
    return (np.arange(np.prod(shape), dtype=np.float32) * number).reshape(shape)


def item(box: Box, name: str = NAME, number: int = 1, shape: Sequence[int] = SHAPE, dtype: str = "float32") -> TensorItem:
    """A box of the tensor."""
    part = whole(number, shape)[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].astype(dtype)
    source = ArraySource(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    return TensorItem(name, tuple(name.split(".")), dtype, tuple(shape), "model", source, box=box)


def write_part(store: Store, writer: str, items: list[TensorItem], folder: str = FOLDER, values: Sequence[Any] = ()) -> None:
    """What a writer does: its data files, then its index part."""
    placed = FilesWriter(store, folder, writer, STEP, ATTEMPT, None, False, {"format": "pt"}).write(items)
    part = Part(writer=writer, step=STEP, attempt=ATTEMPT, files=placed.owned, values=list(values), roles={"model": "dict"})
    publish_part(store, folder, part, build_columns(items, placed))


def commit(store: Store, run: str, writers: Sequence[str], seconds: float = 10.0, folder: str = FOLDER) -> Commit:
    """What the committer does: wait for all, prove, decide."""
    parts = gather_parts(store, folder, writers, time.monotonic() + seconds)
    record = Commit(decision="committed", run=run, step=STEP, attempt=ATTEMPT, created=time.time())
    record, index, _ = combine(record, parts, folder)
    prove_cover(index)
    return decide(store, folder, record)


def give_up(store: Store, run: str, folder: str = FOLDER) -> None:
    """What anybody does who has waited for too long."""
    abort(store, folder, Commit(decision="aborted", run=run, step=STEP, attempt=ATTEMPT, created=time.time()), "gave up waiting")


def call(name: str, options: dict[str, Any]) -> Any:
    """A function of this page, for a process that is told so; its error by name."""
    store, pause = LocalStore(options["path"]), options.get("pause", 0.0)
    calls: dict[str, Callable[[], Any]] = {
        "write_part": lambda: write_part(store, options["writer"], [item(options["box"])]),
        "commit": lambda: commit(store, options["run"], options["writers"], options.get("seconds", 10.0)).decision,
        "give_up": lambda: give_up(store, options["run"]),
    }
    time.sleep(pause)
    try:
        return calls[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
