"""Codecs give back what they were given, no more than was promised, and refuse what they do not know; names and paths."""

from __future__ import annotations

import contextlib
import os
import re
import tracemalloc
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt, HoldfastError, Unsupported
from holdfast.format.codec import RAW, ZSTD, Codec, decode, encode
from holdfast.format.names import dotted, escape, owner_of, parse_step_dir, safe_path, step_dir


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=2000), st.sampled_from([RAW, ZSTD]))
def test_a_codec_gives_back_the_bytes(raw: bytes, codec: Codec) -> None:
    assert bytes(decode(codec, encode(codec, raw), len(raw))) == raw


@pytest.mark.parametrize("name", ["planes", "xor", "derived", "lz4", "", "RAW"])
def test_an_unknown_codec_is_named(name: str) -> None:
    for work in (lambda: encode(Codec(name), b"x"), lambda: decode(Codec(name), b"x", 1)):
        with pytest.raises(Unsupported, match=rf"codec {name} version 1.*upgrade"):
            work()


def test_a_later_version_of_a_codec_is_refused() -> None:
    with pytest.raises(Unsupported, match="zstd version 2"):
        decode(Codec("zstd", 2), b"", 0)


@pytest.mark.parametrize("wrong", [-1, 1, 10**6])
def test_bytes_of_another_length_are_refused(wrong: int) -> None:
    raw = b"holdfast" * 50
    for codec in (RAW, ZSTD):
        with pytest.raises(Corrupt):
            decode(codec, encode(codec, raw), len(raw) + wrong)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_frame_is_refused_or_gives_as_many_bytes(at: int, flip: int) -> None:
    raw = bytes(range(256)) * 8
    stored = bytearray(encode(ZSTD, raw))
    stored[at % len(stored)] ^= flip
    with contextlib.suppress(HoldfastError):
        assert len(decode(ZSTD, bytes(stored), len(raw))) == len(raw)


@pytest.mark.parametrize("cut", [0, 1, 4, 12, -1])
def test_a_cut_frame_is_refused(cut: int) -> None:
    stored = encode(ZSTD, b"holdfast" * 50)
    with pytest.raises(Corrupt):
        decode(ZSTD, stored[:cut], 400)


def test_a_frame_that_grows_beyond_its_promise_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt):
            decode(ZSTD, bomb, 1000)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [2**40, 2**60, 2**63, 2**64 - 3])
def test_a_frame_that_claims_to_be_huge_is_refused(claimed: int) -> None:
    """The header of a frame may say how long its content is; here it lies."""
    frame = bytes.fromhex("28b52ffd") + bytes([0xE0]) + claimed.to_bytes(8, "little") + bytes.fromhex("010000")
    with pytest.raises(Corrupt):
        decode(ZSTD, frame, 1000)


# --- names ------------------------------------------------------------------------------------------------------------


def unescape(text: str) -> str:
    return re.sub("%([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), text)


@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("%@\x00\x1f\x7f._m"))))
def test_an_escaped_name_has_no_at_sign_or_control_character_and_comes_back(text: str) -> None:
    escaped = escape(text)
    assert not re.search("[@\x00-\x1f\x7f]", escaped)
    assert escaped != "__metadata__"
    assert unescape(escaped) == text


@given(
    st.lists(
        st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.none(), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_a_dotted_name_can_stand_in_a_header(path: list[Any]) -> None:
    name = dotted(path)
    assert "@" not in name
    name.encode()


def test_names_of_odd_keys() -> None:
    assert dotted(["m", "a.b", 0, None, True, 1.5]) == "m.a.b.0.null.true.1.5"
    assert dotted(["m", {"$bytes": "QA=="}]) == 'm.{"$bytes":"QA=="}'
    assert dotted(["__metadata__"]) == "%5F_metadata__"
    assert dotted(["a@1+2", "%40"]) == "a%401+2.%2540"


def test_a_lone_surrogate_in_a_name_is_refused() -> None:
    with pytest.raises(Unsupported, match="rename"):
        dotted(["m", "\ud800"])


@given(st.integers(0, 10**18 - 1), st.integers(1, 10**9 - 1), st.integers(0, 3))
def test_a_step_directory_can_be_taken_apart(step: int, attempt: int, partial: int) -> None:
    path = step_dir(step, attempt, partial)
    assert parse_step_dir(path.removeprefix("steps/")) == (step, attempt, partial)
    owner = owner_of(f"{path}/n0000-00.safetensors")
    assert (owner.step, owner.attempt) == (step, attempt)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1-a1",
        "0000000001",
        "0000000001-a001",
        "0000000001-a0001-",
        "0000000001-a0001-px",
        "x0000000001-a0001",
        "0000000001-a0001 ",
        "0000000001-a0001\n",
        "-000000001-a0001",
        "٠٠٠٠٠٠٠٠٠١-a٠٠٠١",
    ],
)
def test_other_names_are_no_step_directories(name: str) -> None:
    assert parse_step_dir(name) is None


@pytest.mark.parametrize("path", ["a", "steps/x/y", "a b", "é", "..a", "a..", ".hidden"])
def test_a_path_inside_the_run_is_safe(path: str) -> None:
    assert safe_path(path, "x") == path


@pytest.mark.parametrize(
    "path", ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "a\\b", "a\x00b", "a\nb", os.sep * 2]
)
def test_a_path_out_of_the_run_is_refused(path: str) -> None:
    with pytest.raises(Corrupt, match="steps/x/index"):
        safe_path(path, "steps/x/index")
