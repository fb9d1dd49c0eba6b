"""Columns and string tables: what is packed is unpacked as views; what does not fit together is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt, HoldfastError
from holdfast.format.columns import Columns, Strings, pack, unpack

KINDS = ["|u1", "<u2", "<u4", "<i2", "<i4", "<i8"]


def packed(columns: Columns, metadata: dict[str, str] | None = None) -> bytes:
    return b"".join(pack(columns, metadata or {}))


def raw_file(entries: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    table, at = {}, 0
    for name, (tag, shape, data) in entries.items():
        table[name] = {"dtype": tag, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in entries.values())


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9),
        st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 5), min_size=1, max_size=2)),
        max_size=6,
    )
)
def test_columns_come_back(shapes: dict[str, tuple[str, list[int]]]) -> None:
    columns = {n: np.arange(int(np.prod(s)), dtype=kind).reshape(s) for n, (kind, s) in shapes.items() if n != "__metadata__"}
    found, metadata = unpack(packed(columns, {"a": "b"}), "x")
    assert metadata == {"a": "b"}
    assert set(found) == set(columns)
    for name, column in columns.items():
        assert found[name].dtype == column.dtype
        assert np.array_equal(found[name], column)


def test_columns_are_views_that_cannot_be_written() -> None:
    data = packed({"a": np.arange(1000)})
    column = unpack(data, "x")[0]["a"]
    assert not column.flags.writeable
    assert np.shares_memory(column, np.frombuffer(data, np.uint8))


def test_columns_lie_by_item_size_and_name() -> None:
    data = packed(
        {"b": np.zeros(1, np.uint8), "c": np.zeros(1, np.int64), "a": np.zeros(1, np.uint8), "d": np.zeros(1, np.uint32)}
    )
    assert [n for n in json.loads(data[8:4096]) if n != "__metadata__"] == ["c", "d", "a", "b"]


def test_a_file_cut_anywhere_is_refused() -> None:
    data = packed({"a": np.arange(4), "b": np.arange(3, dtype=np.uint8)})
    for length in [*range(9), 100, 4095, 4096, 4097, len(data) - 1]:
        with pytest.raises(Corrupt, match="steps/x/index"):
            unpack(data[:length], "steps/x/index")


@pytest.mark.parametrize("tag", ["F32", "BF16", "U64", "BOOL", "F64"])
def test_a_dtype_that_columns_do_not_have_is_refused(tag: str) -> None:
    with pytest.raises(Corrupt, match=r"a of steps/x/index"):
        unpack(raw_file({"a": (tag, [0], b"")}), "steps/x/index")


@pytest.mark.parametrize(
    "shape", [[0, 2**70], [2**62, 0, 2**62], [1] * 100 + [0], [0] * 70], ids=["wide", "product", "many", "zeros"]
)
def test_a_shape_that_no_array_can_have_is_refused(shape: list[int]) -> None:
    with pytest.raises(HoldfastError, match="steps/x/index"):
        unpack(raw_file({"a": ("U8", shape, b"")}), "steps/x/index")


# --- string tables ----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=12), max_size=20))
def test_strings_come_back(texts: list[str]) -> None:
    columns: Columns = {}
    Strings.of(texts).write(columns, "t")
    table = Strings.read(unpack(packed(columns), "x")[0], "t")
    assert list(table) == texts
    assert len(table) == len(texts)
    assert table[1:3] == texts[1:3]


@settings(max_examples=100, deadline=None)
@given(st.sets(st.text(max_size=6), max_size=20), st.text(max_size=6))
def test_a_string_is_found_in_a_sorted_table(texts: set[str], other: str) -> None:
    ordered = sorted(texts, key=str.encode)
    table = Strings.of(ordered)
    for row, text in enumerate(ordered):
        assert table.find(text) == row
    assert (table.find(other) >= 0) == (other in texts)


BROKEN = {
    "decreasing": [0, 3, 2, 5],
    "beyond the end": [0, 3, 9, 12],
    "negative": [0, -1, 2, 5],
    "huge": [0, 2**62, 2**62, 2**62],
    "all beyond": [7, 8, 9, 10],
    "wrapping": [0, -(2**63), 2**63 - 1, 5],
}


@pytest.mark.parametrize("offsets", BROKEN.values(), ids=BROKEN.keys())
def test_offsets_that_leave_the_bytes_are_refused(offsets: list[int]) -> None:
    table = Strings(np.array(offsets, np.int64), np.frombuffer(b"abcde", np.uint8))
    with pytest.raises(Corrupt, match="row"):
        list(table)


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(Corrupt, match="row 0"):
        list(Strings(np.array([0, 2]), np.frombuffer(b"\xff\xfe", np.uint8)))


@pytest.mark.parametrize(
    ("offsets", "data"),
    [
        (np.zeros((2, 2), np.int64), np.zeros(4, np.uint8)),
        (np.zeros(0, np.int64), np.zeros(4, np.uint8)),
        (np.array(5), np.zeros(4, np.uint8)),
        (np.array([0, 1]), np.array(7, np.uint8)),
        (np.array([0, 2]), np.zeros((2, 2), np.uint8)),
        (np.array([0, 1]), np.arange(4)),
    ],
    ids=["2-d", "empty", "scalar", "scalar bytes", "2-d bytes", "wide bytes"],
)
def test_a_table_of_the_wrong_form_is_refused(offsets: Any, data: Any) -> None:
    def use() -> None:
        table = Strings.read({"t.offsets": offsets, "t.bytes": data}, "t")
        list(table)
        table.find("a")

    with pytest.raises(HoldfastError):
        use()
