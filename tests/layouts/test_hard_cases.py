"""What the matrix has no room for: other optimizers, other meshes, ties that a layout keeps and ties that it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import holdfast

from .layouts import build, mesh
from .models import Model
from .truth import part_of, same_bits

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "tensor rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.01),
    "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.01),
}


def small_job(optimizer: str, seed: int) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Two linear layers, FSDP2 where there are several ranks; every rank has the whole batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    if dist.get_world_size() > 1:
        fully_shard(model, mesh=mesh((dist.get_world_size(),), ("dp",)))
    made = OPTIMIZERS[optimizer](list(model.parameters()))

    def step(number: int) -> float:
        loss = model(torch.randn(6, 7, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        return loss.item()

    return {"model": model, "optimizer": made}, step


def save_small(optimizer: str, run: str) -> None:
    roles, step = small_job(optimizer, 1)
    step(0), step(1)
    holdfast.save(run, holdfast.State(rng=False, **roles), 2)


def load_small(optimizer: str, run: str, again: str, has_stepped: bool) -> None:
    roles, step = small_job(optimizer, 2)
    if has_stepped:
        step(9)
    state = holdfast.State(rng=False, **roles)
    holdfast.restore(run, state)
    holdfast.save(again, state, 2)
    step(2)


def digests(run: Path | str) -> dict[str, str]:
    with holdfast.open(run) as checkpoint:
        return {name: checkpoint.digest(name) for name in checkpoint.names}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("worlds", [(1, 3), (2, 3), (2, 1)])
def test_any_optimizer_s_state_is_resharded(optimizer: str, worlds: tuple[int, int], tmp_path: Path) -> None:
    pool(worlds[0]).run(save_small, optimizer, str(tmp_path / "run"))
    for has_stepped in (False, True):
        again = tmp_path / f"again{has_stepped}"
        pool(worlds[1]).run(load_small, optimizer, str(tmp_path / "run"), str(again), has_stepped)
        assert digests(again) == digests(tmp_path / "run")


# --- meshes -----------------------------------------------------------------------------------------------------------

SHAPE = (13, 7, 5)
CUTS: dict[str, list[Placement]] = {
    "three times along one": [Shard(0), Shard(0), Shard(0)],
    "along each": [Shard(2), Shard(0), Shard(1)],
    "with a replica between": [Shard(1), Replicate(), Shard(1)],
    "not at all": [Replicate(), Replicate(), Replicate()],
}


def reshard_in_three_dimensions(run: str) -> list[str]:
    cube = mesh((2, 2, 2), ("a", "b", "c"))
    whole = torch.arange(13 * 7 * 5, dtype=torch.float32).view(SHAPE)
    holdfast.save(run, {"x": {name: distribute_tensor(whole, cube, cut) for name, cut in CUTS.items()}}, 1)
    others = dict(zip(CUTS, reversed(CUTS.values()), strict=True))
    live = {name: distribute_tensor(torch.zeros(SHAPE), cube, cut) for name, cut in others.items()}
    holdfast.restore(run, {"x": live})
    return [name for name, tensor in live.items() if not torch.equal(tensor.full_tensor(), whole)]


def save_on_a_mesh_out_of_order(run: str) -> None:
    ranks = DeviceMesh("cpu", [3, 1, 0, 2])
    whole = torch.arange(30, dtype=torch.float32).view(10, 3)
    like = DTensor.from_local(torch.empty(3, 3), ranks, [Shard(0)], run_check=False, shape=(10, 3), stride=(3, 1))
    local = part_of(whole, like).clone()
    holdfast.save(run, {"x": DTensor.from_local(local, ranks, [Shard(0)], run_check=False, shape=(10, 3), stride=(3, 1))}, 1)


def reshard_transposed_parts(run: str) -> tuple[bool, torch.Tensor]:
    line = mesh((2,), ("dp",))
    parts = DTensor.from_local((torch.arange(12.0) + 100 * dist.get_rank()).view(3, 4).t(), line, [Shard(0)])
    holdfast.save(run, {"x": parts}, 1)
    live = DTensor.from_local(torch.zeros(3, 4).t(), line, [Shard(0)])
    holdfast.restore(run, {"x": live})
    return torch.equal(live.to_local(), parts.to_local()), parts.full_tensor()


def test_a_mesh_of_three_dimensions_is_resharded(tmp_path: Path) -> None:
    assert pool(8).run(reshard_in_three_dimensions, str(tmp_path / "run")) == [[]] * 8
    whole = torch.arange(13 * 7 * 5, dtype=torch.float32).view(SHAPE)
    assert all(torch.equal(tensor, whole) for tensor in holdfast.load(tmp_path / "run")["x"].values())


def test_a_mesh_whose_ranks_are_out_of_order_is_stored_as_it_is_cut(tmp_path: Path) -> None:
    pool(4).run(save_on_a_mesh_out_of_order, str(tmp_path / "run"))
    assert torch.equal(holdfast.load(tmp_path / "run")["x"], torch.arange(30, dtype=torch.float32).view(10, 3))


def test_parts_that_lie_transposed_in_memory_are_stored_and_filled(tmp_path: Path) -> None:
    (is_equal, whole), (is_equal_too, _) = pool(2).run(reshard_transposed_parts, str(tmp_path / "run"))
    assert is_equal
    assert is_equal_too
    assert same_bits(holdfast.load(tmp_path / "run")["x"], whole)


# --- ties -------------------------------------------------------------------------------------------------------------


def save_with_a_head_of_its_own(run: str, change: float) -> None:
    """Two stages; the last has no embedding, and its output layer differs from that of the first by `change`."""
    torch.manual_seed(1)
    stage = Model(blocks=[range(2), range(2, 4)][dist.get_rank()])
    if stage.is_last:
        stage.head.weight = nn.Parameter(stage.embed.weight.detach() + change)
        del stage.embed
    holdfast.save(run, {"model": stage}, 1)


def load_model(layout: str, run: str) -> tuple[bool, str | None]:
    """Whether the output layer is still tied, and how the load was refused."""
    job = build(layout, 2)
    try:
        holdfast.restore(run, {"model": job.roles["model"]})
    except holdfast.Mismatch as error:
        return job.is_tied(), str(error)
    return job.is_tied(), None


@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("fsdp2", 2), ("pp2", 2)])
def test_a_stage_s_equal_copy_of_a_tied_weight_loads_where_it_is_tied(layout: str, world: int, tmp_path: Path) -> None:
    pool(2).run(save_with_a_head_of_its_own, str(tmp_path / "run"), 0.0)
    assert pool(world).run(load_model, layout, str(tmp_path / "run")) == [(True, None)] * world


@pytest.mark.parametrize(("layout", "world"), [("single", 1), ("fsdp2", 2), ("pp2", 2)])
def test_a_stage_s_other_weight_is_refused_where_it_would_be_tied(layout: str, world: int, tmp_path: Path) -> None:
    pool(2).run(save_with_a_head_of_its_own, str(tmp_path / "run"), 1.0)
    for is_tied, refusal in pool(world).run(load_model, layout, str(tmp_path / "run")):
        assert is_tied
        assert "model.head.weight is tied to model.embed.weight here" in (refusal or "not refused")
