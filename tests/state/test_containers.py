"""Containers: any nesting of dicts, lists and tuples of tensors, arrays and plain values comes back as it was."""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast

EqualStates = Callable[[Any, Any], bool]


class Phase(enum.Enum):
    WARM_UP = "warm up"
    DECAY = "decay"


class Level(enum.IntEnum):
    LOW = 1


VALUES: dict[str, Any] = {
    "none": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**53 + 1, -(2**63), 2**100],
    "floats": [0.1 + 0.2, -0.0, math.inf, -math.inf, 5e-324],
    "complex": 1 - 2j,
    "text": "naïve 🪸\n\x00\ud800",
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3, ()])),
    "list": [[], {}, [None]],
    "empty dict": {},
    "empty ordered": OrderedDict(),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "set": {1, "a"},
    "frozen set": frozenset({2}),
    "deque": deque([1, 2], maxlen=3),
    "range": range(1, 9, 2),
    "slice": slice(1, None, 2),
    "enum": Phase.DECAY,
    "integer enum": Level.LOW,
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cpu"),
    "moment": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
    "duration": datetime.timedelta(days=1, microseconds=3),
    "path": pathlib.PurePosixPath("a/b"),
    "numpy scalar": np.float32(0.1),
    "numpy integer": np.int64(-3),
    "numpy boolean": np.bool_(True),
    "integer keys": {0: "a", 7: {1: "b"}},
    "other keys": {None: 1, True: 2, 0.5: 3, (1, "a"): 4, b"k": 5, Phase.DECAY: 6},
    "keys like ours": {"$int": "5", "$dict": []},
    "strange keys": {"a.b": 1, "": 2, "x@y%z": 3, "__metadata__": 4, "naïve": 5, "new\nline": 6},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_comes_back_as_it_was(tmp_path: Path, value: Any, equal_states: EqualStates) -> None:
    live = {"value": "another"} if not isinstance(value, dict) or not value else {"value": value}
    holdfast.save(tmp_path, {"part": {"value": value}}, 1)
    holdfast.restore(tmp_path, {"part": live})
    loaded = holdfast.load(tmp_path)["part"]
    assert equal_states(loaded, {"value": value})
    assert equal_states(live, {"value": value})
    assert type(loaded["value"]) is type(value)


def test_nan_comes_back_with_its_payload(tmp_path: Path, equal_states: EqualStates) -> None:
    import struct

    odd = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_DEAD_BEEF))[0]
    holdfast.save(tmp_path, {"part": {"value": odd}}, 1)
    assert equal_states(holdfast.load(tmp_path)["part"], {"value": odd})


def tensors(start: int) -> dict[str, Any]:
    """A tree with tensors and arrays in every kind of container; another `start` gives other numbers of the same structure."""
    t = torch.arange(start, start + 6.0)
    return {
        "list": [t, [t + 1, {"deep": t + 2}], 5 + start],
        "tuple": (t + 3, t + 4),
        "ordered": OrderedDict(z=t + 5, a=t + 6),
        "integer keys": {0: t + 7, 10: t + 8},
        "array": np.arange(start, start + 4, dtype=np.int16).reshape(2, 2),
        "fortran": np.asfortranarray(np.arange(start, start + 6.0).reshape(2, 3)),
        "scalar array": np.array(start * 1.5),
        "strange keys": {"a.b": t + 9, "x@y%z": t + 10, "__metadata__": t + 11, "naïve": t + 12, "": t + 13},
        "scalar": torch.tensor(start),
        "text": f"from {start}",
    }


def test_load_gives_tensors_in_containers_as_they_were(tmp_path: Path, equal_states: EqualStates) -> None:
    holdfast.save(tmp_path, {"part": tensors(3)}, 1)
    loaded = holdfast.load(tmp_path)["part"]
    assert equal_states(loaded, tensors(3))
    assert type(loaded["ordered"]) is OrderedDict
    assert list(loaded["ordered"]) == ["z", "a"]


def test_a_dict_is_filled_in_place_with_the_objects_that_it_holds(tmp_path: Path, equal_states: EqualStates) -> None:
    live = tensors(50)
    held = [live["list"][0], live["list"], live["tuple"][1], live["array"], live["integer keys"], live["scalar"]]
    holdfast.save(tmp_path, {"part": tensors(3)}, 1)
    holdfast.restore(tmp_path, {"part": live})
    assert equal_states(live, tensors(3))
    now = [live["list"][0], live["list"], live["tuple"][1], live["array"], live["integer keys"], live["scalar"]]
    assert all(a is b for a, b in zip(held, now, strict=True))


def test_values_that_changed_come_back_wherever_they_are(tmp_path: Path) -> None:
    def tree(number: int) -> dict[str, Any]:
        t = torch.zeros(1)
        return {"a": number, "b": [t, number, {"c": number}], "d": (t, number), "e": {"f": [number] * number}}

    live = tree(1)
    holdfast.save(tmp_path, {"progress": tree(3)}, 1)
    holdfast.restore(tmp_path, {"progress": live})
    assert repr(live) == repr(tree(3))


def test_a_dict_that_is_empty_yet_is_filled(tmp_path: Path, equal_states: EqualStates) -> None:
    for number, live in enumerate([{}, {"best": {}, "epoch": 0}]):
        run = tmp_path / str(number)
        saved = {"best": {"loss": 0.5, "weights": torch.ones(2)}, "epoch": 3}
        holdfast.save(run, {"progress": saved}, 1)
        holdfast.restore(run, {"progress": live})
        assert equal_states(live, saved)


def test_arrays_of_every_form_are_filled_in_place(tmp_path: Path) -> None:
    def read_only() -> np.ndarray:
        array = np.zeros(3)
        array.flags.writeable = False
        return array

    forms: dict[str, Callable[[], np.ndarray]] = {
        "strided": lambda: np.zeros((4, 6))[::2, 1::2],
        "reversed": lambda: np.zeros(4)[::-1],
        "big endian": lambda: np.zeros(3, ">i4"),
        "read only": read_only,
        "half": lambda: np.zeros(3, np.float16),
        "unsigned": lambda: np.zeros(3, np.uint64),
        "empty": lambda: np.zeros((0, 3)),
    }
    wrong = {}
    for name, make in forms.items():
        saved, live = make().copy(), {"array": make()}
        saved[...] = np.arange(saved.size).reshape(saved.shape)
        try:
            holdfast.save(tmp_path / name, {"part": {"array": saved.astype(saved.dtype)}}, 1)
            holdfast.restore(tmp_path / name, {"part": live})
        except (holdfast.Unsupported, holdfast.Refused, holdfast.Mismatch) as told:
            if "part.array" not in str(told):
                wrong[name] = f"refused without its name: {told}"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
        else:
            if not np.array_equal(live["array"], saved):
                wrong[name] = f"said to be filled, but holds {live['array'].tolist()}"
    assert wrong == {}


@dataclass
class Progress:
    epoch: int = 0


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "value",
    [
        Progress(),
        [Progress()],
        Pair(1, 2),
        Pair(torch.ones(1), 2),
        object(),
        deque([torch.ones(1)]),
        {1, Progress.__init__},
        lambda: 0,
        np.array([object()]),
        np.array(["text"]),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.zeros(2, np.longdouble),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_has_no_stored_form_is_refused_by_its_path_and_nothing_is_committed(tmp_path: Path, value: Any) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"part\.inner\.value"):
        holdfast.save(tmp_path, {"part": {"inner": {"value": value}}}, 1)
    assert holdfast.Run(tmp_path).latest() is None


def test_the_error_about_a_dataclass_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"holdfast\.register\(Progress, tag, encode, decode\)"):
        holdfast.save(tmp_path, {"part": {"progress": Progress()}}, 1)


class Cursor:
    """A type of the user's own, taught to holdfast."""

    def __init__(self, shard: str, at: int) -> None:
        self.shard, self.at = shard, at


def test_a_registered_type_comes_back(tmp_path: Path) -> None:
    holdfast.register(Cursor, "tests.Cursor", lambda c: (c.shard, c.at), lambda v: Cursor(*v))
    live = {"cursor": Cursor("x", 0), "all": []}
    holdfast.save(tmp_path, {"data": {"cursor": Cursor("a", 5), "all": [Cursor("b", 6)]}}, 1)
    holdfast.restore(tmp_path, {"data": live})
    assert (live["cursor"].shard, live["cursor"].at, live["all"][0].at) == ("a", 5, 6)


def test_a_dict_of_roles_may_hold_plain_values_and_gets_them_back(tmp_path: Path) -> None:
    live = {"epoch": 0, "name": "", "loss": [9.0], "at": (0, 0), "weights": torch.zeros(2)}
    holdfast.save(tmp_path, {"epoch": 7, "name": "gpt", "loss": [1.0, 0.5], "at": (1, 2), "weights": torch.ones(2)}, 1)
    holdfast.restore(tmp_path, live)
    assert repr(live) == repr({"epoch": 7, "name": "gpt", "loss": [1.0, 0.5], "at": (1, 2), "weights": torch.ones(2)})


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
leaves |= st.lists(st.integers(-5, 5), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.int16))
keys = st.text(max_size=4) | st.integers(-3, 12)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(keys, trees, max_size=4))
def test_any_tree_comes_back_as_it_was_or_its_names_collide(tree: dict[Any, Any]) -> None:
    from conftest import bit_differences

    run = f"memory://{id(tree)}"
    try:
        holdfast.save(run, {"part": tree}, (holdfast.Run(run).latest() or NEVER).step + 1)
    except holdfast.Refused as refused:
        assert "two things are called" in str(refused)
    except holdfast.Unsupported as refused:
        assert "not valid Unicode" in str(refused)
    else:
        assert bit_differences(holdfast.load(run).get("part", {}), tree) == []


class NEVER:
    step = 0
