"""Values keep type and every bit through their typed JSON; what has no stored form is named with its path."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt, HoldfastError, Unsupported
from holdfast.format import values


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    a: int
    b: int


class Opaque:
    pass


def through_json(value: Any, path: str = "extras.x") -> Any:
    """`value` stored and read again, through text and back."""
    return values.decode(json.loads(json.dumps(values.encode(value, path), allow_nan=False)), path)


def same(a: Any, b: Any) -> bool:
    """Equal in type and in every bit, in depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


any_float = st.one_of(
    st.floats(allow_nan=True),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308]),
)
any_int = st.one_of(
    st.integers(), st.integers(-(2**2048), 2**2048), st.sampled_from([2**53, -(2**53), 2**53 - 1, 2**63, -(2**64)])
)
any_text = st.one_of(st.text(), st.text(st.sampled_from("a\ud800\udfff\udcff\x00$@%é🪸")), st.just("$int")).filter(
    lambda text: not re.search("[\ud800-\udbff][\udc00-\udfff]", text)
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    any_int,
    any_float,
    any_text,
    st.binary(max_size=40),
    st.binary(max_size=9).map(bytearray),
    st.complex_numbers(allow_nan=True),
    st.sampled_from([*Color, *Level]),
    st.datetimes(timezones=st.sampled_from([None, datetime.timezone.utc, datetime.timezone(datetime.timedelta(hours=-3))])),
    st.dates(),
    st.timedeltas(),
    any_float.map(np.float64),
    st.floats(width=32, allow_nan=True).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 9)),
)
keys = st.one_of(st.none(), st.booleans(), any_int, any_text, st.binary(max_size=9), st.sampled_from([*Color]))
nested = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(any_text, inner, max_size=4).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(lambda v: collections.deque(v, 7)),
        st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(keys, st.integers(0, 9), max_size=3).map(collections.Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(nested)
def test_every_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    assert same(through_json(value), value)


@settings(max_examples=100, deadline=None)
@given(nested)
def test_a_value_in_a_record_comes_back_too(value: Any) -> None:
    """Records are written by another JSON library than Python's."""
    import msgspec

    assert same(values.decode(msgspec.json.decode(msgspec.json.encode(values.encode(value, "x")))), value)


@settings(max_examples=200, deadline=None)
@given(any_float)
def test_a_float_keeps_its_bits(number: float) -> None:
    assert struct.pack("<d", through_json(number)) == struct.pack("<d", number)


def test_nan_keeps_its_payload() -> None:
    for bits in (0x7FF0000000000001, 0x7FF8DEADBEEF0001, 0xFFF8000000000000, 0x7FF8000000000000):
        number = struct.unpack("<d", struct.pack("<Q", bits))[0]
        assert struct.unpack("<Q", struct.pack("<d", through_json(number)))[0] == bits


def test_one_int_and_true_and_one_point_zero_stay_apart() -> None:
    assert [type(v) for v in through_json([1, True, 1.0, np.int64(1), Level.LOW])] == [int, bool, float, np.int64, Level]


@pytest.mark.parametrize("key", ["$int", "$node", "$", "$x"])
def test_a_key_with_a_dollar_is_no_tag(key: str) -> None:
    assert through_json({key: 1}) == {key: 1}
    assert through_json({key: {key: [1]}}) == {key: {key: [1]}}


@pytest.mark.parametrize(
    "value", [np.str_("é"), np.bytes_(b"\x00a"), np.datetime64("NaT"), np.timedelta64(3, "s"), np.float16(-0.0)]
)
def test_numpy_scalars_keep_their_dtype(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize("value", [np.str_(""), np.bytes_(b"")], ids=["str", "bytes"])
def test_an_empty_numpy_string_is_loadable(value: Any) -> None:
    assert same(through_json(value), value)


def store_or_refuse(value: Any) -> Any:
    """What comes back, or None where the save was refused with the path: never a value that cannot be loaded."""
    try:
        stored = values.encode(value, "extras.deep.thing")
    except HoldfastError as error:
        assert "extras.deep.thing" in str(error)
        return None
    return values.decode(json.loads(json.dumps(stored)), "extras.deep.thing")


@pytest.mark.parametrize("value", [Access.READ | Access.WRITE, Access(0), re.IGNORECASE | re.MULTILINE], ids=str)
def test_a_combination_of_flags_is_stored_or_refused(value: enum.Flag) -> None:
    assert store_or_refuse(value) in (value, None)


def test_a_numpy_record_is_stored_or_refused() -> None:
    value = np.array((1, 2.0), dtype=[("a", "<i4"), ("b", "<f8")])[()]
    found = store_or_refuse(value)
    assert found is None or same(found, value)


def test_an_integer_of_ten_thousand_digits_is_stored_or_refused() -> None:
    value = 10**10_000 + 7
    assert store_or_refuse(value) in (value, None)


def test_a_pair_of_surrogates_is_stored_or_refused() -> None:
    """Two code points in Python, one character in UTF-16: they must not become that character."""
    assert store_or_refuse("\ud800\udc00") in ("\ud800\udc00", None)
    assert store_or_refuse({"\ud800\udc00": 1, "\U00010000": 2}) in ({"\ud800\udc00": 1, "\U00010000": 2}, None)


def test_a_path_that_is_not_unicode_is_stored_or_refused() -> None:
    value = pathlib.PurePosixPath(os.fsdecode(b"/data/\xff"))
    try:
        json.dumps(values.encode(value, "extras.path"), ensure_ascii=False).encode()
    except HoldfastError as error:
        assert "extras.path" in str(error)


def test_a_windows_path_is_stored_or_refused() -> None:
    found = store_or_refuse(pathlib.PureWindowsPath("a\\b"))
    assert found is None or found.parts == ("a", "b")


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(HoldfastError, match=r"extras\.deep"):
        values.encode(value, "extras.deep")


# --- what has no stored form ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Opaque(), Opaque, lambda: 0, Pair(1, 2), object(), iter([]), json, 3j.__class__], ids=repr)
def test_an_unknown_type_is_refused_with_its_path_and_the_way_out(value: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        values.encode({"a": [1, {"b": (0, value)}]}, "progress")
    assert "progress.a.1.b.1" in str(caught.value)
    assert type(value).__qualname__ in str(caught.value)
    assert "holdfast.register(" in str(caught.value)


def test_a_defaultdict_of_an_unknown_factory_is_refused_with_its_path() -> None:
    with pytest.raises(Unsupported, match=r"extras\.d is a defaultdict"):
        values.encode(collections.defaultdict(lambda: 7), "extras.d")


def test_a_registered_type_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_encoders", dict(values._encoders))
    monkeypatch.setattr(values, "_decoders", dict(values._decoders))
    values.register(Pair, "tests.Pair", list, lambda body: Pair(*body))
    assert same(through_json({"p": [Pair(1, 2)]}), {"p": [Pair(1, 2)]})


def test_a_type_that_is_not_registered_here_is_named() -> None:
    with pytest.raises(Unsupported, match=r"extras\.p.*elsewhere\.Type"):
        values.decode({"$ext": ["elsewhere.Type", 1]}, "extras.p")


def test_an_enum_that_is_not_loaded_here_is_named_and_nothing_is_imported() -> None:
    with pytest.raises(Unsupported, match=r"extras\.e.*antigravity:Thing"):
        values.decode({"$enum": ["antigravity:Thing", "UP"]}, "extras.e")
    assert "antigravity" not in __import__("sys").modules


@pytest.mark.parametrize("where", ["os:system", "builtins:eval", "collections:Counter", "holdfast.format.values:register"])
def test_what_is_no_enum_is_not_called(where: str) -> None:
    with pytest.raises(HoldfastError, match=r"extras\.e"):
        values.decode({"$enum": [where, "x"]}, "extras.e")


DAMAGED = [
    {"$int": "x"},
    {"$int": None},
    {"$float": "zz"},
    {"$float": "00"},
    {"$utf16": "A"},
    {"$tuple": 5},
    {"$set": [[1]]},
    {"$dict": [[1]]},
    {"$dict": [[[1], 2]]},
    {"$odict": {"a": 1}},
    {"$counter": 3},
    {"$defaultdict": ["os", []]},
    {"$deque": [[1], "x"]},
    {"$bytes": 5},
    {"$complex": [1]},
    {"$range": [1, 2, 0]},
    {"$range": [1, 2, 3, 4]},
    {"$slice": 1},
    {"$datetime": "x"},
    {"$date": 1},
    {"$timedelta": ["x"]},
    {"$path": 5},
    {"$numpy": ["<f8", "AA=="]},
    {"$numpy": ["O", ""]},
    {"$numpy": ["nonsense", ""]},
    {"$enum": "x"},
    {"$ext": 1},
    {"$ext": [1]},
    {"$unknown": 1},
    {"$": 1},
    {"$timedelta": [10**12, 0, 0]},
    {"$int": "9" * 5000},
]


@pytest.mark.parametrize("data", DAMAGED, ids=lambda d: json.dumps(d)[:40])
def test_damaged_typed_json_is_refused_with_its_path(data: Any) -> None:
    for wrapped, path in (
        (data, "extras.v"),
        ({"k": data}, "extras.v.k"),
        ([data], "extras.v"),
        ({"$tuple": [data]}, "extras.v"),
    ):
        with pytest.raises((Corrupt, Unsupported)) as caught:
            values.decode(wrapped, "extras.v")
        assert path in str(caught.value)
