"""Layout expressions of hand-sharded tensors: every element of the logical tensor is where the expression says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from holdfast.errors import Refused, Unsupported
from holdfast.layout.factors import layout_of, parse

NAMES = ("dp", "tp", "ep")
MESH = np.arange(12).reshape(2, 3, 2)
LOCAL = (4, 6)


def cut(whole: np.ndarray, dims: list[list[str]], rank: int) -> np.ndarray:
    """What a rank holds, cut one axis after the other as the expression says it."""
    where = dict(zip(NAMES, np.argwhere(rank == MESH)[0], strict=True))
    for dim, axes in enumerate(dims):
        for axis in axes:
            whole = np.split(whole, MESH.shape[NAMES.index(axis)], dim)[where[axis]]
    return whole


CUTS = [
    [list(first), list(second)]
    for count in range(4)
    for axes in itertools.permutations(NAMES, count)
    for at in range(count + 1)
    for first, second in [(axes[:at], axes[at:])]
]


@pytest.mark.parametrize("dims", CUTS, ids=str)
def test_each_rank_holds_what_the_expression_says(dims: list[list[str]]) -> None:
    written = "(" + ", ".join("*".join([*(f"@{a}" for a in axes), name]) for axes, name in zip(dims, "oi", strict=True)) + ")"
    assert parse(written) == dims
    sizes = dict(zip(NAMES, MESH.shape, strict=True))
    shape = tuple(n * math.prod(sizes[a] for a in axes) for n, axes in zip(LOCAL, dims, strict=True))
    whole = np.arange(math.prod(shape)).reshape(shape)
    found, layout = layout_of(written, LOCAL, NAMES, MESH)
    assert found == shape
    for rank in MESH.reshape(-1).tolist():
        held = np.full(LOCAL, -1)
        for (offset, extent), at in layout.pieces(shape, rank):
            here = tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))
            held[here] = whole[tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))]
        assert np.array_equal(held, cut(whole, dims, rank))
        same = [r for r in MESH.reshape(-1).tolist() if np.array_equal(cut(whole, dims, r), held)]
        assert list(layout.holders(shape, rank)) == same


@pytest.mark.parametrize(
    ("written", "error", "said"),
    [
        ("@tp*o, i", Refused, "no expression"),
        ("(@tp*o)", Refused, "1 dimensions, and the tensor 2"),
        ("(@pp*o, i)", Refused, "names the axis pp; the mesh has dp, tp, ep"),
        ("(@tp*o, @tp*i)", Refused, "cuts twice"),
        ("(o*@tp, i)", Unsupported, "'@tp'"),
        ("([q: a|k: b], i)", Unsupported, "not known here"),
        ("(@tp, i)", None, ""),
    ],
)
def test_what_does_not_fit_is_refused_by_name(written: str, error: type[Exception] | None, said: str) -> None:
    if error is None:
        layout_of(written, LOCAL, NAMES, MESH)
        return
    with pytest.raises(error) as caught:
        layout_of(written, LOCAL, NAMES, MESH)
    assert said in str(caught.value)
