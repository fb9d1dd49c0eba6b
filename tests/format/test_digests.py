"""Digests: of bytes in pieces, of states, and of tensors however they are cut."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.format.columns import Strings
from holdfast.format.digest import DIGEST_BYTES, LogicalDigest, Running, digest, element_bits, hex_digest
from holdfast.format.index import content_digest, layout_digest
from holdfast.run.parts import values_bytes

from .plain_reader import canonical


def logical(dtype: str, shape: tuple[int, ...], bits: Any, cuts: list[int] | None = None, seed: int = 0) -> str:
    result = LogicalDigest(dtype, shape)
    edges = sorted({0, len(bits), *(cuts or [])})
    pieces = list(itertools.pairwise(edges))
    random.Random(seed).shuffle(pieces)
    for start, stop in pieces:
        result.add(bits[start:stop], start)
    return result.hex()


@settings(max_examples=80, deadline=None)
@given(
    st.binary(min_size=1, max_size=400),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.lists(st.integers(0, 60), max_size=6),
    st.integers(0, 9),
)
def test_a_logical_digest_does_not_depend_on_cuts_or_order(raw: bytes, size: int, cuts: list[int], seed: int) -> None:
    bits = element_bits(np.frombuffer(raw * size, np.uint8), size)
    inside = [c for c in cuts if c <= len(bits)]
    assert logical("x", (len(bits),), bits, inside, seed) == logical("x", (len(bits),), bits)


def test_a_logical_digest_of_many_elements_is_the_same_in_pieces() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 600_000, dtype=np.uint32)
    assert logical("float32", (600, 1000), bits, [1, 262_143, 262_145, 400_000], 3) == logical("float32", (600, 1000), bits)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=8, max_size=64).filter(lambda b: len(b) % 8 == 0), st.integers(0, 511))
def test_a_logical_digest_sees_every_bit(raw: bytes, bit: int) -> None:
    flipped = bytearray(raw)
    flipped[bit // 8 % len(raw)] ^= 1 << bit % 8
    for size in (1, 2, 4, 8):
        bits, other = (element_bits(np.frombuffer(bytes(b), np.uint8), size) for b in (raw, flipped))
        assert logical("x", (len(bits),), bits) != logical("x", (len(bits),), other)


def test_a_logical_digest_sees_order_shape_and_dtype() -> None:
    bits = np.array([1, 2, 3, 4, 5, 6], np.uint32)
    assert logical("float32", (6,), bits) != logical("float32", (6,), bits[::-1].copy())
    found = {logical(d, s, bits) for d in ("float32", "int32") for s in ((6,), (2, 3), (3, 2), (1, 6))}
    assert len(found) == 8
    wide = np.arange(8, dtype=np.uint64).reshape(4, 2)
    assert logical("complex128", (4,), wide) != logical("complex128", (4,), wide[:, ::-1].copy())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=6))
def test_a_running_digest_is_that_of_all_bytes(pieces: list[bytes]) -> None:
    running = Running()
    for piece in pieces:
        running.update(memoryview(piece))
    whole = b"".join(pieces)
    assert running.hex() == hex_digest(whole) == digest(whole).hex()
    assert len(digest(whole)) == DIGEST_BYTES


# --- content and layout -----------------------------------------------------------------------------------------------


def small() -> dict[str, np.ndarray]:
    columns: dict[str, np.ndarray] = {}
    Strings.of(["a", "b"]).write(columns, "tensor.name")
    Strings.of(["float32"]).write(columns, "dtype.name")
    Strings.of(["steps/x/n0000-00.safetensors"]).write(columns, "file.path")
    columns |= {"tensor.dtype": np.zeros(2, np.uint8), "tensor.shape.offsets": np.arange(3), "tensor.shape": np.array([2, 3])}
    columns |= {
        "tensor.alias": np.array([-1, -1]),
        "tensor.entries": np.arange(3),
        "entry.box": np.array([0, 2, 0, 3]),
        "entry.chunks": np.arange(3),
    }
    columns |= {"chunk.raw_bytes": np.array([8, 12], np.uint32), "chunk.digest": np.arange(32, dtype=np.uint8).reshape(2, 16)}
    return columns | {"chunk.offset": np.array([4096, 4104]), "chunk.file": np.zeros(2, np.uint32)}


def changed(name: str) -> dict[str, np.ndarray]:
    columns = small()
    column = columns[name].copy()
    column.reshape(-1).view(np.uint8)[-1] ^= 1
    return columns | {name: column}


@pytest.mark.parametrize(
    "name",
    [
        "tensor.name.bytes",
        "tensor.dtype",
        "tensor.shape",
        "tensor.alias",
        "tensor.entries",
        "entry.box",
        "entry.chunks",
        "chunk.raw_bytes",
        "chunk.digest",
        "dtype.name.bytes",
    ],
)
def test_a_content_digest_sees_the_state(name: str) -> None:
    assert content_digest(changed(name), b"") != content_digest(small(), b"")


@pytest.mark.parametrize("name", ["chunk.offset", "chunk.file", "file.path.bytes"])
def test_a_content_digest_does_not_see_where_bytes_lie(name: str) -> None:
    assert content_digest(changed(name), b"") == content_digest(small(), b"")


@pytest.mark.parametrize(
    ("name", "is_layout"), [("chunk.offset", True), ("tensor.shape", True), ("chunk.digest", False), ("file.path.bytes", False)]
)
def test_a_layout_digest_sees_layout_columns_only(name: str, is_layout: bool) -> None:
    assert (layout_digest(changed(name)) != layout_digest(small())) == is_layout


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**53) + 1, 2**53 - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(json_values)
def test_values_enter_a_content_digest_as_canonical_json(data: Any) -> None:
    assert values_bytes([data], {}).decode() == f"[[{canonical(data)}],{{}}]"
