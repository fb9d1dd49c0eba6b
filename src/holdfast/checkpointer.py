"""The one object that a trainer holds: resume once, call `step` after each optimizer step, leave the `with`.

Thin: when to save is `Every`, what to keep is `Keep`, the work is in `Resuming` and, in the background, in `Saver`. With
HOLDFAST_SYNC=1, or where memory does not hold one version and `on_full="wait"`, saves happen within the call.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any, TypeVar

from . import background
from .api import save_contents, save_jointly, state_contents
from .background import Agent, Settings
from .capture import barrier
from .capture.saver import Saver
from .capture.slots import DoesNotFit, Orders
from .coding import coder_of
from .errors import Deadline, HoldfastError, Overdue, Refused, StepExists, Superseded, TooLate, Unavailable, Unsupported
from .handle import DURABLE, Handle
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
from .run.marks import check_pin_is_free
from .run.session import Session, keep_session
from .runs import Run, plain_metrics
from .state import State
from .store.base import Store
from .store.locate import open_store

log = logging.getLogger("holdfast")
T = TypeVar("T")
_CLOSE_SECONDS = 10.0


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

    Saves happen in the background: `step` copies what cannot wait and returns; the rest is copied until the optimizer steps
    again, and written by a process of its own. Leaving the `with` saves the last step if it is not saved, and waits until it is
    durable; on an exception it waits for what was captured, and lets it pass.

    Args:
        run: a directory, made if missing, `memory://NAME`, or a store.
        state: a State, or a dict as for `holdfast.save`.
        save: when to save. keep: what to keep; pruning runs after each save.
        init: an address or an Init, read by `resume` only while the run has no commit.
        memory: bytes, or "16GiB", that snapshots may take on this node, of all its ranks; "auto": half of what is free.
        on_full: what to do with a save that is due while no memory is free: `skip` it, `wait`, or `coalesce`: as `skip`, and
            what is not being written yet makes room for what is newer.
        on_failure: what a save that fails does to training: `warn`, or `raise`. Superseded, Refused and Unsupported always raise,
            but a save that is refused because the job is killed before it could end counts as one that fails.
        lose_at_most: seconds, or "2h": `step` raises Overdue when the last durable step is older.
        recycle: whether new checkpoints are written over the files of pruned ones, which is faster and keeps up
            to one checkpoint's bytes of extra files.
        ranks: global ranks that call together, where torch.distributed is initialised; all of the job by default.
        deadline: seconds, or "10m": by then each call that ranks make together has its outcome, and each save.
        agent: whether a process of this node saves, which survives the trainer; False: a thread. An Agent for its settings.
        coding: of the tensors' bytes: `raw`, `zstd`, `planes`, `adaptive` (what makes them durable soonest, chosen anew as rates
            change), or a mapping from patterns of names to these, and, for moments of optimizers, to `int8`, which is lossy.
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
        memory: int | str = "auto",
        on_full: str = "skip",
        on_failure: str = "warn",
        lose_at_most: float | str | None = None,
        recycle: bool = True,
        ranks: Sequence[int] | None = None,
        deadline: float | str = "10m",
        agent: bool | Agent = True,
        coding: str | Mapping[str, str] = "raw",
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
        self._settings = Settings(memory, on_full, agent, self._keep, recycle, coding, self._seconds)
        self._coder = coder_of(coding)
        self._most_lost = None if lose_at_most is None else seconds_of(lose_at_most, "lose_at_most")
        self._joint = Joint(self._team, self.run.store) if self._team is not None else None
        watched = Preemption() if preemption is True else preemption or None
        self._stopping = Stopping(watched, self._team, self.run.store.url.rstrip("/").rpartition("/")[2])
        self._session: Session | None = None
        self._saver: Saver | None = None
        self._has_begun = False
        self._step: int | None = None
        self._metrics: Mapping[str, Any] | None = None
        self._saved_step = self._resumed_step = 0
        self._handle: Handle | None = None
        self._saved_at = time.monotonic()
        self._durable_at = time.monotonic()
        self._is_closed = False
        barrier.install()  # what steps from here on is seen to fire it

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(HoldfastError):
                self._end(drain=kind is not KeyboardInterrupt)
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

        What an agent still holds of the job that was here before is made durable first. Damaged steps are passed over, newest
        first, and listed in `ledger.fallbacks`. In a run without commits the state is filled from `init`, if given, and 0 is
        returned.

        Args:
            at: a step, a pin, `best`: that one and no other; an older one than the newest begins a rolled-back line.
            skip_samples: half-open ranges of global sample positions to leave out from here on; recorded with the attempt.
            required: raise NoCheckpoint instead of returning 0.
            live, waive, rename, cast, stage: as for `restore`.
        Raises:
            Mismatch: nothing was touched.  Corrupt: no step is intact.  NoCheckpoint, Unavailable.
            Refused: memory does not hold one version of the state, and `on_full` is not `wait`.
        """
        wishes = Wishes.of(None, (), waive, rename, cast, live)
        skipped = [[int(a), int(b)] for a, b in skip_samples] if skip_samples else None
        self._stop_saving()
        background.finish_earlier(self.run.store, self._team, self._seconds)
        with background.in_memory(self.run.store) as reads:
            resumed = self._resuming(reads).resume(at, wishes, stage, required, skipped, self._init)
        return self._go_on(resumed)

    def step(self, n: int, *, metrics: Mapping[str, Any] | None = None) -> Handle | None:
        """Say that step `n` is complete: after optimizer, scheduler, scaler and averages. Saves if the policy says so.

        Returns as soon as training may go on; what went wrong with earlier saves is told here.

        Args:
            n: steps completed; exceeds `resume()` and all before. metrics: kept with the step; only read if it is saved.
        Returns:
            The save, or None if none was due, there was no memory for it, or it failed under `on_failure="warn"`.
        Raises:
            Refused: `n` does not exceed the last step, or the run has commits and `resume` was not called.
            Superseded: a newer attempt has taken over the run.  Overdue: see `lose_at_most`.
        """
        self._ready()
        self._tell_problems()
        if n <= (self._step or 0):
            raise Refused(f"step({n}) after step {self._step}: steps must grow; Run.rollback goes back")
        self._step, self._metrics = n, metrics
        self._check_overdue(n)
        if self._is_due(n):
            return self._save(None, None, may_wait=self._settings.on_full == "wait")
        if self._saver is not None:
            self._prepare(self._saver)
        return None

    def should_stop(self) -> bool:
        """Whether the job is asked to stop: leave the loop then, and with it the `with`, which saves the last step.

        Every rank calls it equally often; all get the same answer at the same call, and once it is yes it stays so. From the
        first call on, the signals of `preemption` no longer end the process.

        Raises:
            BoardGone: the store by which ranks talk does not answer.
        """
        self._note_saves()
        return self._stopping.should_stop()

    def save(self, *, pin: str | None = None, select: str | Sequence[str] | None = None) -> Handle:
        """Save the state of the last `step()` now, whatever the policy says; if it is saved already, that save is returned.

        Args:
            pin: a name that keeps it from pruning. select: patterns of names to save; durable on return; the whole step is
                still saved when due.
        Raises:
            Refused: no step was completed yet.  Superseded, Unavailable, NoSpace, Unsupported.
        """
        if self._step is None or (self._step == self._saved_step and self._handle is None):
            raise Refused("no step was completed since the start or resume(): call step() first")
        if select is None and self._handle is not None and self._handle.error is None and self._step == self._saved_step:
            if pin is not None:
                self._handle.wait(DURABLE, self._seconds)
                self.run.pin(self._step, pin)
            return self._handle
        handle = self._save(pin, select, may_wait=True, must_raise=True)
        assert handle is not None
        return handle

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """Around code that changes the state in other ways than by an optimizer's step: waits for what is being copied."""
        barrier.hold_all()
        yield

    def close(self) -> None:
        """Save the last step if it is not saved, and wait until it is durable. The end of the `with` calls it."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._saver is not None:
                self._saver.drain(self._stopping.within(self._seconds))
            has_failed = self._handle is not None and self._handle.error is not None
            if self._step is not None and (self._step > self._saved_step or has_failed):
                self._save(None, None, may_wait=True)
        finally:
            try:
                self._end(drain=True)
            finally:
                self._stopping.close()

    def _end(self, drain: bool) -> None:
        """Let what was begun become durable, say what did not, and let go."""
        saver, self._saver = self._saver, None
        if saver is None:
            return
        try:
            if drain:
                saver.drain(self._stopping.within(self._seconds))
            self._tell(saver.problems())
        finally:
            saver.close(_CLOSE_SECONDS)

    def _resuming(self, reads: Store | None = None) -> Resuming:
        return Resuming(self.run.store, self._state, self._team, self._seconds, reads)

    def _stop_saving(self) -> None:
        """Before the state is filled: nothing of it may be on its way."""
        if self._saver is not None:
            self._end(drain=True)
        barrier.hold_all()

    def _go_on(self, resumed: Resumed) -> int:
        self.ledger = resumed.ledger or self.ledger
        self._step = self._saved_step = self._resumed_step = resumed.step
        self._session, self._has_begun, self._handle = resumed.session, True, None
        self._saved_at = self._durable_at = time.monotonic()
        if self._session is not None:
            keep_session(self._session)
        if not background.is_synchronous():
            self._saver = background.start(
                self._settings, self._state, self.run.store, self._team, self._session, resumed.attempt
            )
            self._check_memory(self._saver)
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
        """Whether step `n` is to be saved; where minutes count, the clock of the rank that comes first decides."""
        is_due = self._every.is_due(n, self._saved_step, time.monotonic() - self._saved_at)
        if self._every.minutes is None or self._team is None:
            return is_due
        return bool(self._team.decide("due", n, int(is_due)))

    def _check_memory(self, saver: Saver) -> None:
        try:
            saver.check_memory()
        except DoesNotFit as error:
            self._do_without(saver, error)

    def _prepare(self, saver: Saver) -> None:
        try:
            saver.prepare()
        except DoesNotFit as error:
            self._do_without(saver, error)

    def _do_without(self, saver: Saver, error: DoesNotFit) -> None:
        """Save within the call from here on, if that was allowed."""
        saver.close(_CLOSE_SECONDS)
        self._saver = None
        stall = f"each save would hold training up for its whole writing, about {error.nbytes / 1e9:.1f} s at 1 GB/s"
        if self._settings.on_full != "wait":
            raise Refused(f'{error}; {stall}: give more memory=, or accept that with on_full="wait"') from error
        log.warning('%s; %s, as on_full="wait" allows', error, stall)

    def _save(
        self, pin: str | None, select: str | Sequence[str] | None, *, may_wait: bool, must_raise: bool = False
    ) -> Handle | None:
        self._ready()
        assert self._step is not None
        step = self._step
        try:
            self._check_time(step)
            if select is None and self._saver is not None:
                handle = self._begin(self._saver, step, pin or "", may_wait)
            else:
                handle = self._save_now(step, pin, select)
        except (Unavailable, Deadline, StepExists, TooLate) as error:
            if self._raises or must_raise or (self._team is None and isinstance(error, StepExists)):
                raise
            self._warn(f"step {step} was not saved: {error}")
            return None
        if handle is None:
            log.info("step %d is not saved: no memory is free", step)
        elif select is None:
            self._saved_step, self._saved_at, self._handle = step, time.monotonic(), handle
        return handle

    def _note_saves(self) -> None:
        """Let the forecast know how long saves have taken."""
        if self._saver is not None:
            for seconds, nbytes in self._saver.durations():
                self._stopping.note_save(seconds, nbytes)

    def _check_time(self, step: int) -> None:
        """Raises:
        TooLate: the job stops, and this save cannot end before it is killed.
        """
        self._note_saves()
        durable = self._resumed_step if self._saver is not None else self._saved_step
        if self._saver is not None and self._saver.last_durable is not None:
            durable = self._saver.last_durable[0]
        if refusal := self._stopping.refusal(step, durable or None, self._state_bytes):
            raise TooLate(f"step {step} of {self.run.path}: {refusal}")

    def _state_bytes(self) -> int:
        return state_contents(self._state, None, self._team.ranks if self._team is not None else ())[0].nbytes

    def _begin(self, saver: Saver, step: int, pin: str, may_wait: bool) -> Handle | None:
        if pin:
            self._lead(f"pin {pin}", lambda: check_pin_is_free(self.run.store, pin))
        refer = not self._keep.is_kept_forever(step) and not pin
        try:
            return saver.begin(
                Orders(step, plain_metrics(self._metrics), refer, pin, may_wait, self._settings.on_full == "coalesce")
            )
        except DoesNotFit as error:
            self._do_without(saver, error)
            return self._save_now(step, pin or None, None)

    def _save_now(self, step: int, pin: str | None, select: str | Sequence[str] | None) -> Handle:
        """Save within the call."""
        if self._saver is not None:
            self._saver.drain(self._stopping.within(self._seconds))
        began = time.monotonic()
        best = [self._keep.metric, self._keep.mode] if self._keep.metric else None
        refer = not self._keep.is_kept_forever(step)
        if self._joint is not None:
            handle = save_jointly(
                self._joint, self._opened, self._state, step, self._stopping.within(self._seconds),
                metrics=self._metrics, pin=pin, select=select, recycle=self._recycle, refer=refer, best=best,
                coder=self._coder,
            )  # fmt: skip
            nbytes = 0
        else:
            made = state_contents(self._state, select)
            nbytes = made[0].nbytes
            handle = save_contents(
                self._opened(), made, step,
                metrics=self._metrics, pin=pin, recycle=self._recycle, refer=refer, best=best, coder=self._coder,
            )  # fmt: skip
        self._durable_at = time.monotonic()
        if select is None:
            self._stopping.note_save(self._durable_at - began, nbytes)
        self._prune()
        return handle

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
            self._warn(f"pruning failed, nothing was lost: {error}")

    def _tell_problems(self) -> None:
        if self._saver is not None:
            self._tell(self._saver.problems())

    def _tell(self, problems: Sequence[HoldfastError]) -> None:
        """Let the trainer know what has gone wrong in the background."""
        for error in problems:
            if self._raises or isinstance(error, (Superseded, Refused, Unsupported)):
                raise error
            self._warn(str(error))

    def _warn(self, text: str) -> None:
        log.error("%s", text)
        warnings.warn(text, RuntimeWarning, stacklevel=5)

    def _check_overdue(self, n: int) -> None:
        if self._most_lost is None:
            return
        durable = self._saver.last_durable if self._saver is not None else None
        since = time.monotonic() - max(self._durable_at, durable[1] if durable else 0.0)
        if since > self._most_lost:
            last = f"step {durable[0]}" if durable else "nothing since the start"
            raise Overdue(
                f"at step {n} the last durable state ({last}) is {since:.0f} s old, and lose_at_most is {self._most_lost:.0f} s"
            )
