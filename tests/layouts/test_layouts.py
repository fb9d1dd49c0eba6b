"""The layouts themselves, with torch alone: they train one model, and gathering and putting whole tensors are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import pool

from .hops import STEPS_AFTER, STEPS_BEFORE, wrong_tensors
from .layouts import LAYOUTS, build
from .models import LARGE_SIDE
from .truth import Tensors, hyper_of, live_tensors, local_of, put_whole, same_bits, unite, whole_tensors

BUILT = [name for name, layout in LAYOUTS.items() if layout.build is not None]


def trained(layout: str) -> tuple[Tensors, Any, list[float]]:
    job = build(layout, 1)
    losses = job.train(STEPS_BEFORE)
    return whole_tensors(job), hyper_of(job), losses


def put_and_train(layout: str, tensors: Tensors, hyper: Any) -> tuple[list[str], Tensors, list[float], list[float]]:
    job = build(layout, 2)
    put_whole(job, tensors, hyper)
    wrong, back = wrong_tensors(job, tensors), whole_tensors(job)
    losses = job.train(STEPS_AFTER)
    put_whole(job, tensors, hyper)
    return wrong, back, losses, job.train(STEPS_AFTER)


def local_shapes(layout: str) -> dict[str, tuple[int, ...]]:
    job = build(layout, 1)
    job.train(1)
    return {name: tuple(local_of(tensor).shape) for name, tensor in live_tensors(job).items()}


def spoil_one_element(layout: str, name: str, at: int) -> list[str]:
    job = build(layout, 1)
    job.train(1)
    truth = whole_tensors(job)
    with torch.no_grad():
        if torch.distributed.get_rank() == at:
            local_of(live_tensors(job)[name]).view(-1)[-1:] += 1
    return wrong_tensors(job, truth)


def mean_loss(losses: list[list[float]]) -> torch.Tensor:
    """Of the ranks that have one."""
    return torch.tensor([line for line in losses if any(line)]).mean(0)


@pytest.fixture(scope="module")
def single() -> tuple[Tensors, Any, list[float]]:
    return pool(1).run(trained, "single")[0]


@pytest.mark.parametrize("layout", BUILT)
def test_a_layout_trains_the_model_that_a_single_process_trains(layout: str, single: tuple[Tensors, Any, list[float]]) -> None:
    ranks = pool(LAYOUTS[layout].world).run(trained, layout)
    united = unite([tensors for tensors, _, _ in ranks])
    assert united.keys() == single[0].keys()
    assert mean_loss([losses for _, _, losses in ranks]).tolist() == pytest.approx(single[2], rel=1e-3)
    for name, tensor in united.items():
        assert tensor.dtype == single[0][name].dtype
        torch.testing.assert_close(tensor, single[0][name], rtol=0.05, atol=0.02, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", BUILT)
def test_what_is_put_into_a_layout_is_what_is_gathered_from_it(layout: str, single: tuple[Tensors, Any, list[float]]) -> None:
    ranks = pool(LAYOUTS[layout].world).run(put_and_train, layout, *single[:2])
    assert [wrong for wrong, _, _, _ in ranks] == [[]] * len(ranks)
    united = unite([tensors for _, tensors, _, _ in ranks])
    assert [name for name, tensor in single[0].items() if not same_bits(tensor, united[name])] == []
    assert all(losses == again for _, _, losses, again in ranks)


def test_the_state_has_all_that_makes_states_hard_to_reshard(single: tuple[Tensors, Any, list[float]]) -> None:
    tensors = single[0]
    assert len(tensors) >= 200
    assert {t.dtype for t in tensors.values()} == {torch.float32, torch.bfloat16, torch.int64}
    assert tensors["model.empty"].numel() == 0
    assert tensors["model.blocks.0.seen"].ndim == 0
    assert not tensors["model.transposed"].is_contiguous()
    assert same_bits(tensors["model.head.weight"], tensors["model.embed.weight"])
    assert all(tensors["model.embed.weight"].shape[0] % ranks for ranks in (2, 3, 4))
    assert LARGE_SIDE**2 * 4 > 64 << 20


def test_some_shards_are_empty_and_some_uneven() -> None:
    shapes = pool(4).run(local_shapes, "fsdp4")
    assert [rank["model.blocks.0.scale"] for rank in shapes] == [(1, 12), (0, 12), (0, 12), (0, 12)]
    assert [rank["optimizer.model.embed.weight.exp_avg"][0] for rank in shapes] == [8, 8, 8, 5]


def test_fsdp_over_tensor_parallelism_cuts_one_dimension_twice() -> None:
    shapes = pool(4).run(local_shapes, "fsdp2_tp2")
    assert [rank["model.blocks.0.ffn.up.weight"][0] for rank in shapes] == [4, 3, 3, 3]
    assert [rank["model.blocks.1.ffn.experts.w1"] for rank in shapes] == [(3, 5, 12), (3, 5, 12), (2, 5, 12), (2, 5, 12)]


def test_experts_are_spread_over_ranks_and_their_hidden_dimension_too() -> None:
    shapes = pool(4).run(local_shapes, "ep2_tp2")
    assert [rank["model.blocks.1.ffn.experts.w2"] for rank in shapes] == [(3, 12, 5), (3, 12, 5), (2, 12, 5), (2, 12, 5)]


@pytest.mark.parametrize("name", ["model.blocks.0.ffn.up.weight", "optimizer.model.blocks.1.ffn.experts.w1.exp_avg_sq"])
def test_one_wrong_element_on_one_rank_is_seen(name: str) -> None:
    assert pool(4).run(spoil_one_element, "fsdp2_tp2", name, 3) == [[], [], [], [name]]
