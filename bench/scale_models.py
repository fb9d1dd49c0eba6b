"""Jobs too large to run, as their logical tensors and layouts: what each rank would hold, without a tensor.

The placements are those that torchtitan's parallelisation gives: FSDP2 over tensor parallelism, whose row shards are strided;
sequence-parallel norms, replicated over tensor ranks; experts stacked, cut over expert ranks and then by FSDP. Ranks are numbered
by pipeline stage, then data, then tensor or expert parallelism. Each parameter has a bf16 weight, a master and two moments in
fp32, and Adam's step, a plain scalar that each rank has. A job with streams has the states of each rank's random generators too,
as a `State` has by default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from holdfast.layout.layouts import Layout, Mesh, Replicate, Shard, StridedShard, Whole
from holdfast.run.contents import Contents, TensorItem

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
ROLES = {"model": "module", "optimizer": "optimizer", "rng": "per_rank"}


class Tensor(NamedTuple):
    """A logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout
    owner: str | None = None
    """Name of its parameter."""


class Unread:
    """Bytes that nobody asks for."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_into(self, start: int, out: Any) -> None:
        raise AssertionError("a plan reads no bytes")


@dataclass(frozen=True)
class Job:
    """What is trained, and how."""

    title: str
    stages: int
    """Of the pipeline; each has as many ranks."""
    ranks: int
    parameters: Callable[[int], list[tuple[str, tuple[int, ...], Layout]]]
    """Of a stage: name, shape, layout."""
    streams: bool = False
    """Whether each rank has three tensors of its own."""

    @property
    def ranks_in_stage(self) -> int:
        return self.ranks // self.stages

    def tensors(self, stage: int) -> list[Tensor]:
        """In the order of the state's tree."""
        parameters = self.parameters(stage)
        found = [Tensor(f"model.{name}", "bfloat16", shape, layout) for name, shape, layout in parameters]
        for name, shape, layout in parameters:
            owner = f"model.{name}"
            found.append(Tensor(f"optimizer.{name}.step", "float32", (), Whole(), owner))
            moments = ("exp_avg", "exp_avg_sq", "master")
            found += [Tensor(f"optimizer.{name}.{moment}", "float32", shape, layout, owner) for moment in moments]
        return found

    def streams_of(self, rank: int) -> list[TensorItem]:
        """The states of a rank's random generators."""
        sizes = {"python": 2509, "numpy": 2513, "torch": 5056} if self.streams else {}
        return [
            TensorItem(f"rng.rank.{rank}.{name}", ("rng", "rank", rank, name), "uint8", (size,), "rng", Unread(size))
            for name, size in sizes.items()
        ]

    def contents(self, rank: int) -> Contents:
        """What a rank gives to a save, as `holdfast.state` would say it."""
        tensors = self.tensors(rank // self.ranks_in_stage)
        items = []
        for tensor in tensors:
            role, rest = tensor.name.split(".", 1)
            path = (role, rest) if role == "model" else (role, *rest.rsplit(".", 1))
            known = TensorItem(tensor.name, path, tensor.dtype, tensor.shape, role, None, tensor.owner)
            pieces = tensor.layout.pieces(tensor.shape, rank)
            size = ITEM_BYTES[tensor.dtype]
            items += [
                TensorItem(
                    known.name, path, known.dtype, known.shape, role, Unread(math.prod(p.box[1]) * size), known.owner, box=p.box
                )
                for p in pieces
            ] or [known]
        layouts = {t.name: t.layout for t in tensors if not isinstance(t.layout, Whole)}
        items += self.streams_of(rank)
        return Contents(items, values_of([t.name for t in tensors if t.name.startswith("model.")]), {}, ROLES, layouts)

    def all_tensors(self) -> list[Tensor]:
        """Of all stages: where a name stands in several, those of the first."""
        found: dict[str, Tensor] = {}
        for stage in range(self.stages):
            for tensor in self.tensors(stage):
                found.setdefault(tensor.name, tensor)
        return list(found.values())


def values_of(parameters: Sequence[str]) -> list[Any]:
    """The values of an AdamW with one parameter group, a schedule and a counter."""
    group = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False,
             "foreach": None, "capturable": False, "differentiable": False, "fused": True, "initial_lr": 3e-4}  # fmt: skip
    pairs = [[["optimizer", "param_groups", 0, "params"], list(parameters)]]
    pairs += [[["optimizer", "param_groups", 0, key], value] for key, value in group.items()]
    pairs += [[["scheduler", "last_epoch"], 1000], [["scheduler", "_last_lr", 0], 3e-4], [["progress", "tokens"], 10**12]]
    return pairs


def llama_405b(pipeline: int, data: int, tensor: int) -> Job:
    """Llama-3 405B (arXiv:2407.21783): 126 layers, untied head."""
    width, hidden, key_value, words = 16384, 53248, 1024, 128256
    per = data * tensor

    def mesh(stage: int, *placements: Any) -> Mesh:
        sizes = (data, tensor) if tensor > 1 else (data,)
        return Mesh(tuple(range(stage * per, (stage + 1) * per)), sizes, placements[: len(sizes)])

    def parameters(stage: int) -> list[tuple[str, tuple[int, ...], Layout]]:
        by_row = mesh(stage, StridedShard(0, tensor) if tensor > 1 else Shard(0), Shard(0))
        by_column = mesh(stage, Shard(0), Shard(1))
        alike = mesh(stage, Shard(0), Replicate())
        found: list[tuple[str, tuple[int, ...], Layout]] = []
        if stage == 0:
            found.append(("tok_embeddings.weight", (words, width), by_row))
        for layer in _layers(126, pipeline, stage):
            of_layer = {
                "attention.wq": ((width, width), by_row), "attention.wk": ((key_value, width), by_row),
                "attention.wv": ((key_value, width), by_row), "attention.wo": ((width, width), by_column),
                "feed_forward.w1": ((hidden, width), by_row), "feed_forward.w2": ((width, hidden), by_column),
                "feed_forward.w3": ((hidden, width), by_row), "attention_norm": ((width,), alike), "ffn_norm": ((width,), alike),
            }  # fmt: skip
            found += [(f"layers.{layer}.{name}.weight", shape, layout) for name, (shape, layout) in of_layer.items()]
        if stage == pipeline - 1:
            found += [("norm.weight", (width,), alike), ("output.weight", (words, width), by_row)]
        return found

    title = f"Llama-3 405B, TP {tensor} x PP {pipeline} x DP {data}" if tensor > 1 else f"Llama-3 405B, FSDP over {data}"
    return Job(title, pipeline, pipeline * per, parameters)


def moe_1t(pipeline: int, data: int, expert: int) -> Job:
    """A mixture of experts of 1.04 trillion parameters, of the shapes of Kimi K2 (arXiv:2507.20534): 61 layers, 384 experts,
    all layers with experts here. Dense parts are sharded over all ranks of a stage."""
    width, hidden, experts, words, heads = 7168, 2048, 384, 163840, 64
    per = data * expert

    def parameters(stage: int) -> list[tuple[str, tuple[int, ...], Layout]]:
        ranks = tuple(range(stage * per, (stage + 1) * per))
        dense = Mesh(ranks, (per,), (Shard(0),))
        if expert == 1:
            stacked = dense
        elif data == 1:
            stacked = Mesh(ranks, (expert,), (Shard(0),))
        else:
            stacked = Mesh(ranks, (data, expert), (Shard(1), Shard(0)))
        found: list[tuple[str, tuple[int, ...], Layout]] = []
        if stage == 0:
            found.append(("tok_embeddings.weight", (words, width), dense))
        for layer in _layers(61, pipeline, stage):
            of_layer = {
                "attention.wq_a": ((1536, width), dense), "attention.q_norm": ((1536,), dense),
                "attention.wq_b": ((heads * 192, 1536), dense), "attention.wkv_a": ((576, width), dense),
                "attention.kv_norm": ((512,), dense), "attention.wkv_b": ((heads * 256, 512), dense),
                "attention.wo": ((width, heads * 128), dense), "attention_norm": ((width,), dense), "ffn_norm": ((width,), dense),
                "moe.router.gate": ((experts, width), dense), "moe.shared.w1": ((hidden, width), dense),
                "moe.shared.w2": ((width, hidden), dense), "moe.shared.w3": ((hidden, width), dense),
                "moe.experts.w1": ((experts, hidden, width), stacked), "moe.experts.w2": ((experts, width, hidden), stacked),
                "moe.experts.w3": ((experts, hidden, width), stacked),
            }  # fmt: skip
            found += [(f"layers.{layer}.{name}.weight", shape, layout) for name, (shape, layout) in of_layer.items()]
        if stage == pipeline - 1:
            found += [("norm.weight", (width,), dense), ("output.weight", (words, width), dense)]
        return found

    title = f"MoE 1T, EP {expert} x PP {pipeline} x DP {data}" if expert > 1 else f"MoE 1T, FSDP over {data}"
    return Job(title, pipeline, pipeline * per, parameters)


def _layers(count: int, stages: int, stage: int) -> range:
    return range(count * stage // stages, count * (stage + 1) // stages)


JOBS: dict[str, Callable[[int], Job]] = {
    "llama": lambda ranks: llama_405b(16, ranks // 128, 8),
    "llama+streams": lambda ranks: replace(JOBS["llama"](ranks), streams=True),
    "moe": lambda ranks: moe_1t(16, ranks // 1024, 64),
}
"""The job that saves, by its number of ranks: 1,024 or more, a multiple of that."""
TARGETS: dict[str, list[Job]] = {
    "llama": [llama_405b(8, 64, 4), llama_405b(1, 1024, 1)],
    "moe": [moe_1t(8, 8, 32), moe_1t(1, 1024, 1)],
}
TARGETS["llama+streams"] = TARGETS["llama"]
"""The jobs that load it."""
