"""Commands to another process over a pipe, and its answers: values, or the reason why there are none."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Failed(Exception):
    """A method cannot go on; the message is the reason, for the reader of the table."""


def hear(channel: Connection, command: str, seconds: float) -> Any:
    """The answer to `command`.

    Raises:
        Failed: the other process says why, has ended, or does not answer in time.
    """
    if not channel.poll(seconds):
        raise Failed(f"{command}: no answer in {seconds:.0f} s")
    try:
        outcome, result = channel.recv()
    except (EOFError, ConnectionError):
        raise Failed(f"{command}: its process ended") from None
    if outcome == "failed":
        raise Failed(f"{command}: {result}")
    return result


def answer(channel: Connection, call: Callable[[], Any]) -> None:
    try:
        values = call()
    except Exception as error:
        channel.send(("failed", " ".join(f"{type(error).__name__}: {error}".split())))
    else:
        channel.send(("done", values))


def serve(channel: Connection, make: Callable[[], Any]) -> None:
    """Make an object and call its methods as asked, (name, arguments) at a time, until the other side closes the channel."""
    made: list[Any] = []
    answer(channel, lambda: made.append(make()))
    while True:
        try:
            command, options = channel.recv()
        except EOFError:
            return
        answer(channel, lambda: getattr(made[0], command)(**options))  # noqa: B023
