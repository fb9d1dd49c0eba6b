"""Addresses: `[format:]PATH[@STEP|@latest|@best|@PIN]`, in Python and in commands."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from .errors import HoldfastError, NoCheckpoint
from .run.history import History, Snapshot, Step, find_step
from .store.base import Store
from .store.locate import open_store

FOREIGN = ("hf", "safetensors")
_ADDRESS = re.compile(r"(?:(?P<format>[a-z_]+):(?!//))?(?P<path>.*?)(?:@(?P<at>[A-Za-z0-9][A-Za-z0-9._-]*))?\Z", re.DOTALL)


@dataclass(frozen=True)
class Address:
    """A run, or a foreign checkpoint, and which step of it."""

    path: Any
    """A directory, a URL, or a store."""
    at: str = "latest"
    """A step number, `latest`, `best`, or a pin's name."""
    format: str | None = None

    def __str__(self) -> str:
        return f"{self.format}:{self.path}" if self.format else f"{self.path}@{self.at}"


class UsageError(HoldfastError):
    """An address or an option that cannot be understood."""

    exit_code = 2


def parse(text: Any, step: int | None = None) -> Address:
    """The address in `text`: a string, a path, or a store.

    Args:
        step: the same as `@STEP`.
    Raises:
        UsageError: an unknown format, or a step given twice.
    """
    if not isinstance(text, (str, os.PathLike)):
        return Address(text, "latest" if step is None else str(step))
    match = _ADDRESS.match(os.fspath(text))
    if match is None or not match["path"]:
        raise UsageError(f"{text!r} is not an address: give [format:]PATH[@STEP|@latest|@best|@PIN]")
    if match["format"] is not None and match["format"] not in FOREIGN:
        raise UsageError(f"unknown format {match['format']}: in {text!r}; known: {', '.join(FOREIGN)}")
    if match["at"] is not None and step is not None and match["at"] != str(step):
        raise UsageError(f"{text!r} names a step, and step={step} another; give one")
    return Address(match["path"], match["at"] or ("latest" if step is None else str(step)), match["format"])


def find(history: History, at: str | int | None = None) -> Step:
    """The committed step that `at` means in this run.

    Raises:
        NoCheckpoint: there is none, with what there is.  Corrupt: its commit record is damaged.
    """
    where = history.store.url
    text = "latest" if at is None else str(at)
    if text == "latest":
        return history.newest()
    snapshot = history.look()
    if text == "best":
        return best(snapshot, where)
    if text.isdigit():
        return find_step(snapshot, int(text), where)
    for step in snapshot.steps:
        if text in step.pins:
            return step
    if f"pins/{text}.json" in snapshot.damaged:
        raise snapshot.damaged[f"pins/{text}.json"]
    pins = sorted({pin for step in snapshot.steps for pin in step.pins})
    raise NoCheckpoint(f"{where} has no pin {text}" + (f"; it has {', '.join(pins)}" if pins else " and no other"))


def best(snapshot: Snapshot, where: str, metric: str | None = None, mode: str | None = None) -> Step:
    """The best step of the lineage by a metric: the one given, else the one the run ranks by, else `loss`, smaller is better.

    Raises:
        NoCheckpoint: no step has that metric.
    """
    from .policy.keep import Candidate, best_of

    ranked_by = next((s.commit.best for s in reversed(snapshot.lineage) if s.commit.best), ["loss", "min"])
    metric, mode = metric or ranked_by[0], mode or (ranked_by[1] if metric in (None, ranked_by[0]) else "min")
    ordered = best_of([Candidate(s.step, s.metrics) for s in snapshot.lineage], metric, mode)
    if not ordered:
        known = sorted({name for s in snapshot.lineage for name in s.metrics})
        raise NoCheckpoint(f"no step of {where} has the metric {metric}" + (f"; there are {', '.join(known)}" if known else ""))
    return next(s for s in snapshot.lineage if s.step == ordered[0].step)


def store_of(address: Address) -> Store:
    return open_store(address.path)
