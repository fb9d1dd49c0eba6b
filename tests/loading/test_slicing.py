"""LazyTensor: what is sliced from a checkpoint is what torch would have given, and only that is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast

from .tensors import DTYPES, bits, random, transposed

TENSORS = {
    "scalar": random(torch.float32, (), 0),
    "vector": random(torch.int64, (17,), 1),
    "matrix": random(torch.bfloat16, (9, 5), 2),
    "cube": transposed(torch.float64, (4, 3, 6), 3),
    "empty": random(torch.float16, (0, 4), 4),
    "hollow": random(torch.int32, (3, 0, 2), 5),
    "one": random(torch.complex64, (1, 7), 6),
    "large": random(torch.float32, (2100, 1003), 7),
}
"""`large` has three chunks of 4 MiB, whose borders lie inside of rows."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[holdfast.Checkpoint]:
    run = tmp_path_factory.mktemp("run")
    holdfast.save(run, {"part": TENSORS}, 1)
    with holdfast.open(run) as opened:
        yield opened


def of_dimension(size: int) -> st.SearchStrategy[Any]:
    """An index into one dimension, inside or outside of it."""
    bound = st.none() | st.integers(-size - 2, size + 2)
    one_more = st.lists(st.integers(-size, size - 1), max_size=4) if size else st.just([])
    return st.one_of(
        st.integers(-size - 1, size),
        st.builds(slice, bound, bound, st.sampled_from([None, 1, 1, 2, 3])),
        one_more,
        st.lists(st.booleans(), min_size=size, max_size=size).map(lambda v: torch.tensor(v, dtype=torch.bool)),
    )


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """What may stand in square brackets after a tensor of this shape."""
    if shape and draw(st.booleans()):
        return draw(of_dimension(shape[0]))
    count = draw(st.integers(0, len(shape)))
    keys: list[Any] = [draw(of_dimension(shape[i])) for i in range(count)]
    if draw(st.booleans()):
        keys.insert(draw(st.integers(0, len(keys))), None)
    if draw(st.booleans()):
        keys.append(...)
    return tuple(keys)


@settings(deadline=None, max_examples=400)
@given(st.data(), st.sampled_from([name for name in TENSORS if name != "large"]))
def test_any_index_gives_what_torch_gives(checkpoint: holdfast.Checkpoint, data: st.DataObject, name: str) -> None:
    tensor, lazy = TENSORS[name], checkpoint[f"part.{name}"]
    key = data.draw(indices(tuple(tensor.shape)))
    try:
        expected = tensor[key]
    except (IndexError, ValueError, TypeError) as error:
        with pytest.raises(type(error)):
            lazy[key]
    else:
        got = lazy[key]
        assert (got.dtype, got.shape, bits(got)) == (expected.dtype, expected.shape, bits(expected))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2100), st.integers(0, 2100), st.none() | st.integers(0, 1002))
def test_rows_of_a_tensor_of_several_chunks_are_those_asked_for(
    checkpoint: holdfast.Checkpoint, low: int, high: int, column: int | None
) -> None:
    key = (slice(low, high),) if column is None else (slice(low, high), column)
    assert bits(checkpoint["part.large"][key]) == bits(TENSORS["large"][key])


def test_a_lazy_tensor_says_what_it_is_before_anything_is_read(checkpoint: holdfast.Checkpoint) -> None:
    for name, tensor in TENSORS.items():
        lazy = checkpoint[f"part.{name}"]
        assert tuple(lazy.shape) == tuple(tensor.shape)
        assert str(lazy.dtype).removeprefix("torch.") == str(tensor.dtype).removeprefix("torch.")
        assert lazy.nbytes == tensor.numel() * tensor.element_size()
    assert len(checkpoint["part.matrix"]) == 9


def test_a_slice_is_a_tensor_of_its_own(checkpoint: holdfast.Checkpoint) -> None:
    first = checkpoint["part.vector"][2:5]
    first.zero_()
    assert bits(checkpoint["part.vector"][2:5]) == bits(TENSORS["vector"][2:5])


def test_a_name_that_is_not_there_is_a_key_error_with_the_name(checkpoint: holdfast.Checkpoint) -> None:
    with pytest.raises(KeyError, match=r"part\.matrx"):
        checkpoint["part.matrx"]
    assert "part.matrx" not in checkpoint
    assert "part.matrix" in checkpoint


def test_the_names_of_a_checkpoint_are_its_tensors_sorted(checkpoint: holdfast.Checkpoint) -> None:
    assert checkpoint.names == sorted(f"part.{name}" for name in TENSORS) == list(checkpoint)


def test_a_slice_of_rows_reads_the_chunks_that_hold_them_and_no_others(tmp_path: Path) -> None:
    weight = random(torch.float32, (2100, 1003), 1)
    holdfast.save(tmp_path, {"weight": weight}, 1)
    (data,) = (tmp_path / "steps").glob("*/n0000-00.safetensors")
    with data.open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\xff\x00\xff\x00")
    with holdfast.open(tmp_path) as checkpoint:
        assert bits(checkpoint["weight"][3:900]) == bits(weight[3:900])
        with pytest.raises(holdfast.Corrupt, match="weight"):
            checkpoint["weight"][2000:]


def test_the_logical_digest_of_a_stored_tensor_does_not_depend_on_how_it_lay_in_memory(tmp_path: Path) -> None:
    for dtype in DTYPES:
        tensor = random(dtype, (6, 5), 3)
        turned = tensor.t().contiguous().t()
        run = tmp_path / str(dtype)
        holdfast.save(run, {"part": {"a": tensor, "b": turned, "c": tensor.t().contiguous()}}, 1)
        with holdfast.open(run) as checkpoint:
            assert checkpoint.digest("part.a") == checkpoint.digest("part.b") != checkpoint.digest("part.c"), dtype
