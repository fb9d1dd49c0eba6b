"""ZeRO beyond the matrix: stages 1 and 2, worlds of two and three, and bfloat16 with masters, stored or made from the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import pool
from sharding.test_deepspeed import Model, engine_of, step
from sharding.test_deepspeed import truth as gathered
from torch import nn

import holdfast

from .jobs import adamw
from .test_matrix import Matrix, check_hop, stored_in
from .truth import same_bits

PLAIN = ["single", "fsdp2"]
ZERO = ["zero1_2", "zero1_3", "zero2_2", "zero2_3"]
PAIRS = [(plain, zero) for zero in ZERO for plain in PLAIN] + [(zero, plain) for plain in PLAIN for zero in ZERO]
PAIRS += [("zero1_2", "zero2_3"), ("zero2_3", "zero1_2"), ("zero3_2", "zero3_3"), ("zero3_3", "zero2_2"), ("zero2_2", "zero3_3")]
LATER = 5

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def hops(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("zero"), {(before, after, False) for before, after in PAIRS})


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_what_one_stage_and_world_saves_another_loads(before: str, after: str, hops: Matrix) -> None:
    check_hop(hops, before, after, large=False)


# --- bfloat16 -----------------------------------------------------------------------------------------------------------

Truth = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Weights, and masters and moments as `up.weight/fp32`."""


def state_of(engine: Any) -> holdfast.State:
    return holdfast.State(rng=False, model=engine, optimizer=engine.optimizer)


def engine_after(steps: int, seed: int, stage: str) -> Any:
    engine = engine_of(seed, stage, "bf16")
    for number in range(steps):
        step(engine, number)
    return engine


def later(engine: Any) -> list[float]:
    return [step(engine, number).item() for number in range(10, 10 + LATER)]


def by_hand(engine: Any, truth: Truth, steps: float) -> None:
    """Give a stepped engine of stage 1 or 2 the weights, masters and moments that another gathered."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    weights, states = truth
    gathered(engine)  # links the states
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            parameter.copy_(weights[name])
            if parameter.requires_grad:
                safe_set_full_fp32_param(parameter, states[f"{name}/fp32"])
                for kind in ("exp_avg", "exp_avg_sq"):
                    safe_set_full_optimizer_state(parameter, states[f"{name}/{kind}"], kind)
    for state in engine.optimizer.optimizer.state.values():
        state["step"].fill_(steps)


def different(one: Truth, other: Truth) -> list[str]:
    return [name for a, b in zip(one, other, strict=True) for name in a.keys() | b.keys() if not same_bits(a[name], b[name])]


def save_bf16(run: str, stage: str) -> Truth:
    engine = engine_after(2, 1, stage)
    holdfast.save(run, state_of(engine), 2)
    return gathered(engine)


def load_bf16(run: str, again: str, stage: str, steps: int, truth: Truth) -> tuple[list[str], list[float], list[float]]:
    """What is wrong in an engine that had made so many steps; its next losses, and those of one that is given all by hand."""
    engine = engine_after(steps, 2, stage)
    state = state_of(engine)
    holdfast.restore(run, state)
    wrong = different(gathered(engine), truth)
    holdfast.save(again, state, 2)
    losses = later(engine)
    by_hand(engine, truth, 2)
    return wrong, losses, later(engine)


@pytest.mark.parametrize(("stage", "worlds"), [("2", (2, 3)), ("2", (3, 2)), ("1", (2, 3))])
@pytest.mark.parametrize("steps", [0, 1], ids=["new", "trained"])
def test_masters_go_to_another_number_of_ranks(stage: str, worlds: tuple[int, int], steps: int, tmp_path: Path) -> None:
    run, again = tmp_path / "run", tmp_path / "again"
    truth = pool(worlds[0]).run(save_bf16, str(run), stage)[0]
    assert truth[1]["up.weight/fp32"].dtype == torch.float32
    assert any((truth[1][f"{name}/fp32"] != weight.float()).any() for name, weight in truth[0].items() if "frozen" not in name)
    for wrong, losses, expected in pool(worlds[1]).run(load_bf16, str(run), str(again), stage, steps, truth):
        assert wrong == []
        assert losses == expected
    assert stored_in(again) == stored_in(run)


def save_plain(run: str) -> Truth:
    """The same model, trained in float32 by one process; its weights and moments."""
    torch.manual_seed(1)
    model = Model()
    optimizer = adamw(model)
    for number in range(2):
        tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(number))
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    holdfast.save(run, holdfast.State(rng=False, model=model, optimizer=optimizer), 2)
    names = {parameter: name for name, parameter in model.named_parameters()}
    states = {f"{names[p]}/{key}": value for p, state in optimizer.state.items() for key, value in state.items() if key != "step"}
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}, states


def load_without_masters(run: str, stage: str, truth: Truth) -> tuple[str, list[str], list[str], list[float], list[float]]:
    """The refusal; what is wrong after it was waived, and what was waived; the next losses, and those of one set by hand."""
    engine = engine_after(1, 2, stage)
    state, cast = state_of(engine), {"model.*": "bfloat16"}
    before = gathered(engine)
    try:
        holdfast.restore(run, state, cast=cast)
    except holdfast.Mismatch as error:
        refusal = str(error)
    assert different(gathered(engine), before) == [], "a refused load has touched something"
    ledger = holdfast.restore(run, state, cast=cast, waive="optimizer.*.fp32")
    weights = {name: weight.to(torch.bfloat16) for name, weight in truth[0].items()}
    masters = {f"{name.removesuffix('/exp_avg')}/fp32" for name in truth[1] if name.endswith("/exp_avg")}
    states = truth[1] | {name: weights[name.removesuffix("/fp32")].float() for name in masters}
    now = gathered(engine)
    trained_ones = {name: now[1][name] for name in states}
    wrong = different((now[0], trained_ones), (weights, states))
    losses = later(engine)
    by_hand(engine, (weights, states), 2)
    return refusal, wrong, sorted(ledger.waived), losses, later(engine)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_masters_that_are_not_stored_are_made_from_the_weights(stage: str, tmp_path: Path) -> None:
    truth = pool(1).run(save_plain, str(tmp_path / "run"))[0]
    masters = sorted(f"optimizer.model.{name.removesuffix('/exp_avg')}.fp32" for name in truth[1] if name.endswith("/exp_avg"))
    for refusal, wrong, waived, losses, expected in pool(2).run(load_without_masters, str(tmp_path / "run"), stage, truth):
        assert "optimizer.model.up.weight.fp32 missing" in refusal
        assert wrong == []
        assert waived == masters
        assert losses == expected


def load_some(run: str, select: list[str], stage: str) -> tuple[list[str], list[str]]:
    """Names of the states that a partial load has changed, and of the masters that are their weights afterwards."""
    engine = engine_after(2, 2, stage)
    before = gathered(engine)
    holdfast.restore(run, holdfast.State(rng=False, model=engine, optimizer=engine.optimizer, progress={"x": 0}), select=select)
    weights, states = gathered(engine)
    masters = {name.removesuffix("/fp32"): value for name, value in states.items() if name.endswith("/fp32")}
    changed = [name for name, value in states.items() if not same_bits(value, before[1][name])]
    return sorted(changed), sorted(name for name, value in masters.items() if same_bits(value, weights[name].float()))


def save_with_progress(run: str) -> None:
    engine = engine_after(1, 1, "2")
    holdfast.save(run, holdfast.State(rng=False, model=engine, optimizer=engine.optimizer, progress={"x": 1}), 1)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_only_masters_of_loaded_weights_are_made_from_them(stage: str, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    pool(2).run(save_with_progress, run)
    for changed, _ in pool(2).run(load_some, run, ["progress.*"], stage):
        assert changed == []
    for changed, plain in pool(2).run(load_some, run, ["model.up.weight", "model.head.weight"], stage):
        assert changed == ["embed.weight/fp32", "head.weight/fp32", "up.weight/fp32"]
        assert {"embed.weight", "head.weight", "up.weight"} <= set(plain)
        assert "down.weight" not in plain
    for changed, _ in pool(2).run(load_some, run, ["model.up.weight", "optimizer.model.up.weight.fp32"], stage):
        assert changed == ["up.weight/fp32"]
