"""Agents of several nodes save together: what is committed without any trainer; what is given up, when, and with which words."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import pool
from ranks.pools import Pool

import holdfast
from holdfast.agent.links import ask
from holdfast.agent.messages import Ask, Told
from holdfast.handle import CAPTURED
from holdfast.run.status import Status
from holdfast.store.locate import open_store

from .job import SHAPES, whole
from .lives import kill, nothing_is_left, until
from .on_nodes import NODES, has_stayed, look, look_in_memory, save_and_stay, save_often, save_steps, save_when_told

pytestmark = pytest.mark.slow
WORLD = 4
MOST = 8
"""Steps, with which a life is at its end."""


def status_of(run: Path, node: str) -> Status:
    """What the agent of a node says of itself."""
    told = ask(open_store(run).url, node, Ask(), 5.0)
    assert isinstance(told, Told)
    return told.status


def level_of(run: Path, node: str, step: int) -> str:
    """How far an agent is with a step; "" where it knows nothing of it."""
    return next((save.level for save in status_of(run, node).saves if save.step == step), "")


def latest_of(run: Path) -> int:
    latest = holdfast.Run(run).latest()
    return 0 if latest is None else latest.step


class Stage:
    """A job on two nodes that has one durable step, and waits to be told to go on."""

    def __init__(self, directory: Path, sockets: Path, deadline: float, most: int = MOST) -> None:
        self.run = directory / "run"
        self.crew = Pool(WORLD)
        self.crew.start(save_when_told, self.run, sockets, deadline, most)
        until(lambda: has_stayed(self.run, WORLD), "all ranks have a durable step")

    def go_on(self) -> None:
        (self.run.parent / "go on").touch()

    def outcomes(self) -> list[Any]:
        """How each rank's saves have ended."""
        try:
            return self.crew.results(timeout=60, catch=True)
        finally:
            self.crew.close(at_once=True)


def test_what_two_nodes_save_is_loaded_in_every_bit_and_has_files_of_nodes(in_background: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pool(WORLD).run(save_steps, run, in_background, 3) == [[]] * WORLD
    for step in holdfast.Run(run).steps():
        names = sorted(path.name for path in Path(run, step.path).iterdir())
        assert {name[:5] for name in names if name.startswith("n")} == {"n0000", "n0002"}, names
        with holdfast.open(run, step=step.step) as checkpoint:
            assert checkpoint.verify() == []
    assert pool(WORLD).run(look, run, in_background) == [(3, [])] * WORLD
    nothing_is_left(in_background)
    assert list((run / "agents").iterdir()) == []


def test_many_saves_leave_agents_and_their_board_with_what_they_had(in_background: Path, tmp_path: Path) -> None:
    told = pool(WORLD).run(save_often, tmp_path / "run", in_background, 10, 40, timeout=100)
    for some, all_ in told:
        assert (all_.arenas, all_.mappings) == (some.arenas, some.mappings)
        assert all_.threads <= some.threads + 2
        assert all_.descriptors <= some.descriptors + 4, "files that are being written"
        assert all_.on_board <= some.on_board + 10, "the messages of a call that is under way"
    nothing_is_left(in_background)


def test_every_trainer_killed_what_was_captured_is_committed_by_the_agents(in_background: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    crew = Pool(WORLD)
    crew.start(save_and_stay, run, in_background, CAPTURED, 8)
    until(lambda: has_stayed(run, WORLD), "all ranks have captured the step")
    crew.close(at_once=True)
    until(lambda: latest_of(run) == 2, "the agents commit it")
    found = pool(WORLD).run(look_in_memory, run, in_background, 8)
    assert [(step, wrong) for step, wrong, _ in found] == [(2, [])] * WORLD
    state_bytes = sum(8 * whole(name, 0, 8)[0].numel() for name in SHAPES) * 2
    assert sum(sum(read) for _, _, read in found) > state_bytes // 2, "most of it comes from the memory of the agents"
    nothing_is_left(in_background)


@pytest.mark.parametrize("victim", NODES)
def test_an_agent_killed_the_step_is_given_up_and_a_later_one_is_saved_with_another(
    in_background: Path, tmp_path: Path, victim: str
) -> None:
    """Both for the node that leads and for another."""
    stage = Stage(tmp_path, in_background, 10)
    pid = status_of(stage.run, victim).pid
    os.kill(pid, signal.SIGSTOP)  # it takes no part in what is begun from here on
    stage.go_on()
    other = NODES[1 - NODES.index(victim)]
    until(lambda: level_of(stage.run, other, 2) == "writing", "the other agent begins to write")
    kill(pid)
    outcomes = stage.outcomes()
    assert all(isinstance(one, dict) for one in outcomes), outcomes
    last = {max(one) for one in outcomes}
    assert len(last) == 1
    [saved] = last
    assert 2 < saved < MOST
    assert [one[saved] for one in outcomes] == [""] * WORLD, outcomes
    here, there = (outcomes[:2], outcomes[2:]) if victim == "a" else (outcomes[2:], outcomes[:2])
    assert all("is gone" in one[2] for one in here), here
    assert all(f"node {victim} (ranks " in one[2] for one in there), there
    assert pool(WORLD).run(look, stage.run, in_background) == [(saved, [])] * WORLD
    nothing_is_left(in_background)


def test_a_node_whose_agent_hangs_is_named_at_the_deadline(in_background: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path, in_background, 5, most=2)
    pid = status_of(stage.run, "b").pid
    os.kill(pid, signal.SIGSTOP)
    stage.go_on()
    until(lambda: status_of(stage.run, "a").failed_saves == 1, "the other node gives it up")
    os.kill(pid, signal.SIGCONT)
    outcomes = stage.outcomes()
    assert [isinstance(one, dict) for one in outcomes] == [True] * WORLD, outcomes
    assert all("node b (ranks 2, 3)" in one[2] for one in outcomes), outcomes
    assert latest_of(stage.run) == 2, "leaving the `with` has saved it once more"
    nothing_is_left(in_background)


def test_the_trainers_of_one_node_killed_what_they_had_not_captured_is_given_up_at_once_by_all(
    in_background: Path, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, in_background, 600, most=2)
    for rank in (2, 3):
        stage.crew.kill(rank)
    stage.go_on()
    outcomes = stage.outcomes()
    for rank in (0, 1):
        assert isinstance(outcomes[rank], dict), outcomes
        assert "node b (ranks 2, 3)" in outcomes[rank][2], outcomes
    assert latest_of(stage.run) == 1
    assert pool(WORLD).run(look, stage.run, in_background) == [(1, [])] * WORLD
    nothing_is_left(in_background)
