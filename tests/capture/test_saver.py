"""What the trainer's side tells an engine, when, and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import holdfast
from holdfast.agent.messages import Joined, Message, Table
from holdfast.capture.saver import Saver


class Line:
    """A link to an engine that takes everything and never answers."""

    def __init__(self) -> None:
        self.is_up = threading.Event()
        self.is_up.set()
        self.told: list[Message] = []

    def send(self, message: Message, sent: Callable[[], None] | None = None) -> None:
        self.told.append(message)

    def flush(self, seconds: float) -> bool:
        return True

    def close(self, seconds: float) -> None:
        pass


@pytest.fixture
def saver() -> Iterator[Saver]:
    made = Saver(
        holdfast.State(model=torch.nn.Linear(300, 3)),
        (),
        0,
        (0,),
        False,
        "auto",
        60.0,
        1,
        lambda ref: None,
        lambda step, mine: mine,
    )
    made.link = Line()
    yield made
    made.close(1.0)


def test_what_an_engine_was_told_before_it_knew_of_the_job_it_is_told_again(saver: Saver) -> None:
    """An agent that is not adopted yet understands nothing; what waits for its answer would wait for ever."""
    told = saver.link.told  # type: ignore[attr-defined]
    saver.prepare()
    saver.prepare()
    assert [type(message) for message in told] == [Table]
    saver.hear(Joined(1), [])
    saver.prepare()
    assert [type(message) for message in told] == [Table, Table]
    assert len({message.number for message in told}) == 2
