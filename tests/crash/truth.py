"""Truth: what must be true of a run for someone who was told what has returned, and whether a directory agrees.

`Facts` is what was announced, `Window` what a crash may leave while one operation is under way, `observe` what the
public interface finds in a directory. The contents of a step are made from one number, which they hold, so that
whatever is loaded can be compared bit by bit with what that number makes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.loading.checkpoint import open_step
from holdfast.run.history import Step
from holdfast.store.locate import open_store

FAMILY = 100
"""Contents whose numbers agree but for the last two digits share half of their tensors."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """What was saved once."""

    step: int
    content: int


@dataclass(frozen=True, slots=True)
class Window:
    """What may be found; equal to the facts where nothing is under way."""

    latest: frozenset[Version | None]
    must: frozenset[Version]
    may: frozenset[Version]
    pins_must: frozenset[tuple[str, Version]]
    pins_may: frozenset[tuple[str, Version]]
    notes_must: frozenset[tuple[Version, str, float]]
    notes_may: frozenset[tuple[Version, str, float]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What was announced of a run."""

    lineage: tuple[Version, ...] = ()
    abandoned: frozenset[Version] = frozenset()
    gone: frozenset[Version] = frozenset()
    """Pruned, or never announced: may still be there, but then whole."""
    pins: frozenset[tuple[str, Version]] = frozenset()
    notes: frozenset[tuple[Version, str, float]] = frozenset()

    def saved(self, version: Version) -> Facts:
        return replace(self, lineage=(*self.lineage, version))

    def rolled_back(self, step: int) -> Facts:
        left = frozenset(v for v in self.lineage if v.step > step)
        return replace(self, lineage=tuple(v for v in self.lineage if v not in left), abandoned=self.abandoned | left)

    def pruned(self, last: int) -> Facts:
        pinned = {version for _, version in self.pins}
        kept = tuple(v for v in self.lineage if v in self.lineage[-last:] or v in pinned)
        gone = (set(self.lineage) | self.abandoned) - set(kept) - pinned
        return replace(self, lineage=kept, abandoned=self.abandoned & pinned, gone=self.gone | gone)

    def pinned(self, name: str, step: int) -> Facts:
        version = next(v for v in self.lineage if v.step == step)
        return replace(self, pins=self.pins | {(name, version)})

    def unpinned(self, name: str) -> Facts:
        return replace(self, pins=frozenset(pin for pin in self.pins if pin[0] != name))

    def noted(self, step: int, name: str, value: float) -> Facts:
        version = next(v for v in self.lineage if v.step == step)
        return replace(self, notes=self.notes | {(version, name, value)})


def between(before: Facts, after: Facts) -> Window:
    """What a crash may leave while the operation that turns `before` into `after` is under way."""
    all_before = {*before.lineage, *before.abandoned}
    all_after = {*after.lineage, *after.abandoned}
    return Window(
        frozenset(facts.lineage[-1] if facts.lineage else None for facts in (before, after)),
        frozenset(all_before & all_after),
        frozenset(all_before | all_after | before.gone | after.gone),
        before.pins & after.pins,
        before.pins | after.pins,
        before.notes & after.notes,
        before.notes | after.notes,
    )


@dataclass(frozen=True, slots=True)
class Observed:
    """What the public interface finds."""

    lineage: tuple[Version, ...] = ()
    abandoned: frozenset[Version] = frozenset()
    latest: Version | None = None
    pins: frozenset[tuple[str, Version]] = frozenset()
    notes: frozenset[tuple[Version, str, float]] = frozenset()
    errors: tuple[str, ...] = ()
    """What was listed and could not be had, or not as it was saved."""
    is_open: bool = True
    """Whether the run could be opened at all."""

    def facts(self) -> Facts:
        return Facts(self.lineage, self.abandoned, frozenset(), self.pins, self.notes)


@dataclass
class _Findings:
    versions: dict[tuple[int, int], Version] = field(default_factory=dict)
    """By step and attempt."""
    errors: list[str] = field(default_factory=list)


def observe(path: Path) -> Observed:
    """Open the run, list its steps, load each one, and look at its pins and notes. Changes nothing."""
    found = _Findings()
    try:
        run = holdfast.Run(path)
        steps = run.steps(abandoned=True)
        if steps:
            assert run.id, "the run has steps and no identity"
    except Exception as error:  # whatever else it raises is the finding
        return Observed(errors=(f"opening the run: {error!r}",), is_open=False)
    for step in steps:
        try:
            found.versions[step.step, step.attempt] = read(path, step, steps)
        except Exception as error:
            found.errors.append(f"step {step.step} of attempt {step.attempt} is listed but does not load: {error!r}")
    latest = _latest(path, run, found)
    known = [(step, found.versions[key]) for step in steps if (key := (step.step, step.attempt)) in found.versions]
    return Observed(
        lineage=tuple(version for step, version in known if not step.is_abandoned),
        abandoned=frozenset(version for step, version in known if step.is_abandoned),
        latest=latest,
        pins=frozenset((name, version) for step, version in known for name in step.pins),
        notes=frozenset((v, name, value) for s, v in known for note in s.notes for name, value in note.metrics.items()),
        errors=tuple(found.errors),
    )


def read(path: Path, step: Step, steps: list[Step]) -> Version:
    """Load a listed step and compare every bit.

    By its number one gets the step of the lineage, else the newest. What that hides is verified by its own digests.
    """
    if step is min((s for s in steps if s.step == step.step), key=lambda s: (s.is_abandoned, -s.attempt)):
        tree = holdfast.load(path, step=step.step)
        version = Version(step.step, tree["content"])
        if fingerprint(tree) != expected_fingerprint(version.content):
            raise AssertionError("it is not what was saved")
        return version
    with open_step(open_store(path), step.path, step.commit) as hidden:
        if damages := hidden.verify():
            raise AssertionError(f"it is damaged: {damages}")
        return Version(step.step, hidden.values["content"])


def _latest(path: Path, run: holdfast.Run, found: _Findings) -> Version | None:
    """The newest step as the run tells it; what is opened without a step must be the same."""
    step = None
    try:
        step = run.latest()
        with holdfast.open(path) as newest:
            opened = newest.step, newest.attempt
    except holdfast.NoCheckpoint:
        if step is not None:
            found.errors.append(f"latest() is step {step.step}, but there is none to open")
        return None
    except Exception as error:
        found.errors.append(f"the newest step does not open: {error!r}")
        return None
    if step is None or opened != (step.step, step.attempt):
        found.errors.append(f"latest() is {step}, but what opens is step {opened[0]} of attempt {opened[1]}")
    return found.versions.get(opened)


def violations(window: Window, seen: Observed) -> list[str]:
    """In words, each way in which what is found is not what may be."""
    found = list(seen.errors)
    if not seen.is_open:
        return found
    if seen.latest not in window.latest:
        found.append(f"it opens at {seen.latest}, not at {_either(window.latest)}")
    there = {*seen.lineage, *seen.abandoned}
    found += [f"{version} was announced and is not listed" for version in sorted(window.must - there)]
    found += [f"{version} is listed and was never saved" for version in sorted(there - window.may)]
    found += [f"the pin {pin} was announced and is not there" for pin in sorted(window.pins_must - seen.pins)]
    found += [f"the pin {pin} was never set" for pin in sorted(seen.pins - window.pins_may)]
    found += [f"the note {note} was announced and is not there" for note in sorted(window.notes_must - seen.notes)]
    found += [f"the note {note} was never made" for note in sorted(seen.notes - window.notes_may)]
    return found


def _either(versions: frozenset[Version | None]) -> str:
    return " or ".join(sorted(str(version) for version in versions))


# Contents.


def contents(number: int) -> dict[str, Any]:
    """A small awkward state: several dtypes, tied, empty, scalar, strided tensors, values of several kinds."""
    family, own = torch.Generator().manual_seed(number // FAMILY), torch.Generator().manual_seed(number)

    def layer(generator: torch.Generator) -> dict[str, torch.Tensor]:
        wide = torch.randn(33, 24, generator=generator)
        return {
            "weight": torch.randn(40, 33, generator=generator),
            "transposed": wide.t(),
            "half": torch.randn(65, generator=generator).to(torch.bfloat16),
            "steps": torch.randint(0, 1 << 60, (7,), generator=generator),
        }

    tied = torch.randn(31, 17, generator=own)
    return {
        "content": number,
        "frozen": {f"layer{i}": layer(family) for i in range(4)},
        "model": {f"layer{i}": layer(own) for i in range(4)},
        "embedding": torch.randn(130, 60, generator=own),
        "tied": [tied, tied],
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(number / 7, dtype=torch.float64),
        "values": {"lr": number / 3, "name": "é@/..", "flags": (True, None, float("inf")), 7: b"\0\xff"},
    }


def an_optimizer() -> dict[str, Any]:
    """Two roles more; pruning to weights removes one, so that neither is part of the comparison."""
    module = torch.nn.Linear(9, 5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(9)).sum().backward()
    optimizer.step()
    return {"optimized": module, "optimizer": optimizer}


@functools.lru_cache(maxsize=4096)
def expected_fingerprint(number: int) -> bytes:
    return fingerprint(contents(number))


def fingerprint(tree: Any) -> bytes:
    """A digest of every bit of a tree of tensors and values: types, dtypes and shapes included."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in _leaves({key: tree[key] for key in tree if key not in ("optimized", "optimizer")}, ""):
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
            digest.update(f"{path}\0{leaf.dtype}\0{tuple(leaf.shape)}\0".encode() + data)
        else:
            digest.update(f"{path}\0{type(leaf).__name__}\0{leaf!r}\0".encode())
    return digest.digest()


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    match tree:
        case dict():
            for key in sorted(tree, key=repr):
                yield from _leaves(tree[key], f"{path}/{key!r}")
        case list() | tuple():
            yield path, type(tree)()
            for index, part in enumerate(tree):
                yield from _leaves(part, f"{path}/{index}")
        case _:
            yield path, tree
