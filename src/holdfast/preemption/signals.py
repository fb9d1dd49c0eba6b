"""Listening to signals beside whoever else does: handlers that were there before are called, and are put back at the end.

Python runs a handler between two of its instructions, in the main thread. So listeners here only note that a signal came.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

log = logging.getLogger("holdfast")
Listener = Callable[[int], None]

_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
"""Signals that do nothing by default."""
_taps: list[Tap] = []
"""Those that somebody listens to."""
_has_warned = False


class Tap:
    """The handler of one signal for all who listen to it here.

    While somebody listens, the default action is held back: that the process goes on is the point. With nobody listening, it is
    as if it were not there: another handler may still call it, one that was put on top and remembers it.
    """

    def __init__(self, number: int, before: Any) -> None:
        self.number, self.before = number, before
        self.listeners: tuple[Listener, ...] = ()
        """Replaced, never changed: a signal may come at any instruction."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listeners = self.listeners
        for listener in listeners:
            listener(number)
        if callable(self.before):
            self.before(number, frame)
        elif self.before is signal.SIG_DFL and not listeners and number not in _HARMLESS:
            on_top = signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            signal.signal(number, on_top)


def listen(number: int, listener: Listener) -> Tap | None:
    """Call `listener` at each signal `number`, until `unlisten`. None, with a warning, where this is not possible."""
    if threading.current_thread() is not threading.main_thread():
        _warn_once(
            "signals can only be caught by the main thread: this Checkpointer does not see them; its file= and deadline= count"
        )
        return None
    current: Any = signal.getsignal(number)
    if current is None:
        _warn_once(f"{signal.Signals(number).name} has a handler that is not Python's, which could not be put back: it stays")
        return None
    tap = current if isinstance(current, Tap) else Tap(number, current)
    tap.listeners = (*tap.listeners, listener)
    if tap not in _taps:
        _taps.append(tap)
    if tap is not current:
        signal.signal(number, tap)  # last: from here on it is called
    return tap


def unlisten(tap: Tap, listener: Listener) -> None:
    """End what `listen` began. The last one to go puts the handler from before back, unless somebody has put another on top."""
    tap.listeners = tuple(one for one in tap.listeners if one is not listener)
    if not tap.listeners:
        _remove(tap)


def _remove(tap: Tap) -> None:
    if tap in _taps:
        _taps.remove(tap)
    current: Any = signal.getsignal(tap.number)
    if current is tap:
        with contextlib.suppress(ValueError):  # not the main thread: with nobody listening it does no harm
            signal.signal(tap.number, tap.before)


def _forget() -> None:
    """In a forked child: nobody listens there. Otherwise SIGTERM would not end it, and whoever sent that would wait for ever."""
    while _taps:
        tap = _taps[-1]
        tap.listeners = ()
        _remove(tap)


def _warn_once(text: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        log.warning(text)
        warnings.warn(text, RuntimeWarning, stacklevel=5)


os.register_at_fork(after_in_child=_forget)
