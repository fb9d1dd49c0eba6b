"""Agents of several nodes save together: what is committed without any trainer, and what is given up, when and with which words."""

from __future__ import annotations

from pathlib import Path

from ranks import pool
from ranks.pools import Pool

import holdfast

from .lives import nothing_is_left, until
from .on_nodes import CAPTURED, has_stayed, look, save_and_stay, save_steps

WORLD = 4


def test_what_two_nodes_save_is_loaded_in_every_bit_and_has_files_of_nodes(in_background: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pool(WORLD).run(save_steps, run, in_background, 3) == [[]] * WORLD
    for step in holdfast.Run(run).steps():
        names = sorted(path.name for path in Path(run, step.path).iterdir())
        assert {name[:5] for name in names if name.startswith("n")} == {"n0000", "n0002"}, names
        with holdfast.open(run, step=step.step) as checkpoint:
            assert checkpoint.verify() == []
    assert pool(WORLD).run(look, run, in_background) == [(3, [])] * WORLD
    assert not (run / "agents").exists() or list((run / "agents").iterdir()) == []
    nothing_is_left(in_background)


def test_every_trainer_killed_what_was_captured_is_committed_by_the_agents(in_background: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    crew = Pool(WORLD)
    crew.start(save_and_stay, run, in_background, CAPTURED, 8)
    until(lambda: has_stayed(run, WORLD), "all ranks have captured the step")
    crew.close(at_once=True)
    until(lambda: holdfast.Run(run).latest().step == 2, "the agents commit it")
    assert pool(WORLD).run(look, run, in_background, 8) == [(2, [])] * WORLD
    nothing_is_left(in_background)
