"""What the ranks of these tests hold: sharded, replicated, equal by accident and of one rank only; all known from the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast

ROWS = 11
"""Of the sharded tensor: no number of ranks from 2 to 4 divides it."""
OWN = 700
"""Elements of each tensor that one rank alone has."""

_meshes: dict[tuple[Any, tuple[int, ...]], DeviceMesh] = {}


def numbers(name: str, step: int, *shape: int) -> torch.Tensor:
    """The content of a tensor at a step; no two names or steps give the same."""
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.rand(shape, generator=generator)


def mesh_of(*ranks: int) -> DeviceMesh:
    """The mesh of these ranks. Every rank of the job must ask for it, in the same order."""
    key = dist.group.WORLD, ranks
    if key not in _meshes:
        _meshes[key] = DeviceMesh("cpu", list(ranks), mesh_dim_names=("x",))
    return _meshes[key]


def shard(whole: torch.Tensor, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """A DTensor of which this rank has its chunk of `whole`."""
    chunks = list(whole.chunk(mesh.size(), dim))
    number = mesh.get_local_rank()
    mine = chunks[number] if number < len(chunks) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(mine.clone(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


def replica(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)


def held(step: int, rank: int, sharded: bool = True) -> dict[str, Any]:
    """What a rank holds at a step. `sharded=False`: nothing that a mesh of all ranks has; for when some of them are gone."""
    state: dict[str, Any] = {
        "plain": {"same": numbers("same", step, 40, 5)},
        "own": {f"r{rank}": numbers(f"r{rank}", step, OWN)},
        "progress": {"step": step},
    }
    if sharded:
        mesh = mesh_of(*range(dist.get_world_size()))
        state["sharded"] = {"rows": shard(numbers("rows", step, ROWS, 30), mesh)}
        state["declared"] = {"copies": replica(numbers("copies", step, 33, 4), mesh)}
    return state


def whole(step: int, ranks: list[int], sharded: bool = True) -> dict[str, Any]:
    """What the ranks hold together, as `holdfast.load` gives it."""
    state: dict[str, Any] = {
        "plain": {"same": numbers("same", step, 40, 5)},
        "own": {f"r{rank}": numbers(f"r{rank}", step, OWN) for rank in ranks},
        "progress": {"step": step},
    }
    if sharded:
        state["sharded"] = {"rows": numbers("rows", step, ROWS, 30)}
        state["declared"] = {"copies": numbers("copies", step, 33, 4)}
    return state


def wrong_tensors(run: Path, step: int, wanted: dict[str, Any]) -> list[str]:
    """In what a stored step differs from what it should be; empty if it is intact and every bit is right."""
    with holdfast.open(run, step=step) as checkpoint:
        found = [f"damaged: {damage}" for damage in checkpoint.verify()]
    return found + _differences("", holdfast.load(run, step=step), wanted)


def _differences(path: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        lines = [f"{path}{key} is only in one" for key in a.keys() ^ b.keys()]
        return lines + [line for key in a.keys() & b.keys() for line in _differences(f"{path}{key}.", a[key], b[key])]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if a.dtype == b.dtype and torch.equal(a, b) else [f"{path} differs"]
    return [] if a == b else [f"{path}: {a!r} against {b!r}"]
