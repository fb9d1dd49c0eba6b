"""Every bit comes back: any dtype, any shape, any layout in memory, through every way out of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast

from .tensors import DTYPES, LAYOUTS, Kind, bits, kinds, leaf, random, strided, transposed

MIB = 1 << 20


def fresh_run() -> str:
    """A run in memory that no other example has."""
    fresh_run.count = getattr(fresh_run, "count", 0) + 1  # type: ignore[attr-defined]
    return f"memory://bit-equality-{fresh_run.count}"  # type: ignore[attr-defined]


@settings(deadline=None, max_examples=150)
@given(st.lists(kinds, min_size=1, max_size=6), st.integers(0, 2**32))
def test_every_bit_of_every_tensor_comes_back_by_load_restore_and_open(made: list[Kind], seed: int) -> None:
    saved = {str(i): kind.make(seed + i) for i, kind in enumerate(made)}
    live = {str(i): kind.make(seed + 100 + i) for i, kind in enumerate(made)}
    expected = {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in saved.items()}
    run = fresh_run()
    holdfast.save(run, {"part": saved}, 1)
    holdfast.restore(run, {"part": live})
    loaded = holdfast.load(run)["part"]
    with holdfast.open(run) as checkpoint:
        opened = {name: checkpoint[f"part.{name}"][...] for name in saved}
        assert checkpoint.verify() == []
    for way in (loaded, live, opened):
        assert {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in way.items()} == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_from_a_file_in_every_layout(tmp_path: Path, dtype: torch.dtype) -> None:
    made = [Kind(dtype, shape, layout) for layout in LAYOUTS for shape in [(), (0, 3), (5,), (3, 4), (1, 2, 3)]]
    saved = {str(i): kind.make(i) for i, kind in enumerate(made)}
    live = {str(i): kind.make(i + 100) for i, kind in enumerate(made)}
    holdfast.save(tmp_path, {"part": saved}, 1)
    holdfast.restore(tmp_path, {"part": live})
    wrong = [made[int(name)] for name, tensor in live.items() if bits(tensor) != bits(saved[name])]
    assert wrong == []


LARGE = {
    "transposed": Kind(torch.float32, (1100, 1003), transposed),
    "strided rows": Kind(torch.float32, (1 << 20, 3), strided),
    "strided vector": Kind(torch.bfloat16, (5_000_003,), strided),
    "strided in three dimensions": Kind(torch.float64, (3, 401, 499), strided),
    "one row that is strided": Kind(torch.float16, (1, 1, 3_000_001), strided),
    "permuted": Kind(torch.complex64, (7, 311, 257), transposed),
    "conjugated": Kind(torch.complex128, (300_007,), LAYOUTS[5]),
    "bytes": Kind(torch.uint8, (2, 4 * MIB + 5), strided),
    "contiguous": Kind(torch.float32, (3, 1_234_567), random),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_larger_than_a_chunk_comes_back_whatever_its_layout(tmp_path: Path, name: str) -> None:
    kind = LARGE[name]
    saved, live = kind.make(1), kind.make(2)
    expected = bits(saved)
    assert len(expected) > 4 * MIB
    holdfast.save(tmp_path, {"large": saved}, 1)
    holdfast.restore(tmp_path, {"large": live})
    assert bits(live) == expected
    assert bits(holdfast.load(tmp_path)["large"]) == expected


@pytest.mark.parametrize("layout", [random, transposed, strided], ids=lambda f: f.__name__)
def test_a_tensor_of_one_layout_loads_into_one_of_another(tmp_path: Path, layout: object) -> None:
    saved = transposed(torch.float32, (1100, 1003), 1)
    live = layout(torch.float32, (1100, 1003), 2)  # type: ignore[operator]
    holdfast.save(tmp_path, {"large": saved}, 1)
    holdfast.restore(tmp_path, {"large": live})
    assert bits(live) == bits(saved)


def test_one_element_of_a_wider_storage_comes_back(tmp_path: Path) -> None:
    saved, live = torch.arange(6.0).reshape(2, 3)[1:, 1:2], torch.zeros(3)[1::2]
    assert saved.stride() == (3, 1)
    assert live.stride() == (2,)
    holdfast.save(tmp_path, {"part": {"a": saved, "b": torch.arange(3.0)[1::2]}}, 1)
    holdfast.restore(tmp_path, {"part": {"a": torch.zeros(1, 1), "b": live}})
    assert live.tolist() == [1]


def test_only_the_view_is_filled_and_not_what_lies_beside_it(tmp_path: Path) -> None:
    storage = torch.zeros(6, 8)
    holdfast.save(tmp_path, {"part": {"view": torch.ones(2, 3)}}, 1)
    holdfast.restore(tmp_path, {"part": {"view": storage[1:5:2, 2:5]}})
    assert storage.sum() == 6
    assert storage[1:5:2, 2:5].sum() == 6


def test_two_views_into_one_storage_are_both_filled(tmp_path: Path) -> None:
    storage = torch.arange(12.0).reshape(3, 4)
    state = {"part": {"row": storage[1], "column": storage[:, 2], "whole": storage}}
    holdfast.save(tmp_path, state, 1)
    expected = storage.clone()
    storage.zero_()
    holdfast.restore(tmp_path, state)
    assert torch.equal(storage, expected)


def test_an_expanded_tensor_is_stored_as_what_it_shows_and_restored_or_refused(tmp_path: Path) -> None:
    saved, live = torch.arange(3.0).expand(4, 3), torch.zeros(3).expand(4, 3)
    holdfast.save(tmp_path, {"part": {"expanded": saved}}, 1)
    assert torch.equal(holdfast.load(tmp_path)["part"]["expanded"], saved)
    state = holdfast.State(rng=False, part={"expanded": live})
    try:
        holdfast.restore(tmp_path, state)
    except (holdfast.Mismatch, holdfast.Unsupported) as refused:
        assert "part.expanded" in str(refused)
        assert state.touched is None
        assert live.sum() == 0
    else:
        assert torch.equal(live, saved)


def test_a_leaf_that_requires_grad_is_filled_without_a_trace_in_autograd(tmp_path: Path) -> None:
    saved, live = leaf(torch.float32, (4, 5), 1), leaf(torch.float32, (4, 5), 2)
    live.grad = torch.ones_like(live)
    holdfast.save(tmp_path, {"part": {"leaf": saved}}, 1)
    holdfast.restore(tmp_path, {"part": {"leaf": live}})
    assert (live.requires_grad, live.is_leaf, live.grad_fn) == (True, True, None)
    assert torch.equal(live.grad, torch.ones_like(live))
    assert holdfast.load(tmp_path)["part"]["leaf"].requires_grad is False


def test_a_backward_pass_that_needs_the_old_weights_notices_that_they_were_filled(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    holdfast.save(tmp_path, {"weight": weight}, 1)
    loss = (weight * weight).sum()
    holdfast.restore(tmp_path, {"weight": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tensors_made_under_inference_mode_are_saved_and_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        saved, live = torch.arange(3.0), torch.zeros(3)
    holdfast.save(tmp_path, {"part": {"a": saved}}, 1)
    holdfast.restore(tmp_path, {"part": {"a": live}})
    assert live.tolist() == [0, 1, 2]


def test_many_tensors_come_back(tmp_path: Path) -> None:
    def tree(seed: int) -> dict[str, torch.Tensor]:
        return {f"t{i}": random(DTYPES[i % len(DTYPES)], (i % 7, 3), seed + i) for i in range(3000)}

    saved, live = tree(0), tree(1)
    holdfast.save(tmp_path, {"part": saved}, 1)
    holdfast.restore(tmp_path, {"part": live})
    assert all(bits(live[name]) == bits(tensor) for name, tensor in saved.items())
    assert len(holdfast.open(tmp_path).names) == 3000
