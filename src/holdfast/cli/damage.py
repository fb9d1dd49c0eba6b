"""Finding damage: in a run's records, and in each byte of its steps. Writes nothing, and goes on after what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ..errors import Corrupt, HoldfastError
from ..format.index import NO_DIGEST
from ..format.names import parse_step_dir
from ..format.records import Attempt, Commit, Note, Pin, Record, RunRecord
from ..loading.checkpoint import Checkpoint
from ..loading.reading import Damage
from ..run.history import RUN_FILE, Step, read_record
from ..store.base import Store
from .place import Place, open_found

_FOLDERS: dict[str, type[Record]] = {"attempts": Attempt, "pins": Pin, "notes": Note}


@dataclass
class Checked:
    """What was found in one step."""

    step: int
    attempt: int
    line: str | None
    """lineage or abandoned; None where the records that say so are damaged."""
    bytes: int = 0
    """Stored bytes of its chunks: those that were read."""
    unchecked_bytes: int = 0
    """How many of them have no digest to be checked against, as in the files of others."""
    damages: list[Damage] = field(default_factory=list)
    is_pruned: bool = False
    """Whether it was pruned while it was being opened: then nothing is known of it, and nothing is wrong."""

    @property
    def is_intact(self) -> bool:
        return not self.damages and not self.is_pruned


def check_records(store: Store) -> list[Damage]:
    """The records of the run itself that are missing or whose seal is broken; not those of its steps."""
    paths: list[tuple[str, type[Record]]] = [(RUN_FILE, RunRecord)]
    paths += [(f"{folder}/{name}", kind) for folder, kind in _FOLDERS.items() for name in store.list(folder)]
    damages = []
    for path, kind in paths:
        try:
            found = read_record(store, path, kind)
        except HoldfastError as error:
            damages.append(as_damage(path, error))
        else:
            if found is None and path == RUN_FILE:
                damages.append(Damage(path, "", 0, 0, "are gone: the file does not exist"))
    return damages


def committed_steps(store: Store) -> Iterator[Step | Damage]:
    """Every step by its own commit record alone, for where the records of the run are damaged."""
    for name in store.list("steps"):
        path = f"steps/{name.removesuffix('/')}"
        if parse_step_dir(name.removesuffix("/")) is None:
            continue
        try:
            commit = read_record(store, f"{path}/commit.json", Commit)
        except HoldfastError as error:
            yield as_damage(f"{path}/commit.json", error)
        else:
            if commit is not None and commit.decision == "committed":
                yield Step(commit.step, commit.attempt, path, commit)


def check_step(place: Place, step: Step, line: str | None, advance: Callable[[int, int], None] | None = None) -> Checked:
    """Read a step whole: its index, the headers of its data files, and each chunk, against their digests."""
    result = Checked(step.step, step.attempt, line)
    try:
        checkpoint = open_found(place, step)
        if checkpoint is None:
            result.is_pruned = True
            return result
        with checkpoint:
            check_bytes(checkpoint, result, advance)
    except HoldfastError as error:
        result.damages.append(as_damage(step.path, error))
    return result


def check_bytes(checkpoint: Checkpoint, result: Checked, advance: Callable[[int, int], None] | None = None) -> None:
    """Read an open checkpoint whole, and put what was found into `result`."""
    chunks = checkpoint.index.all_chunks()
    result.bytes = int(chunks.stored_bytes.sum(dtype=np.int64))
    result.unchecked_bytes = int(chunks.stored_bytes[chunks.algorithm == NO_DIGEST].sum(dtype=np.int64))
    result.damages += checkpoint.verify(advance)


def as_damage(path: str, error: HoldfastError) -> Damage:
    """An error as damage of the file that it names, or of `path`."""
    if isinstance(error, Corrupt):
        return Damage(error.file or path, error.tensor or "", error.offset or 0, 0, str(error))
    return Damage(path, "", 0, 0, str(error))
