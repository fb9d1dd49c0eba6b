"""`holdfast agent`: run the process that saves for a run outside of a job, ask it how it is, have it finish, or end it."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
import typer

from ..address import UsageError
from ..errors import Deadline, NoCheckpoint, Refused
from ..policy.durations import seconds_of
from ..run.status import Status
from .place import find_run
from .terminal import Json, print_json


class Action(str, enum.Enum):
    """What to do with it."""

    SERVE = "serve"
    STATUS = "status"
    FLUSH = "flush"
    STOP = "stop"


def agent(
    action: Annotated[Action, typer.Argument(help="serve: be the agent; status; flush: finish what was captured; stop.")],
    run: Annotated[str, typer.Argument(help="The run, which need not exist yet for `serve`.", metavar="RUN")],
    timeout: Annotated[str, typer.Option(help="Of flush and stop.", metavar="DURATION")] = "10m",
    idle: Annotated[str, typer.Option(help="Of serve: end when no trainer has come for so long.", metavar="DURATION")] = "8h",
    nice: Annotated[int, typer.Option(help="Of serve: added to the priority of the process.", metavar="N")] = 5,
    prometheus: Annotated[bool, typer.Option("--prometheus", help="Of status: as text for Prometheus.")] = False,
    as_json: Json = False,
) -> int:
    """Run, ask or end the process of this node that saves for a run."""
    if action is Action.SERVE:
        return _serve(run, idle, nice)
    place = find_run(run)
    if action is Action.STATUS:
        return _status(place.store.url, as_json, prometheus)
    from ..agent.client import flush, stop

    seconds = seconds_of(timeout, "--timeout")
    is_done = (flush if action is Action.FLUSH else stop)(place.store.url, seconds)
    if is_done is None:
        raise NoCheckpoint(f"no agent saves for {place.store.url} on this node")
    if not is_done:
        raise Deadline(f"what was captured is not durable after {seconds:g} s: `holdfast agent status {run}` says what is left")
    if as_json:
        print_json({"run": place.store.url, "action": action.value, "done": True})
    else:
        print("what was captured is durable" + (", and the agent ends" if action is Action.STOP else ""))
    return 0


def _serve(run: str, idle: str, nice: int) -> int:
    """Be the agent: for a service or a DaemonSet, which the end of a job does not end."""
    from ..agent.links import reach
    from ..agent.place import node_name, socket_path, starting
    from ..agent.serve import listen, serve
    from ..store.locate import open_store

    url = open_store(run).url
    path = socket_path(url, node_name())
    with starting(path):
        if (other := reach(path)) is not None:
            other.close()
            raise Refused(f"an agent saves for {url} on this node already: `holdfast agent status {run}`")
        listener = listen(path)
    serve(listener, path, url, seconds_of(idle, "--idle"), nice, stays=True)
    return 0


def _status(url: str, as_json: bool, prometheus: bool) -> int:
    from ..agent.client import status_of

    status = status_of(url)
    if status is None:
        raise NoCheckpoint(f"no agent saves for {url} on this node")
    if as_json and prometheus:
        raise UsageError("--json or --prometheus, not both")
    if as_json:
        print_json(msgspec.to_builtins(status))
    elif prometheus:
        from ..agent.metrics import prometheus as text_of

        print(text_of(status), end="")
    else:
        for line in _lines(status):
            print(line)
    return 0


def _lines(status: Status) -> list[str]:
    from .amounts import duration, size

    lines = [
        f"agent {status.pid} of {status.run}, attempt {status.attempt}, since {duration(status.uptime_seconds)}",
        f"memory: {size(status.resident_bytes)}, and {size(status.arena_bytes)} for snapshots",
        f"saves: {status.committed_saves} committed, {status.skipped_saves} left out, {status.failed_saves} failed",
    ]
    lines += [f"rank {r.rank}: process {r.pid}, {'connected' if r.is_connected else 'gone'}" for r in status.ranks]
    lines += [f"step {save.step}: {save.level}" for save in status.saves[-5:]]
    return lines + [error.text for error in status.errors]
