"""Who writes what the engine hands over: one session of the run, as its only writer; or a team of ranks together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..coding import Coder
from ..errors import HoldfastError
from ..policy.keep import Keep
from ..run.contents import Contents
from ..run.history import Step
from ..run.joint import Joint
from ..run.marks import check_pin_is_free, pin
from ..run.session import Session
from ..runs import Run
from ..store.base import Store
from .messages import Begin

log = logging.getLogger("holdfast")
Check = Callable[[], None]
_PINNING = 2
"""How many members pin a step: the first of them may die between the commit and its pin."""


class Writer(Protocol):
    """Makes checkpoints durable, one after the other.

    Attributes:
        seconds: what is not captured so long after its writing began is given up; None: it is waited for.
        new_bytes: of the data files that it wrote itself for the last step.
    """

    @property
    def seconds(self) -> float | None: ...

    @property
    def new_bytes(self) -> int: ...

    def write(self, contents: Contents, begin: Begin, metrics: dict[str, Any], world: int, check: Check) -> Step:
        """Durable and committed on return; blocks while bytes are still being captured.

        Args:
            check: raises if it must not be committed after all; called last, when all bytes are written.
        Raises:
            HoldfastError: the step does not exist, or is said to be unconfirmed.
        """
        ...

    def prune(self) -> str:
        """Remove what is not to be kept; returns why that failed, or an empty string. Never raises, and loses nothing."""
        ...

    def refuse(self, step: int, turn: int, error: HoldfastError) -> None:
        """Tell who would write this step with us that we do not. Never raises."""
        ...

    def leave(self, why: str) -> None:
        """Tell who writes with us that nothing more will come, until the next step does. Never raises."""
        ...

    def stay(self) -> None:
        """Take back what `leave` has said. Never raises."""
        ...

    def give_up(self) -> None:
        """Wait for nobody any more who would write with us."""
        ...

    def close(self) -> None:
        """Nothing more is written. Never raises."""
        ...


class SessionWriter:
    """The only writer of a run: for all ranks of one node. Nobody writes with it."""

    seconds = None
    new_bytes = 0

    def __init__(self, session: Session, keep: Keep, recycle: bool, coder: Coder | None = None) -> None:
        self._session, self._keep, self._recycle, self._coder = session, keep, recycle, coder

    def write(self, contents: Contents, begin: Begin, metrics: dict[str, Any], world: int, check: Check) -> Step:
        store = self._session.store
        if begin.pin:
            check_pin_is_free(store, begin.pin)
        step = self._session.save(
            contents, begin.step,
            metrics=metrics, best=_best(self._keep), recycle=self._recycle, refer=begin.refer, world=world, check=check,
            coding=self._coder,
        )  # fmt: skip
        self.new_bytes = step.commit.new_bytes
        if begin.pin:
            pin(store, step.ref, begin.pin)
        return step

    def prune(self) -> str:
        return prune(self._session, self._session.store, self._keep, self._recycle)

    def refuse(self, step: int, turn: int, error: HoldfastError) -> None:
        return

    def leave(self, why: str) -> None:
        return

    def stay(self) -> None:
        return

    def give_up(self) -> None:
        return

    def close(self) -> None:
        return


class JointWriter:
    """One member's part in what a team writes together, each member its own files.

    Args:
        joint: on a board of its own, as training goes on beside it. open_session: of the member that leads. seconds: of a save.
        complete: adds to what was captured what only this process knows of it.
    """

    def __init__(
        self, joint: Joint, open_session: Callable[[], Session], complete: Callable[[Contents], Contents], seconds: float,
        keep: Keep, recycle: bool, coder: Coder | None = None,
    ) -> None:  # fmt: skip
        self._coder = coder
        self._joint, self._open_session, self._complete = joint, open_session, complete
        self.seconds, self._keep, self._recycle = seconds, keep, recycle

    def write(self, contents: Contents, begin: Begin, metrics: dict[str, Any], world: int, check: Check) -> Step:
        step = self._joint.save(
            lambda: (self._complete(contents), "full"), self._open_session, begin.step, self.seconds,
            metrics=metrics, best=_best(self._keep), recycle=self._recycle, refer=begin.refer, coding=self._coder, check=check,
            turn=begin.turn,
        )  # fmt: skip
        if begin.pin and self._joint.team.position < _PINNING:
            try:
                pin(self._joint.store, step.ref, begin.pin)
            except HoldfastError as error:  # the step is committed, for all
                log.error("step %d is saved, but not pinned as %r: %s", step.step, begin.pin, error)
        return step

    @property
    def new_bytes(self) -> int:
        return self._joint.new_bytes

    def refuse(self, step: int, turn: int, error: HoldfastError) -> None:
        self._joint.refuse(step, turn, error)

    def leave(self, why: str) -> None:
        with contextlib.suppress(Exception):  # the board is gone: they have a deadline
            self._joint.team.leave(why)

    def stay(self) -> None:
        with contextlib.suppress(Exception):
            self._joint.team.stay()

    def give_up(self) -> None:
        self._joint.team.ended.set()

    def close(self) -> None:
        return

    def prune(self) -> str:
        session = self._joint.session
        return prune(session, self._joint.store, self._keep, self._recycle) if session is not None else ""


def prune(session: Session, store: Store, keep: Keep, recycle: bool) -> str:
    """See `Writer.prune`."""
    try:
        session.check_newest()  # what an older attempt would keep is not what the newer one needs
        Run(store).prune(keep, recycle=recycle)
    except HoldfastError as error:
        log.error("pruning failed, nothing was lost: %s", error)
        return str(error)
    return ""


def _best(keep: Keep) -> list[str] | None:
    return [keep.metric, keep.mode] if keep.metric else None
