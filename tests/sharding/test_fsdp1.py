"""FSDP1: what each rank has of the original parameters and of their optimizer state, judged by FSDP's own gathered dicts."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

from holdfast.errors import Unsupported
from holdfast.layout.layouts import Flat, Mesh
from holdfast.sharding import fsdp1
from holdfast.sharding.local import Sharded

from .whole import fill, whole

CPU = torch.device("cpu")
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up = nn.Linear(7, 13)
        self.down = nn.Linear(13, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("not_kept", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that no number of ranks divides, tied ends, two blocks to wrap, parameters smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.bias


def wrapped(seed: int, strategy: str, *, orig: bool, **options: Any) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    keywords = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig, "device_id": CPU, **options}
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], **keywords)
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], **keywords)
    model.blocks[1]._fsdp_wrapped_module.up = checkpoint_wrapper(model.blocks[1]._fsdp_wrapped_module.up)
    whole_model = FullyShardedDataParallel(model, **keywords)
    return whole_model, torch.optim.AdamW(whole_model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """FSDP's own full state dicts, on every rank."""
    configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    held = optimizer.state_dict()
    moments: dict[str, Any] = {}
    with silence(), FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        # one kind of moment at a time: on a CPU, torch 2.13 gathers the next kind into the memory of the last
        for kind in dict.fromkeys(kind for state in held["state"].values() for kind in state):
            state = {number: {k: v for k, v in of.items() if k == kind} for number, of in held["state"].items()}
            gathered = FullyShardedDataParallel.optim_state_dict(model, optimizer, held | {"state": state})
            for name, of in gathered["state"].items():
                moments.setdefault(name, {}).update({k: v.clone() for k, v in of.items()})
    return weights, moments


@contextlib.contextmanager
def silence() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def bare(key: str) -> str:
    return ".".join(p for p in key.split(".") if p not in ("_fsdp_wrapped_module", "_checkpoint_wrapped_module"))


def parts_of(model: nn.Module) -> dict[str, Sharded]:
    return {bare(k): v for k, v in fsdp1.state_dict(model).items() if isinstance(v, Sharded)}


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Sharded]:
    inside = fsdp1.originals(model)
    found = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        for key, original in inside[id(parameter)]:
            for name, state in optimizer.state[parameter].items():
                if (part := original.of(state)) is not None:
                    found[f"{bare(key)}/{name}"] = part
    return found


def flat_truth(moments: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{k}/{name}": v for k, state in moments.items() for name, v in state.items() if v.ndim}


def no_collectives(monkeyed: list[str]) -> contextlib.AbstractContextManager[None]:
    """Every collective of torch.distributed fails inside."""

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        saved = {name: getattr(dist, name) for name in monkeyed}
        try:
            for name in monkeyed:
                setattr(dist, name, None)
            yield
        finally:
            for name, function in saved.items():
                setattr(dist, name, function)

    return context()


COLLECTIVES = [
    "all_gather_into_tensor",
    "all_gather",
    "all_reduce",
    "broadcast",
    "all_gather_object",
    "barrier",
    "reduce_scatter",
]


def pieces_make(strategy: str, orig: bool, options: dict[str, Any]) -> None:
    model, optimizer = wrapped(0, strategy, orig=orig, **made_here(options))
    before = whole(parts_of(model))  # before the first forward, too
    assert set(before) == {k for k in truth(model, optimizer)[0] if not k.endswith(("mean", "calls"))}
    for number in range(2):
        step(model, optimizer, number)
    with no_collectives(COLLECTIVES):
        parts, moments = parts_of(model), moments_of(model, optimizer)
    weights, states = truth(model, optimizer)
    gathered = whole(parts)
    for name, value in gathered.items():
        assert value.dtype == weights[name].dtype
        assert torch.equal(value, weights[name]), name
    assert parts["head.weight"] is parts["embed.weight"]
    gathered = whole(moments)
    expected = flat_truth(states)
    assert set(gathered) == set(expected) - {k for k in expected if k.startswith("head.")}
    for name, value in gathered.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world", [2, 3])
def test_pieces_are_what_fsdp_gathers(world, strategy, orig):
    pool(world).run(pieces_make, strategy, orig, {})


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_hybrid_sharding_declares_its_replicas(orig):
    pool(4).run(pieces_make, "HYBRID_SHARD", orig, {"mesh": [[0, 1], [2, 3]]})
    pool(4).run(pieces_make, "_HYBRID_SHARD_ZERO2", orig, {"groups": [[0, 1], [2, 3]]})
    pool(4).run(pieces_make, "HYBRID_SHARD", orig, {"groups": [[0, 2], [1, 3]]})


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_weights_are_those_in_full_precision(orig):
    pool(2).run(pieces_make, "SHARD_GRAD_OP", orig, {"mixed": True})


def made_here(options: dict[str, Any]) -> dict[str, Any]:
    """Options of FSDP that cannot be sent."""
    if "mesh" in options:
        return {"device_mesh": DeviceMesh("cpu", torch.tensor(options["mesh"]))}
    if "groups" in options:
        rows = torch.tensor(options["groups"])
        across = [dist.new_group(column) for column in rows.T.tolist()]
        along = [dist.new_group(row) for row in rows.tolist()]
        here = (rows == dist.get_rank()).nonzero()[0].tolist()
        return {"process_group": (along[here[0]], across[here[1]])}
    return {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=False)} if options else {}


def filled(strategy: str, orig: bool, options: dict[str, Any]) -> None:
    """A model whose pieces are written trains on as the one that the values come from."""
    model, optimizer = wrapped(0, strategy, orig=orig, **made_here(options))
    other, its_optimizer = wrapped(1, strategy, orig=orig, **made_here(options))
    for number in range(2):
        step(model, optimizer, number)
    step(other, its_optimizer, 5)
    other.eval()
    with torch.no_grad():
        other(torch.tensor([1, 2]))  # FSDP1 keeps what this gathered
    other.train()
    values = whole(parts_of(model)) | whole(moments_of(model, optimizer))
    fill(parts_of(other) | moments_of(other, its_optimizer), values)
    fsdp1.refresh(other)
    for ours, theirs in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        if "step" in ours:
            theirs["step"].copy_(ours["step"])
    for ours, theirs in zip(model.buffers(), other.buffers(), strict=True):
        theirs.copy_(ours)
    for number in (2, 3):
        assert torch.equal(step(model, optimizer, number), step(other, its_optimizer, number))
    (weights, moments), (its_weights, its_moments) = truth(model, optimizer), truth(other, its_optimizer)
    assert all(torch.equal(v, its_weights[k]) for k, v in weights.items())
    assert all(torch.equal(v, flat_truth(its_moments)[k]) for k, v in flat_truth(moments).items())


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_whose_pieces_are_filled_trains_on_like_the_other(strategy, orig):
    pool(2).run(filled, strategy, orig, {})


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_a_filled_model_in_mixed_precision_trains_on_like_the_other(orig):
    pool(2).run(filled, "SHARD_GRAD_OP", orig, {"mixed": True})


def entries(orig: bool) -> None:
    model, _ = wrapped(0, "FULL_SHARD", orig=orig)
    found = fsdp1.state_dict(model)
    assert [bare(key) for key in found] == list(Model().state_dict())
    buffers = dict(model.named_buffers())
    plain = {bare(k): v for k, v in found.items() if not isinstance(v, Sharded)}
    assert all(any(v is buffer for buffer in buffers.values()) for v in plain.values())
    assert set(plain) == {k for k in Model().state_dict() if k.endswith(("mean", "calls"))}
    assert set(dict(model.named_modules())) >= {key.rpartition(".")[0] for key in found if "_checkpoint" not in key}
    gathered = truth(model, torch.optim.SGD(model.parameters()))[0]
    assert list(gathered), "its own hooks are back"
    assert gathered["blocks.0.up.weight"].shape == (13, 7)


@pytest.mark.parametrize("orig", [True, False], ids=["orig", "flat"])
def test_entries_come_in_the_order_of_the_plain_model(orig):
    pool(2).run(entries, orig)


def layouts() -> None:
    model, _ = wrapped(0, "HYBRID_SHARD", orig=True, device_mesh=DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]])))
    part = parts_of(model)["blocks.0.up.weight"]
    assert isinstance(part.layout, Flat)
    assert (part.layout.ranks, part.layout.replicas) == ((0, 1), ((2, 3),))
    assert part.layout.holders(part.shape, 0) == (0, 2)
    assert part.layout.holders(part.shape, 3) == (1, 3)
    assert set(part.layout.members()) == {0, 1, 2, 3}
    model, _ = wrapped(0, "NO_SHARD", orig=True)
    part = parts_of(model)["blocks.0.up.weight"]
    assert isinstance(part.layout, Mesh)
    assert part.layout.holders(part.shape, 2) == (0, 1, 2, 3)


def test_holders_are_the_ranks_that_hold_the_same():
    pool(4).run(layouts)


def refused(what: str) -> None:
    model, optimizer = wrapped(0, "FULL_SHARD", orig=True)
    if what == "summoned":
        with FullyShardedDataParallel.summon_full_params(model):
            fsdp1.state_dict(model)
    elif what == "inner":
        fsdp1.contains(model._fsdp_wrapped_module.blocks[0]._fsdp_wrapped_module)
    elif what == "transposed":
        layer = nn.Linear(3, 4)
        layer.weight = nn.Parameter(torch.randn(3, 4).t())
        fsdp1.state_dict(FullyShardedDataParallel(layer, device_id=CPU))
    elif what == "factored":
        ((_, original),) = fsdp1.originals(model)[id(optimizer.param_groups[0]["params"][0])]
        original.of(torch.zeros(original.numel + 2))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("summoned", "outside of summon_full_params"),
        ("inner", "give the FSDP module that wraps it"),
        ("transposed", "contiguous before wrapping"),
        ("factored", "only elementwise state"),
    ],
)
def test_states_without_shards_are_refused(what, told):
    for error in pool(2).run(refused, what, catch=True):
        assert isinstance(error, Unsupported), error
        assert told in str(error)


def replaced() -> None:
    model, optimizer = wrapped(0, "FULL_SHARD", orig=True)
    step(model, optimizer, 0)
    for parameter in model.parameters():
        parameter.data = parameter.data + 1.0  # as some averages of weights do
    gathered = whole(parts_of(model))
    weights, _ = truth(model, optimizer)
    assert all(torch.equal(value, weights[name]) for name, value in gathered.items())
    fill(parts_of(model), {name: torch.full_like(value, 0.5) for name, value in gathered.items()})
    assert all((value == 0.5).all() for name, value in truth(model, optimizer)[0].items() if name in gathered)


def test_memory_that_was_replaced_is_adopted():
    pool(2).run(replaced)


def test_a_plain_module_holds_none():
    assert not fsdp1.contains(Model())
