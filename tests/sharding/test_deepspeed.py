"""ZeRO: what each rank has of weights, masters and moments, judged by DeepSpeed's own gathering functions."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool
from torch import nn

from holdfast.errors import Refused, Unsupported
from holdfast.layout.layouts import Flat, Mesh
from holdfast.sharding import deepspeed as zero
from holdfast.sharding.local import Sharded
from holdfast.sharding.original import one_for_all

from .whole import fill, whole

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
]

STAGES = ["1", "2", "3"]
DTYPES = ["fp32", "bf16"]


class Model(nn.Module):
    """Sizes that no number of ranks divides, tied ends, a frozen layer, parameters smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.scale * self.down(torch.relu(self.norm(self.up(self.frozen(x)))))
        return self.head(x)


def engine_of(seed: int, stage: str, dtype: str, **zero_options: Any) -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled when first used
    torch.manual_seed(seed)
    model = Model()
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim == 1 and p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)
    options = {"stage": int(stage), "stage3_param_persistence_threshold": 20, "sub_group_size": 40} | zero_options
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": options}
    if dtype != "fp32":
        config["bf16"] = {"enabled": True}
    if dtype == "bf16 in fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = nn.functional.cross_entropy(engine(tokens).float(), tokens)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def names_of(engine: Any) -> dict[int, str]:
    return {id(p): name for name, p in engine.module.named_parameters()}


def weights_of(engine: Any) -> dict[str, Sharded]:
    return {k.removeprefix("module."): v for k, v in zero.state_dict(engine).items() if isinstance(v, Sharded)}


def states_of(engine: Any, *, masters: bool = True) -> dict[str, Sharded]:
    names, found = names_of(engine), {}
    for partition in zero.partitions(engine.optimizer):
        held = dict(engine.optimizer.optimizer.state.get(partition.flat, {}))
        if partition.has_masters and masters:
            held["fp32"] = partition.flat
        for parameter, original in partition.inside:
            for kind, state in held.items():
                if (part := original.of(state)) is not None:
                    found[f"{names[id(parameter)]}/{kind}"] = part
    return found


def truth(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """DeepSpeed's own gathered weights and states."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # stages 1 and 2 of DeepSpeed 0.19 link the states when only the first group has any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    weights, states = {}, {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            weights[name] = parameter.detach().clone()
        if parameter.requires_grad:
            states[f"{name}/fp32"] = safe_get_full_fp32_param(parameter).detach().clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                states[f"{name}/{kind}"] = safe_get_full_optimizer_state(parameter, kind).detach().clone()
    return weights, states


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


def pieces_make(stage: str, dtype: str, options: dict[str, Any]) -> None:
    engine = engine_of(0, stage, dtype, **options)
    assert zero.contains(engine)
    assert zero.is_zero(engine.optimizer)
    for number in range(2):
        step(engine, number)
    parts, states = weights_of(engine), states_of(engine)
    weights, expected = truth(engine)
    assert set(weights) - set(parts) == (set() if stage == "3" else {"frozen.weight", "frozen.bias"})
    assert_same(whole(parts), weights)
    assert parts["head.weight"] is parts["embed.weight"]
    gathered = whole(states)
    kinds = {"exp_avg", "exp_avg_sq"} | ({"fp32"} if dtype != "fp32" else set())
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    assert set(gathered) == {f"{name}/{kind}" for name in trained for kind in kinds}
    assert_same(gathered, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [2, 3])
def test_pieces_are_what_deepspeed_gathers(world, stage, dtype):
    pool(world).run(pieces_make, stage, dtype, {})


def test_pieces_of_bf16_optimizer_are_what_deepspeed_gathers():
    pool(2).run(pieces_make, "1", "bf16 in fp32", {})


def reordered(stage: str, options: dict[str, Any]) -> None:
    """The judge is the order in which the optimizer says that it laid the parameters out: its own gathering ignores it."""
    engine = engine_of(0, stage, "bf16", **options)
    for number in range(2):
        step(engine, number)
    optimizer, names = engine.optimizer, names_of(engine)
    gathered = whole(states_of(engine)) | whole(weights_of(engine))
    order = [names[id(p)] for p in optimizer.round_robin_bit16_groups[0]]
    assert order != [names[id(p)] for p in optimizer.bit16_groups[0]]
    flat = [torch.empty_like(optimizer.single_partition_of_fp32_groups[0]) for _ in range(dist.get_world_size())]
    dist.all_gather(flat, optimizer.single_partition_of_fp32_groups[0].detach())
    laid = torch.cat([gathered[f"{name}/fp32"].reshape(-1) for name in order])
    assert torch.equal(torch.cat(flat)[: len(laid)], laid)
    for name in order:
        assert torch.equal(gathered[f"{name}/fp32"].to(torch.bfloat16), gathered[name]), name


@pytest.mark.parametrize("stage", ["1", "2"])
def test_round_robin_reorders_the_parameters(stage):
    pool(2).run(reordered, stage, {"round_robin_gradients": True})


def filled(stage: str, dtype: str, options: dict[str, Any], steps: int) -> None:
    """An engine whose pieces are written trains on as the one that the values come from."""
    engine, other = engine_of(0, stage, dtype, **options), engine_of(1, stage, dtype, **options)
    for number in range(2):
        step(engine, number)
    for number in range(steps):
        step(other, number + 5)
    if not steps:
        make_states(other)
    other.eval()
    with torch.no_grad():
        other(torch.tensor([1, 2]))  # stage 3 may keep what this gathered
    other.train()
    values = whole(weights_of(engine)) | whole(states_of(engine))
    fill(weights_of(other) | states_of(other), values)
    for partition in zero.partitions(other.optimizer):
        put = one_for_all(other.optimizer.optimizer.state[partition.flat], "step", "step")
        for _ in partition.inside:
            put(torch.tensor(2.0))
    for name, buffer in engine.module.frozen.named_parameters():
        if stage != "3":
            other.module.frozen.get_parameter(name).data.copy_(buffer)
    zero.refresh(other.optimizer)
    for number in (2, 3):
        assert torch.equal(step(engine, number), step(other, number)), number
    for ours, theirs in zip(truth(engine), truth(other), strict=True):
        assert_same(ours, theirs)


def make_states(engine: Any) -> None:
    for partition in zero.partitions(engine.optimizer):
        state = engine.optimizer.optimizer.state[partition.flat]
        state |= {"step": torch.tensor(0.0)} | {kind: partition.new_state(torch.float32) for kind in ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize("steps", [1, 0], ids=["trained", "new"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_whose_pieces_are_filled_trains_on_like_the_other(stage, dtype, steps):
    pool(2).run(filled, stage, dtype, {}, steps)


def test_a_filled_bf16_optimizer_trains_on_like_the_other():
    pool(2).run(filled, "1", "bf16 in fp32", {}, 1)


def test_an_engine_that_keeps_all_parameters_gathered_sees_what_is_filled():
    pool(2).run(filled, "3", "bf16", {"stage3_param_persistence_threshold": 10**6}, 1)


def masters_from_weights(stage: str) -> None:
    engine = engine_of(0, stage, "bf16")
    step(engine, 0)
    fill(weights_of(engine), {name: torch.full_like(value, 0.3) for name, value in whole(weights_of(engine)).items()})
    zero.refresh(engine.optimizer)
    rounded = torch.tensor(0.3, dtype=torch.bfloat16).float()
    assert not any((value == rounded).all() for name, value in truth(engine)[1].items() if name.endswith("fp32"))
    zero.refresh(engine.optimizer, masters_of=lambda parameter: True)
    assert all((value == rounded).all() for name, value in truth(engine)[1].items() if name.endswith("fp32"))


@pytest.mark.parametrize("stage", STAGES)
def test_masters_that_are_not_stored_come_from_the_weights(stage):
    pool(2).run(masters_from_weights, stage)


def layouts() -> None:
    engine = engine_of(0, "2", "bf16")
    weight, moment = weights_of(engine)["up.weight"], states_of(engine)["up.weight/fp32"]
    assert isinstance(weight.layout, Mesh)
    assert weight.layout.holders(weight.shape, 1) == (0, 1)
    assert isinstance(moment.layout, Flat)
    groups = [[names_of(engine)[id(p)] for p, _ in part.inside] for part in zero.partitions(engine.optimizer)]
    assert groups == [["embed.weight", "up.weight", "down.weight"], ["scale", "up.bias", "norm.weight", "norm.bias"]]
    engine = engine_of(0, "3", "bf16")
    by_group: dict[int, list[str]] = {}
    for part in zero.partitions(engine.optimizer):
        by_group.setdefault(part.group, []).extend(names_of(engine)[id(p)] for p, _ in part.inside)
    assert list(by_group.values()) == groups
    assert len(zero.partitions(engine.optimizer)) > 2, "there are sub-groups"


def test_weights_are_replicas_and_moments_are_slots():
    pool(2).run(layouts)


def counted() -> None:
    engine, other = engine_of(0, "2", "bf16"), engine_of(1, "2", "bf16")
    assert zero.scaler_values(engine.optimizer) == []
    for number in range(3):
        step(engine, number)
    zero.Counters(other).load_state_dict(zero.Counters(engine).state_dict())
    assert (other.global_steps, other.global_samples) == (3, 24)
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler  # DeepSpeed trains in fp16 on GPUs only

    for each in (engine, other):
        each.optimizer.loss_scaler = DynamicLossScaler(2.0**4, 2.0, 2, 1.0, 2, False, dtype=torch.float16)
    for overflowed in (False, False, True):
        engine.optimizer.loss_scaler.update_scale(overflowed)
    values = {name: value for name, value, _ in zero.scaler_values(engine.optimizer)}
    assert values["loss_scaler.cur_iter"] == 3
    for name, _, put in zero.scaler_values(other.optimizer):
        put(values[name])
    assert vars(other.optimizer.loss_scaler) == vars(engine.optimizer.loss_scaler)


def test_counters_and_the_scale_of_the_loss_are_values():
    pool(2).run(counted)


def refused(what: str) -> None:
    if what == "stage 0":
        zero.is_zero(engine_of(0, "0", "bf16").optimizer)
    elif what == "replaced":
        engine = engine_of(0, "1", "bf16")
        engine.module.scale.data = torch.ones(1, dtype=torch.bfloat16)
        zero.partitions(engine.optimizer)
    elif what == "offloaded":
        engine = engine_of(0, "3", "bf16")
        engine.optimizer.offloaded_states.add(
            next(iter(__import__("deepspeed").runtime.zero.offload_config.OffloadStateTypeEnum))
        )
        zero.partitions(engine.optimizer)


@pytest.mark.parametrize(
    ("what", "told"),
    [("stage 0", "stage to 1, 2 or 3"), ("replaced", "its memory was replaced"), ("offloaded", "engine.reload_states()")],
)
def test_what_cannot_be_told_is_refused(what, told):
    for error in pool(2).run(refused, what, catch=True):
        assert isinstance(error, Unsupported), error
        assert told in str(error)


def test_one_counter_takes_one_value_only():
    state = {"step": torch.tensor(0.0)}
    put = one_for_all(state, "step", "step")
    put(torch.tensor(4.0))
    put(torch.tensor(4.0))
    assert state["step"] == 4
    with pytest.raises(Refused, match="keeps them apart"):
        put(torch.tensor(5.0))


def restored_without_its_optimizer(run: str, stage: str, dtype: str) -> list[str]:
    """Names of the weights that a step of rate 0 changes after the engine alone was restored."""
    import holdfast

    source, target = engine_of(0, stage, dtype), engine_of(1, stage, dtype)
    step(source, 0)
    step(target, 0)
    holdfast.save(run, holdfast.State(rng=False, model=source), 1, deadline=30)
    holdfast.restore(run, holdfast.State(rng=False, model=target), deadline=30)
    for group in target.optimizer.param_groups:
        group["lr"] = 0.0
    step(target, 1)
    wanted, found = truth(source)[0], truth(target)[0]
    return [name for name in wanted if not torch.equal(wanted[name], found[name])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_restored_without_their_optimizer_survive_its_next_step(tmp_path: Any, stage: str, dtype: str) -> None:
    assert pool(2).run(restored_without_its_optimizer, str(tmp_path), stage, dtype) == [[], []]
