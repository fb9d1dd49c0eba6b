"""The one object that a trainer holds: resume once, call `step` after each optimizer step, leave the `with`.

Thin: when to save is `Every`, what to keep is `Keep`, the work is in the verbs. Saves of this version are synchronous: the state
is durable when `step` returns.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any

from .address import find
from .api import Handle, open_and_lock, open_checkpoint, restore_from, save_contents, state_contents
from .errors import Corrupt, HoldfastError, NoCheckpoint, Refused, Unavailable, Unsupported
from .format.names import parse_step_dir
from .loading.ledger import Ledger
from .loading.match import Wishes
from .policy.keep import Keep
from .policy.save import Every
from .run.history import History, Step
from .run.marks import held
from .run.session import Session, keep_session
from .runs import Run
from .state import State
from .store.locate import open_store
from .version import libraries

log = logging.getLogger("holdfast")
_TRIES = 5


@dataclass(frozen=True)
class Init:
    """What a run begins from when it has no commit yet: for `Checkpointer(init=)`.

    Attributes:
        source: an address; `hf:DIR` for a directory of safetensors. waive, rename, cast, select: as for `restore`.
    """

    source: Any
    _: KW_ONLY
    waive: str | Sequence[str] = ()
    rename: Mapping[str, str] | None = None
    cast: Mapping[str, Any] | None = None
    select: str | Sequence[str] | None = None


class Checkpointer:
    """Saves and resumes one training job's state in one run. A context manager.

    Leaving the `with` saves the last step if it is not saved; on an exception it saves nothing and lets it pass.

    Args:
        run: a directory, made if missing, `memory://NAME`, or a store.
        state: a State, or a dict as for `holdfast.save`.
        save: when to save. keep: what to keep; pruning runs after each save.
        init: an address or an Init, read by `resume` only while the run has no commit.
        on_failure: what a save that fails does to training: `warn`, or `raise`. Superseded, Refused and Unsupported always raise.
        recycle: whether new checkpoints are written over the files of pruned ones, which is faster and keeps up
            to one checkpoint's bytes of extra files.
    Raises:
        Unavailable: the store cannot be reached.
    """

    def __init__(
        self,
        run: Any,
        state: State | dict[str, Any],
        *,
        save: Every | None = None,
        keep: Keep | None = None,
        init: Any = None,
        on_failure: str = "warn",
        recycle: bool = True,
    ) -> None:
        if on_failure not in ("warn", "raise"):
            raise ValueError(f"on_failure={on_failure!r}: warn or raise")
        self.run = Run(open_store(run))
        self.ledger: Ledger | None = None
        self._state = State.of(state)
        self._every, self._keep = save or Every(steps=100), keep or Keep()
        self._init = init if init is None or isinstance(init, Init) else Init(init)
        self._raises, self._recycle = on_failure == "raise", recycle
        self._session: Session | None = None
        self._step: int | None = None
        self._metrics: Mapping[str, Any] | None = None
        self._saved_step = 0
        self._handle: Handle | None = None
        self._saved_at = time.monotonic()
        self._is_closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        self._is_closed = True

    def resume(
        self,
        at: int | str | None = None,
        *,
        skip_samples: Sequence[tuple[int, int]] | None = None,
        required: bool = False,
        live: str | Sequence[str] = (),
        waive: str | Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        cast: Mapping[str, Any] | None = None,
        stage: bool = False,
    ) -> int:
        """Fill the state from the newest intact step of the lineage, begin a new attempt there, and return the step.

        Damaged steps are passed over, newest first, and listed in `ledger.fallbacks`. In a run without commits the state is
        filled from `init`, if given, and 0 is returned.

        Args:
            at: a step, a pin, `best`: that one and no other; an older one than the newest begins a rolled-back line.
            skip_samples: half-open ranges of global sample positions to leave out from here on; recorded with the attempt.
            required: raise NoCheckpoint instead of returning 0.
            live, waive, rename, cast, stage: as for `restore`.
        Raises:
            Mismatch: nothing was touched.  Corrupt: no step is intact.  NoCheckpoint, Unavailable.
        """
        wishes = Wishes.of(None, (), waive, rename, cast, live)
        for _ in range(_TRIES):
            history = History(self.run.store)
            try:
                chosen = [find(history, at)] if at is not None else self._candidates(history)
            except NoCheckpoint:
                if required or at is not None:
                    raise
                chosen = []
            if required and not chosen:
                raise NoCheckpoint(f"nothing is committed in {self.run.path}")
            if not chosen:
                self._begin_fresh()
                return 0
            newest = chosen[0]
            if at is not None:
                with contextlib.suppress(Corrupt, Unsupported):
                    newest = history.newest()
            skipped = [[int(a), int(b)] for a, b in skip_samples] if skip_samples else None
            if self._load_first_intact(history, chosen, wishes, stage, newest, skipped):
                assert self._step is not None
                return self._step
        raise Unavailable(f"{self.run.path}: each step found was pruned before it could be held; is another job saving there?")

    def step(self, n: int, *, metrics: Mapping[str, Any] | None = None) -> Handle | None:
        """Say that step `n` is complete: after optimizer, scheduler, scaler and averages. Saves if the policy says so.

        Args:
            n: steps completed; exceeds `resume()` and all before. metrics: kept with the step; only read if it is saved.
        Returns:
            The save, or None if none was due or it failed under `on_failure="warn"`.
        Raises:
            Refused: `n` does not exceed the last step, or the run has commits and `resume` was not called.
            Superseded: a newer attempt has taken over the run.
        """
        session = self._ready()
        if n <= (self._step if self._step is not None else session.last_step or 0):
            raise Refused(f"step({n}) after step {self._step}: steps must grow; Run.rollback goes back")
        self._step, self._metrics = n, metrics
        if not self._every.is_due(n, self._saved_step, time.monotonic() - self._saved_at):
            return None
        return self._save(None, None)

    def save(self, *, pin: str | None = None, select: str | Sequence[str] | None = None) -> Handle:
        """Save the state of the last `step()` now, whatever the policy says; if it is saved already, that save is returned.

        Args:
            pin: a name that keeps it from pruning. select: patterns of names to save; the whole step is still saved when due.
        Raises:
            Refused: no step was completed yet.  Superseded, Unavailable, NoSpace, Unsupported.
        """
        if self._step is None or (self._step == self._saved_step and self._handle is None):
            raise Refused("no step was completed since the start or resume(): call step() first")
        if select is None and self._handle is not None and self._step == self._saved_step:
            if pin is not None:
                self.run.pin(self._step, pin)
            return self._handle
        handle = self._save(pin, select, must_raise=True)
        assert handle is not None
        return handle

    def close(self) -> None:
        """Save the last step if it is not saved. Called when the `with` ends without an exception."""
        if not self._is_closed and self._step is not None and self._step > self._saved_step:
            self._save(None, None)
        self._is_closed = True

    def _candidates(self, history: History) -> list[Step]:
        """Steps to resume from, newest first."""
        snapshot = history.look()
        steps = [s for s in reversed(snapshot.lineage) if s.kind != "partial"]
        damaged = {_step_of(path): error for path, error in snapshot.damaged.items() if path.startswith("steps/")}
        for step, error in damaged.items():
            if not steps or (step > steps[0].step and isinstance(error, Unsupported)):
                raise error  # what a later version wrote is not damaged: it is not passed over
        return steps

    def _load_first_intact(
        self, history: History, chosen: Sequence[Step], wishes: Wishes, stage: bool, newest: Step, skipped: Any
    ) -> bool:
        """Load the first of `chosen` that is intact, and begin an attempt there while it is held; False if all are gone."""
        damaged = {_step_of(path): str(e) for path, e in history.look().damaged.items() if path.startswith("steps/")}
        fallbacks: list[str] = []
        last_error: HoldfastError | None = None
        for candidate in chosen:
            with contextlib.suppress(NoCheckpoint), held(history, candidate.ref) as found:
                try:
                    with open_and_lock(self.run.store, found) as checkpoint:
                        self.ledger = restore_from(checkpoint, self._state, wishes, all_roles=True, stage=stage)
                except (Corrupt, FileNotFoundError) as error:
                    last_error = error if isinstance(error, Corrupt) else Corrupt(f"step {found.step} lacks a file: {error}")
                    fallbacks.append(str(last_error))
                    continue
                if newest.ref == chosen[0].ref:
                    fallbacks = [why for step, why in damaged.items() if step > found.step] + fallbacks
                self.ledger.fallbacks = fallbacks
                for why in fallbacks:
                    log.warning("passed over a damaged step: %s", why)
                is_back = newest.ref != found.ref and not fallbacks
                self._open(Session(self.run.store, libraries(), "rollback" if is_back else "restart", found.ref, skipped))
                self._step = self._saved_step = found.step
                return True
        if last_error is not None:
            raise last_error
        return False

    def _begin_fresh(self) -> None:
        if self._init is not None:
            init = self._init
            with open_checkpoint(init.source) as checkpoint:
                roles = sorted(checkpoint.commit.roles)
                select = init.select or [*roles, *(f"{role}.*" for role in roles)]
                wishes = Wishes.of(select, (), init.waive, init.rename, init.cast)
                self.ledger = restore_from(checkpoint, self._state, wishes, all_roles=False)
        self._open(Session(self.run.store, libraries()))
        self._step = self._saved_step = 0

    def _open(self, session: Session) -> None:
        self._session = session
        self._saved_at = time.monotonic()
        keep_session(session)

    def _ready(self) -> Session:
        if self._session is None:
            if self.run.latest() is not None:
                raise Refused(f"{self.run.path} has commits: call resume() before step(), or Run.rollback() to go back")
            if self._init is not None:
                raise Refused("init= is read by resume(): call it before step()")
            self._begin_fresh()
        assert self._session is not None
        return self._session

    def _save(self, pin: str | None, select: str | Sequence[str] | None, must_raise: bool = False) -> Handle | None:
        session, step = self._ready(), self._step
        assert step is not None
        best = [self._keep.metric, self._keep.mode] if self._keep.metric else None
        try:
            handle = save_contents(
                session,
                state_contents(self._state, select),
                step,
                metrics=self._metrics,
                pin=pin,
                recycle=self._recycle,
                refer=not self._keep.is_kept_forever(step),
                best=best,
            )
        except Unavailable as error:
            if self._raises or must_raise:
                raise
            log.error("step %d was not saved: %s", step, error)
            warnings.warn(f"step {step} was not saved: {error}", RuntimeWarning, stacklevel=3)
            return None
        if select is None:
            self._saved_step, self._saved_at, self._handle = step, time.monotonic(), handle
        self._prune()
        return handle

    def _prune(self) -> None:
        assert self._session is not None
        self._session.check_newest()  # what an older attempt would keep is not what the newer one needs
        try:
            self.run.prune(self._keep, recycle=self._recycle)
        except HoldfastError as error:
            log.error("pruning failed, nothing was lost: %s", error)
            warnings.warn(f"pruning failed, nothing was lost: {error}", RuntimeWarning, stacklevel=4)


def _step_of(path: str) -> int:
    """The step of a step's directory."""
    return (parse_step_dir(path.removeprefix("steps/")) or (0,))[0]
