"""A step that several ranks have written coded, each with rates and choices of its own, is one step like any other."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from ranks import pool

import holdfast
from holdfast.api import joint_of, state_contents
from holdfast.coding import coder_of
from holdfast.ranks import team_of
from holdfast.run.session import session_of
from holdfast.state import State
from holdfast.store.locate import open_store
from holdfast.version import libraries

from .states import mesh_of, numbers, replica, shard

WORLD = 2
CODINGS = {1: ["planes", "zstd"], 2: ["zstd", "raw"], 3: ["raw", "planes"]}
"""By step: what each rank asks for."""


def tensors(step: int) -> dict[str, torch.Tensor]:
    return {
        "rows": numbers("rows", step, 300, 400),
        "copies": numbers("copies", step, 200, 300),
        "frozen": numbers("frozen", 0, 500, 400),
    }


def save_coded(directory: Path) -> list[list[str]]:
    """The codecs of each step, as the ranks learn them from the store."""
    rank, mesh = dist.get_rank(), mesh_of(*range(WORLD))
    store, team = open_store(directory), team_of(None)
    assert team is not None
    joint = joint_of(team, store)
    for step, asked in CODINGS.items():
        whole = tensors(step)
        held = {
            "sharded": {"rows": shard(whole["rows"], mesh), "frozen": shard(whole["frozen"], mesh)},
            "declared": {"copies": replica(whole["copies"], mesh)},
        }
        joint.save(
            lambda held=held: state_contents(State.of(held), None, team.ranks),
            lambda step=step: session_of(store, libraries(), step),
            step,
            60.0,
            coding=coder_of(asked[rank]),
        )
    dist.barrier()
    return [found.commit.codecs for found in holdfast.Run(directory).steps()]


def test_ranks_with_other_codecs_write_one_step_that_loads_anywhere(tmp_path: Path) -> None:
    codecs = [["planes", "zstd"], ["planes", "zstd"], ["planes", "zstd"]]  # steps 2 and 3 refer to what step 1 holds
    assert pool(WORLD).run(save_coded, tmp_path) == [codecs, codecs]
    for step in CODINGS:
        whole = tensors(step)
        with holdfast.open(tmp_path, step=step) as checkpoint:
            assert checkpoint.verify() == []
            assert torch.equal(checkpoint["sharded.rows"][:], whole["rows"])
            assert torch.equal(checkpoint["sharded.frozen"][:], whole["frozen"])
            assert torch.equal(checkpoint["declared.copies"][:], whole["copies"])
