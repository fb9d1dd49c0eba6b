"""Data file headers: valid safetensors, padded to blocks, and refused where they claim what cannot be."""

from __future__ import annotations

import json
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt
from holdfast.format.datafile import BLOCK, Entry, build_header, entry_key, header_bound, header_length, parse_header

METADATA = {"format": "pt", "holdfast": "1"}
ITEM = {"F64": 8, "F32": 4, "BF16": 2, "U8": 1, "BOOL": 1, "C64": 8}


def file_of(table: Any, body: int = 0, length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(body)


def parse(data: bytes) -> tuple[list[Entry], dict[str, str]]:
    length = header_length(data[:8], len(data), "dir/file")
    return parse_header(data[:length], len(data), "dir/file")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=30).filter(lambda t: t != "__metadata__"),
        st.tuples(st.sampled_from([*ITEM]), st.lists(st.integers(0, 2**20), max_size=4)),
        max_size=8,
    )
)
def test_a_header_comes_back_and_fits_its_bound(members: dict[str, tuple[str, list[int]]]) -> None:
    entries, at = [], 0
    for key, (tag, shape) in members.items():
        size = int(np.prod(shape, dtype=object)) * ITEM[tag]
        entries.append(Entry(key, tag, tuple(shape), at, at + size))
        at += size
    bound = header_bound([e.key for e in entries], [len(e.shape) for e in entries], METADATA)
    head = build_header(entries, METADATA, bound)
    assert len(head) == bound
    assert bound % BLOCK == 0
    assert header_length(head[:8], bound + at, "x") == bound
    found, metadata = parse_header(head, bound + at, "x")
    assert sorted(found, key=lambda e: e.key) == sorted(entries, key=lambda e: e.key)
    assert metadata == METADATA


def test_the_bound_holds_for_the_largest_offsets() -> None:
    entries = [Entry("a", "U8", (2**62,), 0, 2**62), Entry("b\x01é", "U8", (2**62,), 2**62, 2**63)]
    bound = header_bound(["a", "b\x01é"], [1, 1], {})
    assert len(build_header(entries, {}, bound)) == bound


def test_the_official_reader_takes_it(tmp_path: Any) -> None:
    from safetensors.numpy import load_file

    entries = [Entry("a", "F32", (2,), 0, 8), Entry("b@1+2", "U8", (2,), 8, 10), Entry("empty", "F32", (0, 3), 10, 10)]
    head = build_header(entries, METADATA, header_bound(["a", "b@1+2", "empty"], [1, 1, 2], METADATA))
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + np.array([1, 2], "<f4").tobytes() + b"\x07\x08")
    found = load_file(path)
    assert found["a"].tolist() == [1, 2]
    assert found["b@1+2"].tolist() == [7, 8]
    assert found["empty"].shape == (0, 3)


def test_a_whole_tensor_has_its_name_alone_and_a_box_its_place() -> None:
    assert entry_key("a.b", (0, 0), (4, 8), (4, 8)) == "a.b"
    assert entry_key("a.b", (2, 0), (2, 8), (4, 8)) == "a.b@2,0+2,8"
    assert entry_key("s", (), (), ()) == "s"


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 10**8 + 1, 100])
def test_a_header_longer_than_its_file_is_refused_unread(length: int) -> None:
    with pytest.raises(Corrupt, match="dir/file"):
        parse(file_of({}, length=length))


@pytest.mark.parametrize("size", range(8))
def test_a_file_of_less_than_eight_bytes_is_refused(size: int) -> None:
    with pytest.raises(Corrupt, match=r"dir/file.*truncated"):
        parse(bytes(size))


U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
BAD = {
    "not JSON": b"{",
    "not an object": b"[]",
    "a number": b"5",
    "nothing": b"",
    "not UTF-8": b'{"\xff": 1}',
    "deep": b"[" * 200_000,
    "a name twice": b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]}, "a": null}',
    "metadata twice": b'{"__metadata__": {}, "__metadata__": {}}',
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
    "a hole": {"a": U8, "b": {**U8, "data_offsets": [5, 9]}},
    "an overlap": {"a": U8, "b": {**U8, "data_offsets": [3, 7]}},
    "twice the same bytes": {"a": U8, "b": U8},
    "not from zero": {"a": {**U8, "data_offsets": [1, 5]}},
    "backwards": {"a": {**U8, "data_offsets": [4, 0]}},
    "negative": {"a": {**U8, "data_offsets": [-4, 0]}},
    "huge": {"a": {**U8, "shape": [2**63], "data_offsets": [0, 2**63]}},
    "wrong size": {"a": {**U8, "shape": [5]}},
    "a negative shape": {"a": {**U8, "shape": [-2, -2]}},
    "a shape of floats": {"a": {**U8, "shape": [4.0]}},
    "a shape of truth": {"a": {**U8, "shape": [True, 4]}},
    "no shape": {"a": {"dtype": "U8", "data_offsets": [0, 4]}},
    "an unknown dtype": {"a": {**U8, "dtype": "Q7"}},
    "a dtype that is a list": {"a": {**U8, "dtype": ["U8"]}},
    "an entry that is a list": {"a": [1]},
    "three offsets": {"a": {**U8, "data_offsets": [0, 4, 4]}},
    "offsets of floats": {"a": {**U8, "data_offsets": [0.0, 4.0]}},
    "an entry that is null": {"a": None},
    "bytes left over": {},
    "metadata that is a list": {"__metadata__": [1], "a": U8},
    "metadata of numbers": {"__metadata__": {"holdfast": 1}, "a": U8},
}


@pytest.mark.parametrize("table", BAD.values(), ids=BAD.keys())
def test_a_header_that_breaks_a_rule_is_refused(table: Any) -> None:
    with pytest.raises(Corrupt, match="dir/file"):
        parse(file_of(table, 4))


def test_a_header_of_many_huge_dimensions_is_refused_at_once() -> None:
    data = file_of({"a": {**U8, "shape": [2**62] * 50_000}}, 4)
    start = time.monotonic()
    with pytest.raises(Corrupt, match="dir/file"):
        parse(data)
    assert time.monotonic() - start < 2, "the time grows with the square of the header's length"


def test_a_header_that_does_not_fit_its_reserve_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="reserve"):
        build_header([Entry("a" * 5000, "U8", (0,), 0, 0)], {}, BLOCK)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_are_a_header_or_refused(data: bytes, extra: int) -> None:
    for blob in (data, struct.pack("<Q", len(data)) + data + bytes(extra)):
        try:
            parse(blob)
        except Corrupt as error:
            assert "dir/file" in str(error)
