"""Asking the agent of a run, for whoever is no rank of its job: commands and monitors."""

from __future__ import annotations

import time

from ..run.status import Status
from .links import ask
from .messages import Ask, Flush, Flushed, Stop, Told
from .place import node_name, socket_path

_ASK_SECONDS = 5.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.02


def status_of(url: str) -> Status | None:
    """The status of the agent of a run on this node, or None if there is none.

    Args:
        url: of the run's store.
    Raises:
        Deadline: there is one, and it does not answer.
    """
    answer = ask(url, node_name(), Ask(), _ASK_SECONDS)
    return answer.status if isinstance(answer, Told) else None


def flush(url: str, seconds: float) -> bool | None:
    """Have the agent make durable what was captured; whether it was done in time, None where there is no agent.

    Raises:
        Deadline: it does not answer.
    """
    answer = ask(url, node_name(), Flush(seconds), seconds + _ASK_SECONDS)
    return answer.is_done if isinstance(answer, Flushed) else None


def stop(url: str, seconds: float) -> bool | None:
    """Have the agent flush and end; as `flush`. It is gone on return, if it was done in time."""
    answer = ask(url, node_name(), Stop(), seconds + _ASK_SECONDS)
    if not isinstance(answer, Flushed):
        return None
    until = time.monotonic() + _END_SECONDS
    while answer.is_done and time.monotonic() < until and socket_path(url, node_name()).exists():
        time.sleep(_LOOK_SECONDS)
    return answer.is_done
