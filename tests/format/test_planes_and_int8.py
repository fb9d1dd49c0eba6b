"""Planes give back every bit and refuse what is damaged; int8 keeps its bound, and what it cannot hold it does not take."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt, HoldfastError, Unsupported
from holdfast.format import int8, planes
from holdfast.format.codec import RAW, ZSTD, Codec, decode, encode, known
from holdfast.format.codec import int8 as int8_codec
from holdfast.format.codec import planes as planes_codec

ITEMS = sorted(planes.WIDTHS)
FLOATS = ["float32", "bfloat16", "float16"]


def trained(count: int, seed: int = 0) -> np.ndarray:
    """Numbers like those of a trained tensor: of many magnitudes, with noise in every bit of the mantissa."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(count) * np.exp(random.standard_normal(count))).astype(np.float32)


def bytes_of(numbers: np.ndarray, dtype: str) -> bytes:
    return torch.from_numpy(numbers).to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


def numbers_of(raw: bytes, dtype: str) -> np.ndarray:
    return torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).to(torch.float64).numpy()


# --- planes -----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=5000), st.sampled_from(ITEMS), st.integers(1, 30))
def test_planes_give_back_any_bytes(raw: bytes, item: int, again: int) -> None:
    raw = raw * again
    stored = encode(planes_codec(item), raw)
    assert bytes(decode(planes_codec(item), stored, len(raw))) == raw
    assert len(stored) <= planes.bound(len(raw), item)


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("items", [0, 1, 2, 4095, 4096, 4097, 40_000, 1 << 20])
def test_planes_give_back_every_size(item: int, items: int) -> None:
    for rest in range(item):
        raw = np.random.default_rng(items).integers(0, 3, items * item + rest, np.uint8)
        assert bytes(decode(planes_codec(item), encode(planes_codec(item), raw), len(raw))) == raw.tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_trained_numbers_with_nan_payloads_come_back_bit_by_bit_and_shorter(dtype: str) -> None:
    raw = bytearray(bytes_of(trained(300_000), dtype))
    item = len(raw) // 300_000
    for number, payload in enumerate((b"\xff" * item, b"\x01" + b"\xff" * (item - 1), bytes(item - 1) + b"\x80")):
        raw[number * 7 * item : (number * 7 + 1) * item] = payload
    stored = encode(planes_codec(item), bytes(raw))
    assert bytes(decode(planes_codec(item), stored, len(raw))) == bytes(raw)
    assert len(stored) < {"float64": 0.93, "float32": 0.88, "bfloat16": 0.8, "float16": 0.93}[dtype] * len(raw)


def test_planes_use_the_memory_they_are_given() -> None:
    raw, out = bytes_of(trained(10_000), "float32"), np.zeros(50_000, np.uint8)
    stored = encode(planes_codec(4), raw, out)
    assert np.shares_memory(stored, out)
    assert bytes(decode(planes_codec(4), stored, len(raw))) == raw


def test_numbers_that_were_widened_cost_what_they_did_before() -> None:
    narrow = torch.from_numpy(trained(200_000)).to(torch.bfloat16)
    wide = encode(planes_codec(4), narrow.float().view(torch.uint8).numpy())
    assert len(wide) < 1.02 * len(encode(planes_codec(2), narrow.view(torch.uint8).numpy()))


def test_noise_is_not_made_longer_than_its_lengths() -> None:
    raw = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    for item in ITEMS:
        assert len(encode(planes_codec(item), raw)) == len(raw) + 4 * len(planes.WIDTHS[item])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255), st.sampled_from(ITEMS))
def test_damaged_planes_are_refused_or_give_as_many_bytes(at: int, flip: int, item: int) -> None:
    raw = bytes(range(256)) * 16
    stored = bytearray(encode(planes_codec(item), raw))
    stored[at % len(stored)] ^= flip
    with contextlib.suppress(HoldfastError):
        assert len(decode(planes_codec(item), bytes(stored), len(raw))) == len(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 200), st.sampled_from(ITEMS))
def test_any_bytes_are_refused_or_give_as_many_as_promised(stored: bytes, raw_bytes: int, item: int) -> None:
    with contextlib.suppress(Corrupt):
        assert len(decode(planes_codec(item), stored, raw_bytes)) == raw_bytes


@pytest.mark.parametrize("item", ITEMS)
def test_cut_or_lengthened_planes_are_refused(item: int) -> None:
    raw = bytes_of(trained(5000), "float32")
    stored = bytes(encode(planes_codec(item), raw))
    for wrong in (stored[:0], stored[:3], stored[: 4 * len(planes.WIDTHS[item])], stored[:-1], stored + b"\0"):
        with pytest.raises(Corrupt):
            decode(planes_codec(item), wrong, len(raw))
    for size in (0, len(raw) - 1, len(raw) + 1, 10**6):
        with pytest.raises(Corrupt):
            decode(planes_codec(item), stored, size)


def test_a_plane_that_grows_beyond_its_promise_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    stored = struct.pack("<2I", len(bomb), 50_000) + bomb + bytes(50_000)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode(planes_codec(2), stored, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


# --- int8 -------------------------------------------------------------------------------------------------------------


def half_step(value: np.ndarray, dtype: str) -> np.ndarray:
    """The most that rounding to the dtype takes from numbers of this magnitude."""
    bits, smallest = {"float32": (24, 2.0**-149), "bfloat16": (8, 2.0**-133), "float16": (11, 2.0**-24)}[dtype]
    return np.maximum(np.abs(value) * 2.0**-bits, smallest)


def assert_within_the_bound(raw: bytes, dtype: str) -> None:
    stored = int8.encode(raw, dtype)
    assert stored is not None
    assert len(stored) == int8.stored_bytes(len(raw), dtype)
    before, after = numbers_of(raw, dtype), numbers_of(int8.decode(stored, len(raw), dtype).tobytes(), dtype)
    largest = np.array([np.abs(before[i : i + int8.BLOCK]).max() for i in range(0, len(before), int8.BLOCK)])
    largest = np.repeat(largest, int8.BLOCK)[: len(before)]
    # three roundings in float32: of the share, of what the code stands for, and of their product
    bound = largest * (int8.ERROR + 3 * 2.0**-24) + half_step(before, dtype) + half_step(after, dtype)
    assert (np.abs(after - before) <= bound).all()
    assert (np.sign(after) * np.sign(before) >= 0).all()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=16), min_size=1, max_size=600),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.sampled_from([1.0, 1e-6, 1e-38]),
)
def test_int8_keeps_its_bound(numbers: list[float], dtype: str, is_second_moment: bool, scale: float) -> None:
    values = np.array(numbers, np.float32) * (scale if dtype != "float16" else 1)
    assert_within_the_bound(bytes_of(np.square(values / 300) if is_second_moment else values, dtype), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 100_001])
def test_int8_keeps_its_bound_on_moments(dtype: str, count: int) -> None:
    gradient = trained(count) * np.exp(3 * trained(count, seed=1).clip(-2, 1))
    assert_within_the_bound(bytes_of(gradient, dtype), dtype)
    assert_within_the_bound(bytes_of(np.square(gradient.clip(-100, 100)), dtype), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_second_moment_becomes_zero_but_zero(dtype: str) -> None:
    raw = bytes_of(np.array([0.0, 1e-20, 1e-12, 1e-3, 1.0] * 60, np.float32), dtype)
    stored = int8.encode(raw, dtype)
    after = numbers_of(int8.decode(stored, len(raw), dtype).tobytes(), dtype)
    assert ((after == 0) == (numbers_of(raw, dtype) == 0)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_int8_form(dtype: str, bad: float) -> None:
    numbers = trained(1000)
    numbers[777] = bad
    assert encode(int8_codec(dtype), bytes_of(numbers, dtype)) is None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255), st.sampled_from(FLOATS))
def test_damaged_int8_is_refused_or_gives_as_many_bytes(at: int, flip: int, dtype: str) -> None:
    raw = bytes_of(trained(700), dtype)
    stored = bytearray(int8.encode(raw, dtype))
    stored[at % len(stored)] ^= flip
    with contextlib.suppress(Corrupt):
        assert len(decode(int8_codec(dtype), bytes(stored), len(raw))) == len(raw)


@pytest.mark.parametrize("wrong", [-4, -1, 1, 4, 10**6])
def test_int8_of_another_length_is_refused(wrong: int) -> None:
    raw = bytes_of(trained(700), "float32")
    stored = bytes(int8.encode(raw, "float32"))
    with pytest.raises(Corrupt):
        decode(int8_codec("float32"), stored, len(raw) + wrong)
    with pytest.raises(Corrupt):
        decode(int8_codec("float32"), stored[:wrong] if wrong < 0 else stored + bytes(wrong), len(raw))


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [RAW, ZSTD, *map(planes_codec, ITEMS), *map(int8_codec, FLOATS)], ids=str)
def test_what_this_version_writes_it_knows(codec: Codec) -> None:
    known(codec)
    assert codec.is_lossy == (codec.name == "int8")


@pytest.mark.parametrize(
    "codec",
    [Codec("planes"), Codec("planes", 2, "4"), Codec("planes", 1, "3"), Codec("int8", 1, '"float64"'), Codec("raw", 1, "4")],
)
def test_other_parameters_are_named(codec: Codec) -> None:
    for work in (lambda: known(codec), lambda: decode(codec, b"", 0), lambda: encode(codec, b"")):
        with pytest.raises(Unsupported, match=f"codec {codec.name} version.*upgrade"):
            work()
