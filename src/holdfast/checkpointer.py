"""The one object that a trainer holds: resume once, call `step` after each optimizer step, leave the `with`.

Thin: when to save is `Every`, what to keep is `Keep`, the work is in the verbs. Saves of this version are synchronous: the state
is durable when `step` returns.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any, TypeVar

from .api import Handle, save_contents, save_jointly, state_contents
from .errors import Deadline, HoldfastError, Refused, StepExists, TooLate, Unavailable
from .loading.ledger import Ledger
from .loading.wishes import Wishes
from .policy.durations import seconds_of
from .policy.keep import Keep
from .policy.save import Every
from .preemption.settings import Preemption
from .preemption.stopping import Stopping
from .ranks import team_of
from .resuming import Resumed, Resuming
from .run.joint import Joint
from .run.session import Session, keep_session
from .runs import Run
from .state import State
from .store.locate import open_store

log = logging.getLogger("holdfast")
T = TypeVar("T")


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
        on_failure: what a save that fails does to training: `warn`, or `raise`. Superseded, Refused and Unsupported always raise,
            but a save that is refused because the job is killed before it could end counts as one that fails.
        recycle: whether new checkpoints are written over the files of pruned ones, which is faster and keeps up
            to one checkpoint's bytes of extra files.
        ranks: global ranks that call together, where torch.distributed is initialised; all of the job by default.
        deadline: seconds, or "10m": by then each call that ranks make together has its outcome.
        preemption: what `should_stop` looks at; True: `Preemption()`; None or False: nothing. Equal on all ranks.
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
        ranks: Sequence[int] | None = None,
        deadline: float | str = "10m",
        preemption: Preemption | bool | None = True,
    ) -> None:
        if on_failure not in ("warn", "raise"):
            raise ValueError(f"on_failure={on_failure!r}: warn or raise")
        self.run = Run(open_store(run))
        self.ledger: Ledger | None = None
        self._state = State.of(state)
        self._every, self._keep = save or Every(steps=100), keep or Keep()
        self._init = init if init is None or isinstance(init, Init) else Init(init)
        self._raises, self._recycle = on_failure == "raise", recycle
        self._seconds, self._team = seconds_of(deadline, "deadline"), team_of(ranks)
        self._joint = Joint(self._team, self.run.store) if self._team is not None else None
        watched = Preemption() if preemption is True else preemption or None
        self._stopping = Stopping(watched, self._team, self.run.store.url.rstrip("/").rpartition("/")[2])
        self._session: Session | None = None
        self._has_begun = False
        self._step: int | None = None
        self._metrics: Mapping[str, Any] | None = None
        self._saved_step = 0
        self._handle: Handle | None = None
        self._saved_at = time.monotonic()
        self._is_closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._is_closed = True
            self._stopping.close()

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
        skipped = [[int(a), int(b)] for a, b in skip_samples] if skip_samples else None
        return self._go_on(self._resuming().resume(at, wishes, stage, required, skipped, self._init))

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
        self._ready()
        if n <= (self._step or 0):
            raise Refused(f"step({n}) after step {self._step}: steps must grow; Run.rollback goes back")
        self._step, self._metrics = n, metrics
        if not self._is_due(n):
            return None
        return self._save(None, None)

    def should_stop(self) -> bool:
        """Whether the job is asked to stop: leave the loop then, and with it the `with`, which saves the last step.

        Every rank calls it equally often; all get the same answer at the same call, and once it is yes it stays so. From the
        first call on, the signals of `preemption` no longer end the process.

        Raises:
            BoardGone: the store by which ranks talk does not answer.
        """
        return self._stopping.should_stop()

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
        try:
            if not self._is_closed and self._step is not None and self._step > self._saved_step:
                self._save(None, None)
        finally:
            self._is_closed = True
            self._stopping.close()

    def _resuming(self) -> Resuming:
        return Resuming(self.run.store, self._state, self._team, self._seconds)

    def _go_on(self, resumed: Resumed) -> int:
        self.ledger = resumed.ledger or self.ledger
        self._step = self._saved_step = resumed.step
        self._session, self._has_begun = resumed.session, True
        self._saved_at = time.monotonic()
        if self._session is not None:
            keep_session(self._session)
        return resumed.step

    def _ready(self) -> None:
        """Begin a run that has no commit yet, where `resume` was not called."""
        if self._has_begun:
            return

        def check() -> None:
            if self.run.latest() is not None:
                raise Refused(f"{self.run.path} has commits: call resume() before step(), or Run.rollback() to go back")
            if self._init is not None:
                raise Refused("init= is read by resume(): call it before step()")

        self._lead("begin the run", check)
        self._go_on(self._resuming().begin_fresh(None))

    def _lead(self, name: str, work: Callable[[], T]) -> T:
        """What `work` gives on the rank that leads."""
        if self._team is None:
            return work()
        result: T = self._team.lead(name, self._seconds, work)
        return result

    def _is_due(self, n: int) -> bool:
        """Whether step `n` is to be saved; where minutes count, the clock of the rank that leads decides."""

        def is_due() -> bool:
            return self._every.is_due(n, self._saved_step, time.monotonic() - self._saved_at)

        return is_due() if self._every.minutes is None else self._lead(f"whether step {n} is due", is_due)

    def _save(self, pin: str | None, select: str | Sequence[str] | None, must_raise: bool = False) -> Handle | None:
        self._ready()
        assert self._step is not None
        step, began = self._step, time.monotonic()
        try:
            self._check_time(step)
            handle = self._save_now(step, pin, select)
        except (Unavailable, Deadline, StepExists, TooLate) as error:
            can_wait = self._team is not None or isinstance(error, (Unavailable, TooLate))
            if self._raises or must_raise or not can_wait:
                raise
            log.error("step %d was not saved: %s", step, error)
            warnings.warn(f"step {step} was not saved: {error}", RuntimeWarning, stacklevel=3)
            return None
        if select is None:
            self._saved_step, self._saved_at, self._handle = step, time.monotonic(), handle
            self._stopping.note_save(self._saved_at - began)
        self._prune()
        return handle

    def _check_time(self, step: int) -> None:
        """
        Raises:
            TooLate: the job stops, and this save cannot end before it is killed.
        """
        if refusal := self._stopping.refusal(step, self._saved_step or None):
            raise TooLate(f"step {step} of {self.run.path}: {refusal}")

    def _save_now(self, step: int, pin: str | None, select: str | Sequence[str] | None) -> Handle:
        best = [self._keep.metric, self._keep.mode] if self._keep.metric else None
        refer = not self._keep.is_kept_forever(step)
        if self._joint is not None:
            return save_jointly(
                self._joint, self._opened, self._state, step, self._stopping.within(self._seconds),
                metrics=self._metrics, pin=pin, select=select, recycle=self._recycle, refer=refer, best=best,
            )  # fmt: skip
        made = state_contents(self._state, select)
        return save_contents(
            self._opened(), made, step, metrics=self._metrics, pin=pin, recycle=self._recycle, refer=refer, best=best
        )

    def _opened(self) -> Session:
        assert self._session is not None
        return self._session

    def _prune(self) -> None:
        if self._session is None:  # another rank leads, and prunes
            return
        self._session.check_newest()  # what an older attempt would keep is not what the newer one needs
        try:
            self.run.prune(self._keep, recycle=self._recycle)
        except HoldfastError as error:
            log.error("pruning failed, nothing was lost: %s", error)
            warnings.warn(f"pruning failed, nothing was lost: {error}", RuntimeWarning, stacklevel=4)
