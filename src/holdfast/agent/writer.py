"""Who writes what the engine hands over: one session of the run, as its only writer; or a team of ranks together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
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


class Writer(Protocol):
    """Makes checkpoints durable, one after the other."""

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


class SessionWriter:
    """The only writer of a run: for all ranks of one node."""

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
        if begin.pin:
            pin(store, step.ref, begin.pin)
        return step

    def prune(self) -> str:
        return prune(self._session, self._session.store, self._keep, self._recycle)


class JointWriter:
    """One rank's part in what a team writes together, each rank its own files.

    Args:
        joint: on a board of its own, as training goes on beside it. open_session: of the rank that leads. seconds: of a save.
        describe: layouts and streams of what is being captured.
    """

    def __init__(
        self, joint: Joint, open_session: Callable[[], Session], describe: Callable[[], Contents], seconds: float, keep: Keep,
        recycle: bool, coder: Coder | None = None,
    ) -> None:  # fmt: skip
        self._coder = coder
        self._joint, self._open_session, self._describe = joint, open_session, describe
        self._seconds, self._keep, self._recycle = seconds, keep, recycle

    def write(self, contents: Contents, begin: Begin, metrics: dict[str, Any], world: int, check: Check) -> Step:
        known = self._describe()

        def make() -> tuple[Contents, str]:
            check()  # all bytes are there: what is wrong with them is an error of all ranks
            return replace(contents, layouts=known.layouts, streams=known.streams), "full"

        step = self._joint.save(
            make, self._open_session, begin.step, self._seconds,
            metrics=metrics, best=_best(self._keep), recycle=self._recycle, refer=begin.refer, coding=self._coder,
        )  # fmt: skip
        if begin.pin and self._joint.team.leads:
            pin(self._joint.store, step.ref, begin.pin)
        return step

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
