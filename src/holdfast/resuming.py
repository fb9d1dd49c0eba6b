"""Resuming: the newest intact step of the lineage, agreed by all ranks, loaded by all, and a new attempt that begins there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .address import find
from .api import open_checkpoint, open_together
from .errors import Corrupt, HoldfastError, NoCheckpoint, Unavailable, Unsupported
from .format.names import parse_step_dir
from .format.records import StepRef
from .loading.ledger import Ledger
from .loading.restoring import restore_from
from .loading.together import Alone, Together
from .loading.wishes import Wishes
from .per_rank import PerRank
from .run.history import History, Step, lineage_bounds
from .run.session import Session
from .run.team import Team
from .state import State
from .store.base import Store
from .version import libraries

log = logging.getLogger("holdfast")
_TRIES = 5


@dataclass
class Resumed:
    """Where training goes on.

    Attributes:
        step: completed; 0 in a new run. ledger: the account of the load, or None. session: of the process that leads.
        attempt: that was begun.
    """

    step: int
    ledger: Ledger | None
    session: Session | None
    attempt: int


@dataclass
class Resuming:
    """One resume of a state from a run, by one process or by all ranks of a team."""

    store: Store
    state: State
    team: Team | None
    seconds: float
    """Until each load must be done."""
    reads: Store | None = None
    """What data is read from, where that is not the store itself."""

    def resume(self, at: int | str | None, wishes: Wishes, stage: bool, required: bool, skipped: Any, init: Any) -> Resumed:
        """See `Checkpointer.resume`.

        Raises:
            Mismatch, Corrupt, NoCheckpoint, Unavailable.
        """
        for _ in range(_TRIES):
            chosen = [StepRef(*ref) for ref in self._lead("find what to resume from", lambda: self._choose(at, required))]
            if not chosen:
                return self.begin_fresh(init)
            if (resumed := self._load_first_intact(chosen, wishes, stage, skipped, at)) is not None:
                return resumed
        raise Unavailable(f"{self.store.url}: each step found was pruned before it could be held; is another job saving there?")

    def begin_fresh(self, init: Any) -> Resumed:
        """Begin a run that has no commit yet, from `init` if there is one."""
        ledger = None
        if init is not None:
            together = self._begin("load init")
            with together.open(lambda: open_checkpoint(init.source)) as checkpoint:
                roles = sorted(checkpoint.commit.roles)
                select = init.select or [*roles, *(f"{role}.*" for role in roles)]
                wishes = Wishes.of(select, (), init.waive, init.rename, init.cast)
                ledger = restore_from(checkpoint, self.state, wishes, all_roles=False, ranks=together)
        session, attempt = self._open_session(lambda: Session(self.store, libraries()))
        return Resumed(0, ledger, session, attempt)

    def _choose(self, at: int | str | None, required: bool) -> list[list[int]]:
        """Steps to resume from, the one to try first in front."""
        history = History(self.store)
        try:
            steps = [find(history, at)] if at is not None else _candidates(history)
        except NoCheckpoint:
            if required or at is not None:
                raise
            steps = []
        if required and not steps:
            raise NoCheckpoint(f"nothing is committed in {self.store.url}")
        return [[step.step, step.attempt] for step in steps]

    def _load_first_intact(
        self, chosen: Sequence[StepRef], wishes: Wishes, stage: bool, skipped: Any, at: int | str | None
    ) -> Resumed | None:
        """Load the first of `chosen` that is intact, and begin an attempt there while it is held; None if all are gone."""
        fallbacks: list[str] = []
        last_error: HoldfastError | None = None
        for ref in chosen:
            try:
                together = self._begin(f"resume at step {ref.step}")
                with open_together(together, self.reads or self.store, partial(_by_ref, ref)) as checkpoint:
                    ledger = restore_from(checkpoint, self.state, wishes, all_roles=True, stage=stage, ranks=together)
                    self._skip(skipped)
                    session, attempt = self._open_session(partial(self._begin_attempt, ref, skipped, at, last_error is not None))
            except Corrupt as error:
                last_error = error
                fallbacks.append(str(error))
                continue
            except NoCheckpoint:
                continue
            if at is None:
                fallbacks = self._lead("list damage", partial(_damaged_beyond, self.store, ref.step)) + fallbacks
            ledger.fallbacks = fallbacks
            for why in fallbacks:
                log.warning("passed over a damaged step: %s", why)
            return Resumed(ref.step, ledger, session, attempt)
        if last_error is not None:
            raise last_error
        return None

    def _skip(self, asked: Any) -> None:
        """Let the parts that know of sample positions leave out what was asked for, now or by a rollback before."""

        def recorded() -> list[list[int]]:
            attempts = History(self.store).look().attempts
            return [span for number in lineage_bounds(attempts) for span in attempts[number].skipped_samples or []]

        spans = [*self._lead("find what to skip", recorded), *(asked or [])]
        for _, part in self.state.parts:
            holder = part.obj if isinstance(part, PerRank) else part
            if spans and hasattr(holder, "skip_samples"):
                holder.skip_samples([(low, high) for low, high in spans])

    def _begin_attempt(self, ref: StepRef, skipped: Any, at: int | str | None, fell_back: bool) -> Session:
        newest = ref
        if at is not None:
            with contextlib.suppress(Corrupt, Unsupported):
                newest = History(self.store).newest().ref
        is_back = newest != ref and not fell_back
        return Session(self.store, libraries(), "rollback" if is_back else "restart", ref, skipped)

    def _open_session(self, make: Callable[[], Session]) -> tuple[Session | None, int]:
        """The leader's session, None on other ranks; and its attempt."""
        made: list[Session] = []

        def begin() -> int:
            made.append(make())
            return made[0].attempt

        attempt = self._lead("begin an attempt", begin)
        return (made[0] if made else None), attempt

    def _begin(self, name: str) -> Alone | Together:
        return Together(self.team, name, self.seconds) if self.team is not None else Alone()

    def _lead(self, name: str, work: Callable[[], Any]) -> Any:
        return work() if self.team is None else self.team.lead(name, self.seconds, work)


def _by_ref(ref: StepRef, history: History) -> Step:
    found = history.by_ref(ref)
    if found is None:
        raise NoCheckpoint(f"step {ref.step} of {history.store.url} was pruned meanwhile")
    return found


def _candidates(history: History) -> list[Step]:
    """Steps to resume from, newest first."""
    snapshot = history.look()
    steps = [s for s in reversed(snapshot.lineage) if s.kind != "partial"]
    damaged = {_step_of(path): error for path, error in snapshot.damaged.items() if path.startswith("steps/")}
    for step, error in damaged.items():
        if not steps or (step > steps[0].step and isinstance(error, Unsupported)):
            raise error  # what a later version wrote is not damaged: it is not passed over
    return steps


def _damaged_beyond(store: Store, step: int) -> list[str]:
    """Why newer steps, whose records are damaged, were not tried."""
    damaged = History(store).look().damaged
    return [str(e) for path, e in damaged.items() if path.startswith("steps/") and _step_of(path) > step]


def _step_of(path: str) -> int:
    """The step of a step's directory."""
    return (parse_step_dir(path.removeprefix("steps/")) or (0,))[0]
