"""The layouts of the matrix: how the model of `models.py` is spread over ranks, with torch's own means.

Each builder runs on every rank of a world of `world` ranks and gives the rank's `Job`. Another framework adds its layout with
`register`; one without a builder is left out of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .jobs import Job, pipeline, whole
from .models import BLOCKS, Mlp, Model, Moe
from .zero import ZeroJob

Builder = Callable[[bool], Job]


@dataclass(frozen=True)
class Layout:
    name: str
    world: int
    build: Builder | None
    """From whether the model has its large parameter; None: not here."""
    is_in_matrix: bool = True


LAYOUTS: dict[str, Layout] = {}


def register(name: str, world: int, *, is_in_matrix: bool = True) -> Callable[[Builder], Builder]:
    """Add a layout, or give one its builder."""

    def add(build: Builder) -> Builder:
        LAYOUTS[name] = Layout(name, world, build, is_in_matrix)
        return build

    return add


def build(name: str, seed: int, large: bool = False) -> Job:
    """A job of a layout, on this rank, with the weights of a seed."""
    builder = LAYOUTS[name].build
    assert builder is not None
    torch.manual_seed(seed)
    return builder(large)


@lru_cache
def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Meshes are made once in a process: each has process groups of its own."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@register("single", 1)
def _single(large: bool) -> Job:
    return whole(Model(large=large))


@register("ddp2", 2)
def _ddp(large: bool) -> Job:
    return whole(nn.parallel.DistributedDataParallel(Model(large=large)), dist.get_rank(), 2)


@register("fsdp2", 2)
@register("fsdp3", 3)
@register("fsdp4", 4)
def _fsdp(large: bool) -> Job:
    world = dist.get_world_size()
    return whole(_shard(Model(large=large), mesh((world,), ("dp",))), dist.get_rank(), world)


@register("hsdp2x2", 4)
def _hsdp(large: bool) -> Job:
    return whole(_shard(Model(large=large), mesh((2, 2), ("replicate", "shard"))), dist.get_rank(), 4)


@register("tp2", 2)
def _tp(large: bool) -> Job:
    return whole(_split(Model(large=large), mesh((2,), ("tp",))))


@register("fsdp2_tp2", 4)
def _fsdp_tp(large: bool) -> Job:
    both = mesh((2, 2), ("dp", "tp"))
    return whole(_shard(_split(Model(large=large), both["tp"]), both["dp"]), both.get_local_rank("dp"), 2)


@register("pp2", 2)
def _pp(large: bool) -> Job:
    chunks = [_stage(half, large) if dist.get_rank() == at else None for at, half in enumerate(_cuts(2))]
    return pipeline(chunks, [0, 1], dist.group.WORLD)


@register("pp2_interleaved", 2)
def _interleaved(large: bool) -> Job:
    owners = [0, 1, 0, 1]
    chunks = [_stage(quarter, large) if dist.get_rank() == owners[at] else None for at, quarter in enumerate(_cuts(4))]
    return pipeline(chunks, owners, dist.group.WORLD)


@register("pp2_fsdp2", 4)
def _pp_fsdp(large: bool) -> Job:
    both = mesh((2, 2), ("pp", "dp"))
    stage, part = both.get_coordinate() or (0, 0)
    chunks = [_shard(_stage(half, large), both["dp"]) if stage == at else None for at, half in enumerate(_cuts(2))]
    return pipeline(chunks, [part, 2 + part], both.get_group("pp"), part, 2)


@register("ep2_tp2", 4)
def _ep_tp(large: bool) -> Job:
    both = mesh((2, 2), ("ep", "tp"))
    return whole(_split(Model(large=large), both["tp"], experts=both))


LAYOUTS["zero3_2"] = Layout("zero3_2", 2, None)
if find_spec("deepspeed"):

    @register("zero1_2", 2, is_in_matrix=False)
    @register("zero1_3", 3, is_in_matrix=False)
    def _zero1(large: bool) -> Job:
        return ZeroJob(1, large)

    @register("zero2_2", 2, is_in_matrix=False)
    @register("zero2_3", 3, is_in_matrix=False)
    def _zero2(large: bool) -> Job:
        return ZeroJob(2, large)

    @register("zero3_2", 2)
    @register("zero3_3", 3, is_in_matrix=False)
    def _zero3(large: bool) -> Job:
        return ZeroJob(3, large)


def _cuts(parts: int) -> list[range]:
    return [range(at, at + BLOCKS // parts) for at in range(0, BLOCKS, BLOCKS // parts)]


def _stage(blocks: range, large: bool) -> Model:
    torch.manual_seed(torch.initial_seed())  # a rank's second stage draws what its first drew
    return Model(blocks=blocks, large=large)


def _shard(model: Model, over: DeviceMesh) -> Model:
    """FSDP2: each block a unit, and its bfloat16 part another."""
    for block in model.blocks.values():
        if hasattr(block, "adapter"):
            fully_shard(block.adapter, mesh=over)
        fully_shard(block, mesh=over)
    return fully_shard(model, mesh=over)


def _split(model: Model, over: DeviceMesh, experts: DeviceMesh | None = None) -> Model:
    """Tensor parallelism: column- and row-wise linear layers, a vocabulary in two parts, hidden dimensions of experts.

    Args:
        experts: a mesh of two dimensions: experts are spread over the first, their hidden dimension over the second.
    """
    gathered = {"input_layouts": Replicate(), "output_layouts": Replicate()}
    for block in model.blocks.values():
        styles: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        styles["attention.o"] = RowwiseParallel()
        if isinstance(block.ffn, Mlp):  # an uneven hidden dimension must stay a DTensor between the two
            styles |= {"ffn.up": ColwiseParallel(use_local_output=False), "ffn.down": RowwiseParallel()}
        parallelize_module(block, over, styles)
        if isinstance(block.ffn, Moe):
            at: DeviceMesh = experts or over
            before = [Shard(0)] if experts else []
            _cut(block.ffn.experts, "w1", at, [*before, Shard(1)])
            _cut(block.ffn.experts, "w2", at, [*before, Shard(2)])
    parallelize_module(model, over, {"embed": RowwiseParallel(**gathered), "head": ColwiseParallel(**gathered)})
    model.head.weight = model.embed.weight
    if hasattr(model, "large"):
        _cut(model, "large", over, [Shard(1)])
    return model


def _cut(module: nn.Module, name: str, over: DeviceMesh, placements: list[Placement]) -> None:
    whole_one = getattr(module, name)
    cut = nn.Parameter(distribute_tensor(whole_one.detach(), over, placements), requires_grad=whole_one.requires_grad)
    setattr(module, name, cut)
