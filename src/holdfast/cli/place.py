"""From what stands on the command line to a run or a checkpoint; where there is none, an error that says what is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..address import Address, UsageError, find, parse
from ..errors import Corrupt, NoCheckpoint, Unavailable
from ..run.history import RUN_FILE, History, Step
from ..store.base import Store
from ..store.locate import open_store

if TYPE_CHECKING:
    from ..loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class Place:
    """A run that exists, and which step of it was asked for."""

    address: Address
    is_one_step: bool
    """Whether the step was named, with `@`; else it is the latest."""
    store: Store
    history: History

    def find(self) -> Step:
        """Raises:
        NoCheckpoint, Corrupt.
        """
        return find(self.history, self.address.at)


def find_run(text: str) -> Place:
    """The run that `text` names. Reads none of its records.

    Raises:
        NoCheckpoint: there is no run; the message says what there is.
        UsageError: not an address, or one of a foreign checkpoint.
    """
    address = parse(text)
    if address.format is not None:
        raise UsageError(f"{text} is not a run of holdfast and has no steps; `holdfast inspect {text}` shows what is in it")
    store, path = open_store(address.path), str(address.path).removeprefix("file://")
    names = store.list("") if "://" in path or os.path.isdir(path) else []
    if RUN_FILE not in names and "steps/" not in names:
        raise NoCheckpoint(_why_not(path, names))
    return Place(address, text.endswith(f"@{address.at}"), store, History(store))


def open_address(text: str) -> Checkpoint:
    """The checkpoint that `text` names, open. Goes past `holdfast.open`, which loads more than a quick command may.

    Raises:
        NoCheckpoint, Corrupt, Unavailable, Unsupported.
    """
    address = parse(text)
    if address.format is not None:
        from ..interop.safetensors_dir import open_safetensors

        return open_safetensors(str(address.path))
    place = find_run(text)
    while True:
        if (checkpoint := open_found(place, place.find())) is not None:
            return checkpoint


def open_found(place: Place, step: Step) -> Checkpoint | None:
    """A step of a run, open with all its files; None if it was pruned meanwhile.

    Raises:
        Corrupt: a file that its record names is not there.
    """
    from ..api import open_and_lock

    try:
        return open_and_lock(place.store, step)
    except FileNotFoundError as error:
        if not any(s.path == step.path for s in place.history.look().steps):
            return None
        name = str(error.filename or error)
        raise Corrupt(f"step {step.step} lacks a file that its record names: {name}", file=name) from error


def _why_not(path: str, names: list[str]) -> str:
    """What there is where a run was expected, and what to do."""
    if "://" in path:
        return f"there is no run at {path}"
    if not os.path.exists(path):
        return f"there is no run at {path}: the directory does not exist"
    if os.path.isfile(path):
        foreign = path.endswith(".safetensors")
        return f"{path} is a file, not a run" + (f"; for others' checkpoints give safetensors:{path}" if foreign else "")
    above = os.path.abspath(path)
    while (parent := os.path.dirname(above)) != above:
        above = parent
        if os.path.exists(os.path.join(above, RUN_FILE)):
            return f"{path} lies inside the run {above}; give {above}, with @STEP for one step of it"
    if any(name.endswith(".safetensors") for name in names):
        return f"{path} is not a run; for others' checkpoints give safetensors:{path} or hf:{path}"
    runs = [n.rstrip("/") for n in names if n.endswith("/") and os.path.exists(os.path.join(path, n, RUN_FILE))]
    if runs:
        some = ", ".join(os.path.join(path, name) for name in runs[:5]) + (", ..." if len(runs) > 5 else "")
        return f"{path} is not a run; runs in it: {some}"
    return f"{path} is not a run of holdfast: it has no {RUN_FILE}" + ("" if names else "; it is empty")


def existing_directory(text: str) -> str:
    """The local directory that `text` names, which may be a run or not.

    Raises:
        Unavailable: it is not there, or is no directory.  UsageError: not a local path.
    """
    address = parse(text)
    path = str(address.path).removeprefix("file://")
    if address.format is not None or text.endswith(f"@{address.at}"):
        raise UsageError(f"{text} is not a directory: give a run without @STEP, or any directory")
    if "://" in path:
        raise UsageError(f"{path} is not a directory of this machine; doctor looks at directories")
    if not os.path.isdir(path):
        state = "is a file" if os.path.exists(path) else "does not exist"
        raise Unavailable(f"{path} {state}; make the directory first, or name the one that the run shall be in")
    return os.path.abspath(path)
