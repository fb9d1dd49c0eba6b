"""Asking the agent of a run, for whoever is no rank of its job: commands and monitors."""

from __future__ import annotations

import os

from ..run.status import Status
from .links import ask
from .messages import Ask, Flush, Flushed, Stop, Told

_ASK_SECONDS = 5.0


def status_of(url: str) -> Status | None:
    """The status of the agent of a run on this node, or None if there is none.

    Args:
        url: of the run's store.
    Raises:
        Deadline: there is one, and it does not answer.
    """
    answer = ask(url, _node(), Ask(), _ASK_SECONDS)
    return answer.status if isinstance(answer, Told) else None


def flush(url: str, seconds: float) -> bool | None:
    """Have the agent make durable what was captured; whether it was done in time, None where there is no agent.

    Raises:
        Deadline: it does not answer.
    """
    answer = ask(url, _node(), Flush(seconds), seconds + _ASK_SECONDS)
    return answer.is_done if isinstance(answer, Flushed) else None


def stop(url: str, seconds: float) -> bool | None:
    """Have the agent flush and end; as `flush`."""
    answer = ask(url, _node(), Stop(), seconds + _ASK_SECONDS)
    return answer.is_done if isinstance(answer, Flushed) else None


def _node() -> str:
    return os.environ.get("HOLDFAST_NODE", "")
