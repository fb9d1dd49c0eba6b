"""Marks: the small records by which processes of one run keep out of each other's way.

An intent says "I may refer to these steps"; a tombstone "I am deleting this one"; a pin or hold "keep this one". Writers publish
the intent before they read tombstones; pruning publishes tombstones before it reads intents: neither can miss the other.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..errors import Corrupt, HoldfastError, NoCheckpoint, Refused, Unavailable
from ..format.records import Intent, Note, Pin, StepRef, Tombstone, seal
from ..store.base import Store
from .history import HOLD, History, Step, read_record
from .identity import is_gone, this_process

INTENT_SECONDS = 6 * 3600.0
HOLD_SECONDS = 24 * 3600.0
_PIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}\Z")
_RESERVED = {"latest", "best"}
_digging: set[str] = set()
"""Tombstones of deletions that this process has under way; others of its own are left of a store that failed."""


class Published(NamedTuple):
    """A mark and where it lies."""

    record: Intent
    path: str


@contextlib.contextmanager
def intent(store: Store, step: int, attempt: int, parents: Sequence[StepRef]) -> Iterator[Published]:
    """Say, while the block runs, that the save of `step` may refer to files of `parents`."""
    now = time.time()
    record = Intent(
        step=step, attempt=attempt, parents=list(parents), created=now, expires=now + INTENT_SECONDS, by=this_process()
    )
    path = f"intents/{step:010d}-a{attempt:04d}-{secrets.token_hex(4)}.json"
    try:
        store.create(path, seal(record), sync=False)
    except FileNotFoundError as error:
        raise Unavailable(f"{store.url} is not there any more: is its storage mounted?") from error
    try:
        yield Published(record, path)
    finally:
        with contextlib.suppress(HoldfastError):  # it ends with this process at the latest; what was done under it stands
            store.delete(path)


def live_intents(store: Store) -> list[Intent]:
    """Intents whose writer may still commit. A damaged one is left of a power cut, which no writer survives."""
    found = []
    for name in store.list("intents"):
        with contextlib.suppress(Corrupt):
            record = read_record(store, f"intents/{name}", Intent)
            if record is not None and record.expires > time.time() and not is_gone(record.by):
                found.append(record)
    return found


@contextlib.contextmanager
def burying(store: Store, refs: Sequence[StepRef]) -> Iterator[None]:
    """Say, while the block runs, that these steps are being deleted: nothing may begin to refer to them, or to hold them."""
    paths = {f"{_tombstone(ref)}-{secrets.token_hex(4)}.json": ref for ref in refs}
    _digging.update(paths)
    try:
        for path, ref in paths.items():
            record = Tombstone(step=ref.step, attempt=ref.attempt, created=time.time(), by=this_process())
            store.create(path, seal(record), sync=False)
        yield
    finally:
        for path in paths:
            _digging.discard(path)
            with contextlib.suppress(HoldfastError):
                store.delete(path)


def is_buried(store: Store, ref: StepRef) -> bool:
    """Whether a process that may still live is deleting the step."""
    prefix = _tombstone(ref).removeprefix("tombstones/")
    for name in store.list("tombstones"):
        if name.startswith(f"{prefix}-"):
            with contextlib.suppress(Corrupt):  # left of a power cut, which no deletion survives
                record = read_record(store, f"tombstones/{name}", Tombstone)
                is_over = record is None or is_gone(record.by)
                is_over |= record is not None and record.by == this_process() and f"tombstones/{name}" not in _digging
                if not is_over:
                    return True
    return False


def clear_marks(store: Store) -> None:
    """Remove marks whose process is gone: tombstones, intents, holds."""
    kinds: dict[str, type[Tombstone] | type[Intent] | type[Pin]] = {"tombstones": Tombstone, "intents": Intent, "pins": Pin}
    for folder, kind in kinds.items():
        for name in store.list(folder):
            path = f"{folder}/{name}"
            try:
                record = read_record(store, path, kind)
            except Corrupt:
                if kind is not Pin or name.startswith(HOLD):  # left of a power cut, which no writer of a mark survives
                    store.delete(path)
                continue
            is_pin = isinstance(record, Pin) and record.expires is None
            if record is not None and not is_pin and is_gone(record.by):
                store.delete(path)


@contextlib.contextmanager
def hold(store: Store, ref: StepRef) -> Iterator[Pin]:
    """Keep pruning from removing the step while the block runs; ends by itself if this process dies."""
    name = f"{HOLD}{secrets.token_hex(6)}"
    now = time.time()
    record = Pin(name=name, step=ref.step, attempt=ref.attempt, created=now, expires=now + HOLD_SECONDS, by=this_process())
    store.create(f"pins/{name}.json", seal(record), sync=False)
    try:
        yield record
    finally:
        with contextlib.suppress(HoldfastError):
            store.delete(f"pins/{name}.json")


@contextlib.contextmanager
def held(history: History, ref: StepRef) -> Iterator[Step]:
    """The step, which is there and stays there while the block runs.

    The hold is published before the tombstone is looked for, and pruning does it the other way round: neither can miss the other.

    Raises:
        NoCheckpoint: it is gone, or about to go.
    """
    with hold(history.store, ref):
        found = None if is_buried(history.store, ref) else history.by_ref(ref)
        if found is None:
            raise NoCheckpoint(f"step {ref.step} of {history.store.url} was pruned before it could be held, or is being pruned")
        yield found


def pin(store: Store, ref: StepRef, name: str) -> None:
    """Keep the step under `name` until it is unpinned.

    Raises:
        Refused: the name is taken by another step, is a number, `latest` or `best`, or has odd characters.
    """
    check_pin_name(name)
    record = Pin(name=name, step=ref.step, attempt=ref.attempt, created=time.time(), by=this_process())
    path = f"pins/{name}.json"
    try:
        store.create(path, seal(record))
    except FileExistsError:
        other = read_record(store, path, Pin)
        if other is not None and (other.step, other.attempt) != (ref.step, ref.attempt):
            raise Refused(f"the pin {name} already names step {other.step}; unpin it first or choose another name") from None


def check_pin_is_free(store: Store, name: str) -> None:
    """Raises:
    Refused: the name cannot be one of a pin, or is taken.
    """
    check_pin_name(name)
    taken = read_record(store, f"pins/{name}.json", Pin)
    if taken is not None:
        raise Refused(f"the pin {name} already names step {taken.step}; unpin it first or choose another name")


def check_pin_name(name: str) -> None:
    if not _PIN_NAME.match(name) or name in _RESERVED or name.startswith(HOLD):
        raise Refused(f"{name!r} cannot name a pin: begin with a letter, use letters, digits, `.`, `_`, `-`; not latest or best")


def unpin(store: Store, name: str) -> None:
    """Forget the pin; durable on return.

    Raises:
        NoCheckpoint: there is no such pin.
    """
    if f"{name}.json" not in store.list("pins"):
        raise NoCheckpoint(f"there is no pin {name} in {store.url}")
    store.delete(f"pins/{name}.json", sync=True)


def note(store: Store, ref: StepRef, metrics: dict[str, object]) -> None:
    """Add metrics to a committed step."""
    record = Note(step=ref.step, attempt=ref.attempt, metrics=metrics, created=time.time())
    store.create(f"notes/{ref.step:010d}-a{ref.attempt:04d}-{secrets.token_hex(4)}.json", seal(record))


def _tombstone(ref: StepRef) -> str:
    return f"tombstones/{ref.step:010d}-a{ref.attempt:04d}"
