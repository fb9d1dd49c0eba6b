"""Ranks that give one name to different tensors, overlap, or leave a part out: nothing is saved by mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import pool

import holdfast
from holdfast.store.local import LocalStore
from holdfast.store.wrap import Trace

from .outcomes import Outcome, tried
from .states import mesh_of, numbers, shard, wrong_tensors

DEADLINE = 20.0
BIG, LAYERS = 50_000, 16
"""Elements of a tensor, and tensors: so much that what is written twice, or by one rank alone, stands out."""


# --- what the ranks hold ----------------------------------------------------------------------------------------------


def equal(rank: int, step: int) -> Any:
    return {"layer": {"weight": numbers("weight", step, 8, 5), "bias": numbers("bias", step, 5)}}


def one_differs(rank: int, step: int) -> Any:
    """The last element of one tensor on rank 2 has another last bit."""
    made = equal(rank, step)
    if rank == 2:
        made["layer"]["weight"].view(torch.int32)[7, 4] ^= 1
    return made


def experts_of_another_seed(rank: int, step: int) -> Any:
    """Each rank calls its own experts by the same names: the classic loss of all but one rank's."""
    return {f"expert{i}": {"w1": numbers(f"{rank}-{i}", step, 6, 4)} for i in range(2)}


def experts_of_other_shapes(rank: int, step: int) -> Any:
    return {"expert0": {"w1": numbers(f"{rank}", step, 6 + rank, 4)}}


def experts_of_other_types(rank: int, step: int) -> Any:
    return {"expert0": {"w1": numbers("w1", step, 6, 4).to(torch.float16 if rank else torch.bfloat16)}}


def experts_on_two_meshes(rank: int, step: int) -> Any:
    """Two expert-parallel groups of two ranks: each rank shards its group's experts, and both groups have the same names."""
    group = rank // 2
    meshes = mesh_of(0, 1), mesh_of(2, 3)
    return {"experts": {"w1": shard(numbers(f"group{group}", step, 8, 5), meshes[group])}}


def experts_on_two_meshes_of_other_shapes(rank: int, step: int) -> Any:
    group = rank // 2
    meshes = mesh_of(0, 1), mesh_of(2, 3)
    return {"experts": {"w1": shard(numbers(f"group{group}", step, 8 + group, 5), meshes[group])}}


def equal_on_two_meshes(rank: int, step: int) -> Any:
    """Undeclared replicas of a sharded tensor: two groups that hold the same."""
    group = rank // 2
    meshes = mesh_of(0, 1), mesh_of(2, 3)
    return {"experts": {"w1": shard(numbers("w1", step, 8, 5), meshes[group])}}


def whole_and_shards(rank: int, step: int) -> Any:
    """Rank 2 has all of it, ranks 0 and 1 have halves."""
    mesh = mesh_of(0, 1)
    weight = numbers("weight", step, 8, 5)
    return {"layer": {"weight": weight if rank == 2 else shard(weight, mesh)}}


def other_cuts(rank: int, step: int) -> Any:
    """Ranks 0 and 1 cut it along rows, ranks 2 and 3 along columns."""
    meshes = mesh_of(0, 1), mesh_of(2, 3)
    return {"layer": {"weight": shard(numbers("weight", step, 8, 6), meshes[rank // 2], dim=rank // 2)}}


def a_shard_is_missing(rank: int, step: int) -> Any:
    """Rank 1 says nothing of the tensor of which it has the second half."""
    made: dict[str, Any] = {"rest": {"x": numbers("x", step, 3)}}
    mesh = mesh_of(0, 1)
    if rank == 0:
        made["layer"] = {"weight": shard(numbers("weight", step, 8, 5), mesh)}
    return made


def a_value_differs(rank: int, step: int) -> Any:
    return equal(rank, step) | {"progress": {"seen": rank}}


# --- the calls --------------------------------------------------------------------------------------------------------


def save_twice(run: Path, wrong: Callable[[int, int], Any], right: Callable[[int, int], Any]) -> tuple[list[Outcome], int]:
    """Step 1 as it should be, step 2 wrong, step 3 right again. With the bytes that this rank wrote in step 3."""
    rank = dist.get_rank()
    holdfast.save(run, right(rank, 1), 1, deadline=DEADLINE)
    outcomes = [tried(lambda: holdfast.save(run, wrong(rank, 2), 2, deadline=DEADLINE))]
    return [*outcomes, tried(lambda: holdfast.save(run, right(rank, 3), 3, deadline=DEADLINE))], rank


def refused(run: Path, world: int, wrong: Callable[[int, int], Any], right: Callable[[int, int], Any] = equal) -> str:
    """Save twice; the message of the refusal. It is the same on all ranks, and all else is as if it had not been tried."""
    outcomes = [result[0] for result in pool(world).run(save_twice, run, wrong, right)]
    first, then = zip(*outcomes, strict=True)
    assert {o.error for o in first} == {"Refused"}, first
    assert len({o.text.removeprefix("rank 0: ") for o in first}) == 1, first
    assert {o.step for o in then} == {3}, then
    assert [step.step for step in holdfast.Run(run).steps()] == [1, 3]
    for step in (1, 3):
        assert wrong_tensors(run, step, right(0, step)) == []
    committed = {p.parent.name for p in run.glob("steps/*/commit.json") if b'"aborted"' not in p.read_bytes()}
    left = [p for p in run.glob("steps/*/n0*") if p.parent.name not in committed]
    assert left == [], "the data of a save that was refused is removed"
    return first[0].text


# --- one name for different things ------------------------------------------------------------------------------------


def test_replicas_that_differ_in_one_bit_are_refused_by_tensor_and_ranks(tmp_path: Path) -> None:
    text = refused(tmp_path, 3, one_differs)
    assert "layer.weight" in text
    assert "layer.bias" not in text
    assert "rank 2" in text
    assert re.search(r"rank 0(, 1)?\b", text)
    assert "holdfast.PerRank" in text


@pytest.mark.parametrize("world", [2, 4])
def test_experts_of_each_rank_under_the_same_names_are_refused(tmp_path: Path, world: int) -> None:
    text = refused(tmp_path, world, experts_of_another_seed)
    assert "expert0.w1" in text
    assert "expert1.w1" in text
    assert all(re.search(rf"rank {rank}\b", text) for rank in range(world))
    assert "holdfast.PerRank" in text


@pytest.mark.parametrize("wrong", [experts_of_other_shapes, experts_of_other_types])
def test_experts_of_another_shape_or_type_under_one_name_are_refused(tmp_path: Path, wrong: Callable[..., Any]) -> None:
    text = refused(tmp_path, 2, wrong)
    assert "expert0.w1" in text
    assert "rank 0" in text
    assert "rank 1" in text
    assert "holdfast.PerRank" in text


@pytest.mark.parametrize("wrong", [experts_on_two_meshes, experts_on_two_meshes_of_other_shapes])
def test_expert_parallel_groups_that_name_their_experts_alike_are_refused(tmp_path: Path, wrong: Callable[..., Any]) -> None:
    text = refused(tmp_path, 4, wrong)
    assert "experts.w1" in text
    assert "rank 0" in text
    assert "rank 2" in text
    assert "holdfast.PerRank" in text


@pytest.mark.parametrize("wrong", [whole_and_shards, other_cuts])
def test_boxes_that_overlap_without_being_equal_are_refused(tmp_path: Path, wrong: Callable[..., Any]) -> None:
    text = refused(tmp_path, 4 if wrong is other_cuts else 3, wrong)
    assert "layer.weight" in text
    assert "overlap" in text
    assert len(set(re.findall(r"rank (\d)", text.removeprefix("rank 0: ")))) == 2, text


def test_a_tensor_of_which_nobody_has_a_part_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    text = refused(tmp_path, 2, a_shard_is_missing)
    assert "layer.weight" in text
    assert "20 of 40 elements are missing" in text


def test_different_experts_are_saved_where_they_have_different_names(tmp_path: Path) -> None:
    pool(4).run(save_named_experts, tmp_path)
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.names == sorted(f"expert{rank}.w1" for rank in range(4))
        assert checkpoint.verify() == []
        for rank in range(4):
            assert torch.equal(checkpoint[f"expert{rank}.w1"][:], numbers(f"{rank}", 1, 6, 4))


def save_named_experts(run: Path) -> None:
    rank = dist.get_rank()
    holdfast.save(run, {f"expert{rank}": {"w1": numbers(f"{rank}", 1, 6, 4)}}, 1, deadline=DEADLINE)


# --- replicas that agree ----------------------------------------------------------------------------------------------


def big(rank: int) -> Any:
    return {"layers": {f"w{i}": numbers(f"w{i}", 1, BIG) for i in range(LAYERS)}}


def big_on_two_meshes(rank: int) -> Any:
    meshes = mesh_of(0, 1), mesh_of(2, 3)
    return {"layers": {f"w{i}": shard(numbers(f"w{i}", 1, BIG), meshes[rank // 2]) for i in range(LAYERS)}}


def bytes_written(run: Path, make: Callable[[int], Any]) -> int:
    store = Trace(LocalStore(run))
    holdfast.save(store, make(dist.get_rank()), 1, deadline=DEADLINE)
    return store.totals.nbytes["write_at"]


@pytest.mark.parametrize("make", [big, big_on_two_meshes])
def test_replicas_that_nobody_declared_are_stored_once_and_shared_out(tmp_path: Path, make: Callable[[int], Any]) -> None:
    written = pool(4).run(bytes_written, tmp_path, make)
    data = 4 * BIG * LAYERS
    assert data <= sum(written) <= 1.1 * data, written
    assert max(written) <= 0.3 * data, "each writes its share"
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.nbytes == data
    assert wrong_tensors(tmp_path, 1, big(0)) == []


def experts_of_each_rank(rank: int, step: int) -> dict[str, Any]:
    return {"w1": numbers(f"{rank}", step, 6, 4), "number": rank}


def save_and_restore_per_rank(run: Path) -> list[str]:
    rank = dist.get_rank()
    holdfast.save(run, {"experts": holdfast.PerRank(experts_of_each_rank(rank, 1))}, 1, deadline=DEADLINE)
    live = {"w1": torch.zeros(6, 4), "number": -1}
    holdfast.restore(run, {"experts": holdfast.PerRank(live)}, deadline=DEADLINE)
    wanted = experts_of_each_rank(rank, 1)
    return [name for name in wanted if not torch.equal(torch.as_tensor(live[name]), torch.as_tensor(wanted[name]))]


def test_the_way_out_that_the_refusal_names_keeps_what_each_rank_has(tmp_path: Path) -> None:
    assert pool(4).run(save_and_restore_per_rank, tmp_path) == [[]] * 4


def test_values_that_differ_by_rank_are_kept_by_rank_and_conflict_with_nothing(tmp_path: Path) -> None:
    results = pool(3).run(save_twice, tmp_path, a_value_differs, a_value_differs)
    assert [[o.step for o in outcomes] for outcomes, _ in results] == [[2, 3]] * 3
