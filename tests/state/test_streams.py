"""What belongs to each rank: PerRank, random generators by stream, hand-sharded tensors, on real ranks."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import pool
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from holdfast.errors import Mismatch, Refused

DEADLINE = 20.0


class Buffer:
    """Samples that a rank has read ahead."""

    def __init__(self, samples: list[int]) -> None:
        self.samples, self.tensor = samples, torch.tensor(samples)

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples, self.tensor = state["samples"], state["tensor"]


def dealt(states: list[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
    every = [sample for state in states for sample in state["samples"]]
    return {"samples": every[rank::world], "tensor": torch.tensor(every[rank::world])}


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def rank_of() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def save_buffers(run: str) -> list[int]:
    rank = rank_of()
    buffer = Buffer([10 * rank + i for i in range(rank + 2)])
    holdfast.save(run, holdfast.State(rng=False, data=holdfast.PerRank(buffer)), 1, deadline=DEADLINE)
    return buffer.samples


def load_buffers(run: str, has_rule: bool) -> list[int]:
    buffer = Buffer([])
    part = holdfast.PerRank(buffer, dealt if has_rule else None)
    holdfast.restore(run, holdfast.State(rng=False, data=part), deadline=DEADLINE)
    assert buffer.tensor.tolist() == buffer.samples
    return buffer.samples


@pytest.mark.parametrize("has_rule", [False, True])
def test_each_rank_gets_its_own_part_back_in_a_world_of_the_same_size(tmp_path: Path, has_rule: bool) -> None:
    saved = pool(3).run(save_buffers, str(tmp_path))
    assert pool(3).run(load_buffers, str(tmp_path), has_rule) == saved


@pytest.mark.parametrize("world", [2, 4])
def test_another_number_of_ranks_gets_what_the_rule_makes_of_all_parts(tmp_path: Path, world: int) -> None:
    saved = pool(3).run(save_buffers, str(tmp_path))
    found = pool(world).run(load_buffers, str(tmp_path), True)
    assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*saved))


def test_one_process_gets_what_the_rule_makes_of_all_parts(tmp_path: Path) -> None:
    saved = pool(3).run(save_buffers, str(tmp_path))
    assert sorted(load_buffers(str(tmp_path), True)) == sorted(itertools.chain(*saved))


def test_another_number_of_ranks_without_a_rule_is_refused_on_all_of_them(tmp_path: Path) -> None:
    pool(3).run(save_buffers, str(tmp_path))
    for error in pool(2).run(load_buffers, str(tmp_path), False, catch=True):
        assert isinstance(error, Mismatch)
        assert "data belongs to each of 3 ranks where it is stored, and of 2 here" in str(error)
        assert "reshape=" in str(error)


def save_generators(run: str, mode: Any, seeds: list[int], has_mesh: bool = False) -> tuple[float, float, float]:
    seed(seeds[rank_of()])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if has_mesh else None
    holdfast.save(run, holdfast.State(rng=mode, mesh=mesh, progress={"epoch": 1}), 1, deadline=DEADLINE)
    return drawn()


def load_generators(run: str, mode: Any, waive: tuple[str, ...] = (), has_mesh: bool = False) -> tuple[float, float, float]:
    seed(1000 + rank_of())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if has_mesh else None
    state = holdfast.State(rng=mode, mesh=mesh, progress={"epoch": 0})
    holdfast.restore(run, state, waive=waive, deadline=DEADLINE)
    return drawn()


@pytest.mark.parametrize("mode", [True, "rank", "reseed"])
def test_every_rank_draws_on_as_if_it_had_never_stopped(tmp_path: Path, mode: Any) -> None:
    expected = pool(3).run(save_generators, str(tmp_path), mode, [1, 2, 3])
    assert len(set(expected)) == 3
    assert pool(3).run(load_generators, str(tmp_path), mode) == expected


@pytest.mark.parametrize("mode", [True, "rank"])
def test_streams_of_another_number_of_ranks_are_refused_and_may_be_waived(tmp_path: Path, mode: Any) -> None:
    pool(3).run(save_generators, str(tmp_path), mode, [1, 2, 3])
    for error in pool(2).run(load_generators, str(tmp_path), mode, catch=True):
        assert isinstance(error, Mismatch)
        assert 'State(rng="reseed")' in str(error)
    seed(1000)
    kept = drawn()
    assert pool(2).run(load_generators, str(tmp_path), mode, ("rng",))[0] == kept


@pytest.mark.parametrize("mode", [True, "replicated"])
def test_streams_of_ranks_are_not_taken_for_those_of_one_process(tmp_path: Path, mode: Any) -> None:
    pool(2).run(save_generators, str(tmp_path), "rank", [1, 2])
    with pytest.raises(Mismatch, match="each rank"):
        load_generators(str(tmp_path), mode)
    assert load_generators(str(tmp_path), mode, ("rng",))


def test_reseeding_gives_each_rank_a_new_stream_and_the_same_at_each_resume(tmp_path: Path) -> None:
    pool(2).run(save_generators, str(tmp_path), "reseed", [1, 2])
    first = pool(4).run(load_generators, str(tmp_path), "reseed")
    assert len(set(first)) == 4
    assert pool(4).run(load_generators, str(tmp_path), "reseed") == first


def test_replicated_generators_go_to_any_number_of_ranks(tmp_path: Path) -> None:
    expected = pool(2).run(save_generators, str(tmp_path), "replicated", [7, 7])
    assert expected[0] == expected[1]
    assert pool(3).run(load_generators, str(tmp_path), "replicated") == [expected[0]] * 3
    assert load_generators(str(tmp_path), True) == expected[0]


def test_generators_that_are_no_replicas_are_not_saved_as_such(tmp_path: Path) -> None:
    for error in pool(2).run(save_generators, str(tmp_path), "replicated", [7, 8], catch=True):
        assert isinstance(error, Refused)
        assert "rng" in str(error)
    assert holdfast.Run(tmp_path).steps() == []


def test_data_parallel_ranks_have_a_stream_and_their_tensor_parallel_peers_share_it(tmp_path: Path) -> None:
    expected = pool(4).run(save_generators, str(tmp_path), "data", [1, 1, 2, 2], True)
    names = holdfast.open(tmp_path).names
    assert [name for name in names if name.endswith(".torch")] == ["rng.data.0.torch", "rng.data.1.torch"]
    assert pool(4).run(load_generators, str(tmp_path), "data", (), True) == expected


def test_peers_of_one_stream_that_draw_differently_are_refused(tmp_path: Path) -> None:
    for error in pool(4).run(save_generators, str(tmp_path), "data", [1, 2, 3, 4], True, catch=True):
        assert isinstance(error, Refused)
        assert "rng.data.0" in str(error)
        assert "rank 1" in str(error)


def hand_sharded(run: str, is_save: bool) -> bool:
    """A column-parallel weight and its moments, cut by hand over `tp`; the bias is whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    column = torch.distributed.get_rank() % 2
    weight = torch.nn.Parameter(torch.arange(24.0).reshape(6, 4)[3 * column : 3 * column + 3].clone())
    model = torch.nn.Module()
    model.weight, model.bias = weight, torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    rules = {"model.weight": "(@tp * out, in)"}
    state = holdfast.State(rng=False, mesh=mesh, layout=rules, model=model, optimizer=optimizer)
    (weight.sum() * 2 + model.bias.sum()).backward()
    optimizer.step()
    if is_save:
        holdfast.save(run, state, 1, deadline=DEADLINE)
        return True
    expected = [t.clone() for t in (weight.detach(), optimizer.state[weight]["exp_avg"])]
    weight.data.zero_()
    optimizer.state.clear()
    holdfast.restore(run, state, deadline=DEADLINE)
    return all(map(torch.equal, expected, (weight.detach(), optimizer.state[weight]["exp_avg"])))


def test_tensors_cut_by_hand_are_one_tensor_in_the_checkpoint(tmp_path: Path) -> None:
    pool(4).run(hand_sharded, str(tmp_path), True)
    tree = holdfast.load(tmp_path)
    assert tree["model"]["weight"].shape == (6, 4)
    assert tree["optimizer"]["model.weight"]["exp_avg"].shape == (6, 4)
    whole = torch.arange(24.0).reshape(6, 4)
    assert torch.allclose(tree["model"]["weight"], whole - 0.1 - 0.1 * 0.01 * whole)
    assert all(pool(4).run(hand_sharded, str(tmp_path), False))
