"""The judge: rebuilds crash states and says in which way, if any, a state breaks what was announced.

What a directory shows depends on the directory alone, so each distinct state is built and opened once in a session.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import holdfast

from .disk import Crash, CrashState
from .recorder import Mark, Recording
from .truth import Facts, Observed, Version, Window, between, contents, observe, violations

NEXT_CONTENT = 9_900


class Judge:
    """Rebuilds below `directory`, which is best in memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.built = 0
        self._seen: dict[tuple[int, tuple[str, ...]], dict[str, Observed]] = {}

    def verdict(self, recording: Recording, crash: Crash) -> list[str]:
        """The ways in which the state breaks what had been announced by then; empty if it keeps all."""
        windows = announced(recording, crash.prefix)
        seen = self._observe(crash.state, tuple(sorted(windows)))
        return [f"{run}: {self._plain(what)}" for run, window in windows.items() for what in violations(window, seen[run])]

    def go_on(self, recording: Recording, crash: Crash) -> list[str]:
        """Rebuild the state and do what a restarted job does: save a newer step, prune, and look again."""
        found = []
        root = self._build(crash.state)
        try:
            for run, seen in self._observe(crash.state, tuple(sorted(announced(recording, crash.prefix)))).items():
                found += [f"{run}: going on: {self._plain(what)}" for what in _continue(root / run, seen.facts())]
        finally:
            shutil.rmtree(root)
        return found

    def _observe(self, state: CrashState, runs: tuple[str, ...]) -> dict[str, Observed]:
        known = (state.key, runs)
        if known not in self._seen:
            root = self._build(state)
            try:
                self._seen[known] = {run: observe(root / run) for run in runs}
            finally:
                shutil.rmtree(root)
        return self._seen[known]

    def _plain(self, message: str) -> str:
        return re.sub(rf"{re.escape(str(self.directory))}/state-\d+/", "", message)

    def _build(self, state: CrashState) -> Path:
        self.built += 1
        root = self.directory / f"state-{self.built}"
        state.materialize(root)
        return root


def announced(recording: Recording, prefix: int) -> Mapping[str, Window]:
    """What the last mark before the crash says of each run."""
    marks = (o for o in reversed(recording.operations[:prefix]) if isinstance(o, Mark))
    windows: Mapping[str, Window] = next((mark.payload for mark in marks), {})
    return windows


def _continue(path: Path, facts: Facts) -> list[str]:
    new = Version(max((v.step for v in (*facts.lineage, *facts.abandoned)), default=0) + 1, NEXT_CONTENT)
    saved = facts.saved(new)
    pruned = saved.pruned(2)
    try:
        holdfast.save(path, contents(new.content), new.step)
        found = violations(between(saved, saved), observe(path))
        holdfast.Run(path).prune(holdfast.Keep(last=2), recycle=True)
        found += violations(between(pruned, pruned), observe(path))
        again = pruned.saved(Version(new.step + 1, NEXT_CONTENT + 1))
        holdfast.save(path, contents(NEXT_CONTENT + 1), new.step + 1)
        found += violations(between(again, again), observe(path))
    except Exception as error:  # whatever is raised is the finding
        return [f"{error!r}"]
    return found


def scratch_place() -> Path:
    """A new directory for rebuilding: in memory where there is such a filesystem."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="crash-matrix-", dir=memory if os.access(memory, os.W_OK) else None))
