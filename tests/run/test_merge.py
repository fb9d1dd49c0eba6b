"""One index from many parts: the same as merging them one object at a time; who holds what is said where they clash."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Corrupt, Refused
from holdfast.errors import Unsupported
from holdfast.format.columns import Columns, Strings
from holdfast.format.index import Index
from holdfast.layout.boxes import Box
from holdfast.run.cover import prove_cover
from holdfast.run.merge import merge, merge_parts

RAW, ZSTD = '["raw", 1, ""]', '["zstd", 1, ""]'
ITEMS = {"float32": 4, "bfloat16": 2, "int64": 8}


@dataclass(frozen=True)
class Chunk:
    raw_start: int
    raw_bytes: int
    file: str
    codec: str = RAW
    mark: int = 0
    """What tells it from others: its offset, and a byte of its digest."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str = "float32"
    shape: tuple[int, ...] = (4, 3)
    owner: str | None = None
    alias: str | None = None
    entries: list[tuple[Box, list[Chunk]]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    tensors: list[Tensor]
    """In the order of the state's tree."""
    files: list[str] = field(default_factory=lambda: ["file"])
    codecs: list[str] = field(default_factory=lambda: [RAW])


def offsets(counts: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int64)


def columns_of(part: Part) -> Columns:
    """A part as its writer would have written it."""
    tensors = sorted(part.tensors, key=lambda t: t.name.encode())
    rows = {t.name: row for row, t in enumerate(tensors)}
    dtypes, roles = sorted({t.dtype for t in tensors}), sorted({t.name.split(".")[0] for t in tensors})
    entries = [entry for t in tensors for entry in t.entries]
    chunks = [chunk for _, of_entry in entries for chunk in of_entry]
    order = [t.name for t in part.tensors]
    columns: Columns = {}
    for name, texts in (
        ("tensor.name", [t.name for t in tensors]),
        ("tensor.path", [json.dumps(t.name.split("."), separators=(",", ":")) for t in tensors]),
        ("dtype.name", dtypes), ("role.name", roles), ("codec.json", part.codecs),
        ("file.path", part.files), ("file.stamp", ["e"] * len(part.files)),
    ):  # fmt: skip
        Strings.of(texts).write(columns, name)
    return columns | {
        "tensor.dtype": np.array([dtypes.index(t.dtype) for t in tensors], np.uint8),
        "tensor.role": np.array([roles.index(t.name.split(".")[0]) for t in tensors], np.uint16),
        "tensor.shape.offsets": offsets([len(t.shape) for t in tensors]),
        "tensor.shape": np.array([d for t in tensors for d in t.shape], np.int64),
        "tensor.order": np.array([order.index(t.name) for t in tensors], np.int64),
        "tensor.owner": np.array([rows.get(t.owner or "", -1) for t in tensors], np.int64),
        "tensor.alias": np.array([rows[t.alias] if t.alias else -1 for t in tensors], np.int64),
        "tensor.entries": offsets([len(t.entries) for t in tensors]),
        "entry.box.offsets": offsets([len(box[0]) for box, _ in entries]),
        "entry.box": np.array([x for box, _ in entries for side in box for x in side], np.int64),
        "entry.chunks": offsets([len(of_entry) for _, of_entry in entries]),
        "chunk.raw_start": np.array([c.raw_start for c in chunks], np.int64),
        "chunk.raw_bytes": np.array([c.raw_bytes for c in chunks], np.uint32),
        "chunk.file": np.array([part.files.index(c.file) for c in chunks], np.uint32),
        "chunk.offset": np.array([4096 + 1000 * c.mark for c in chunks], np.int64),
        "chunk.stored_bytes": np.array([c.raw_bytes for c in chunks], np.uint32),
        "chunk.codec": np.array([part.codecs.index(c.codec) for c in chunks], np.uint16),
        "chunk.algorithm": np.ones(len(chunks), np.uint8),
        "chunk.digest": np.array([[c.mark % 256] * 16 for c in chunks], np.uint8).reshape(-1, 16),
        "file.step": np.ones(len(part.files), np.int64),
        "file.attempt": np.ones(len(part.files), np.int64),
        "file.bytes": np.full(len(part.files), 1 << 40),
        "file.header_bytes": np.full(len(part.files), 4096),
        "file.digest": np.array([[len(f)] * 16 for f in part.files], np.uint8).reshape(-1, 16),
    }


def merged_one_by_one(parts: Sequence[Part]) -> tuple[Part, list[int]]:
    """The parts as one, one object at a time, and the part that each entry came from."""
    first: dict[str, Tensor] = {}
    entries: dict[str, list[tuple[Any, int, int, list[Chunk]]]] = {}
    for number, part in enumerate(parts):
        names = {t.name for t in part.tensors}
        for tensor in part.tensors:
            owner = tensor.owner if tensor.owner in names else None
            known = first.setdefault(tensor.name, replace(tensor, owner=owner))
            if tensor.alias is None:
                first[tensor.name] = replace(known, alias=None)
            found = entries.setdefault(tensor.name, [])
            found += [(box, number, turn, chunks) for turn, (box, chunks) in enumerate(tensor.entries)]
    tensors = [
        replace(tensor, entries=[(box, chunks) for box, _, _, chunks in sorted(entries[name], key=lambda e: e[:3])])
        for name, tensor in first.items()
    ]
    numbers = [number for name in sorted(first, key=str.encode) for _, number, _, _ in sorted(entries[name], key=lambda e: e[:3])]
    codecs = sorted({codec for part in parts for codec in part.codecs}, key=lambda codec: (codec != RAW, codec))
    return Part(tensors, [file for part in parts for file in part.files], codecs), numbers


def assert_same(found: Columns, wanted: Columns) -> None:
    assert sorted(found) == sorted(wanted)
    for name, column in wanted.items():
        assert found[name].dtype == column.dtype, name
        assert found[name].shape == column.shape, name
        assert found[name].tolist() == column.tolist(), name


def entry(box: Box, dtype: str = "float32", file: str = "file", mark: int = 0) -> tuple[Box, list[Chunk]]:
    """An entry in one chunk."""
    return box, [Chunk(0, int(np.prod(box[1])) * ITEMS[dtype], file, mark=mark)]


# --- the same as one by one -------------------------------------------------------------------------------------------

KINDS = [
    ("float32", (4, 3)),
    ("bfloat16", (5,)),
    ("int64", ()),
    ("float32", (2, 2, 2)),
    ("float32", (0, 3)),
    ("bfloat16", (4, 3)),
]
NAMES = [f"{role}.{key}" for role in ("model", "optimizer", "ü") for key in ("a", "b", "é", "a.b", "\U0001f331")]
TENSORS = {name: KINDS[number % len(KINDS)] for number, name in enumerate(NAMES)}
TIED = {"optimizer.a": "model.b", "ü.b": "model.é"}
"""Aliases, and what they are aliases of where both are held; of the same kind."""
for alias, holder in TIED.items():
    TENSORS[alias] = TENSORS[holder]


@st.composite
def parts_of_a_job(draw: st.DrawFn) -> list[Part]:
    """Parts with some of the tensors each, any boxes of them in any number of chunks, files and codecs."""
    parts: list[Part] = []
    for number in range(draw(st.integers(2, 5))):
        if parts and draw(st.booleans()):
            names = [t.name for t in parts[-1].tensors]
        else:
            names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=6))
        files = [f"file {number} {i}" for i in range(draw(st.integers(1, 2)))]
        codecs = draw(st.sampled_from([[RAW], [RAW, ZSTD], [ZSTD, RAW], [ZSTD]]))
        tensors = []
        for name in names:
            dtype, shape = TENSORS[name]
            owner = draw(st.sampled_from([None, "model.a", "model.b"]))
            if TIED.get(name) in names and draw(st.booleans()):
                tensors.append(Tensor(name, dtype, shape, owner, TIED[name]))
                continue
            entries = []
            for _ in range(draw(st.integers(0, 3))):
                offset = tuple(draw(st.integers(0, d)) for d in shape)
                box = (offset, tuple(draw(st.integers(0, d)) for d in shape))
                sizes = draw(st.lists(st.integers(1, 9), max_size=3))
                marks = [draw(st.integers(0, 999)) for _ in sizes]
                file, codec = draw(st.sampled_from(files)), draw(st.sampled_from(codecs))
                entries.append((box, [Chunk(sum(sizes[:i]), n, file, codec, marks[i]) for i, n in enumerate(sizes)]))
            tensors.append(Tensor(name, dtype, shape, owner, None, entries))
        parts.append(Part(tensors, files, codecs))
    return parts


@given(parts_of_a_job())
def test_parts_are_merged_as_if_one_by_one(parts: list[Part]) -> None:
    wanted, numbers = merged_one_by_one(parts)
    found = merge([columns_of(part) for part in parts], "a step")
    assert_same(found.columns, columns_of(wanted))
    assert found.part_of_entry.tolist() == numbers


def test_entries_are_in_order_where_their_boxes_do_not_fit_one_number() -> None:
    big = 1 << 40
    boxes: list[Box] = [((i * big, (j - i) % 3 * big, i), (big - j, big - i, 1)) for j in range(3) for i in (3, 1, 2, 0)]
    boxes = [*boxes, *boxes[::-1]]
    parts = [Part([Tensor("model.a", shape=(4 * big, 3 * big, 9), entries=[(box, [])])]) for box in boxes]
    wanted, numbers = merged_one_by_one(parts)
    found = merge([columns_of(part) for part in parts], "a step")
    assert_same(found.columns, columns_of(wanted))
    assert found.part_of_entry.tolist() == numbers


def test_one_part_is_itself() -> None:
    columns = columns_of(Part([Tensor("model.a", entries=[entry(((0, 0), (4, 3)))])]))
    found = merge([columns], "a step")
    assert found.columns is columns
    assert found.part_of_entry.tolist() == [0]


def test_columns_that_have_a_default_may_be_missing_from_some_parts() -> None:
    halves = [Part([Tensor("model.a", entries=[entry(((row, 0), (2, 3)))])]) for row in (0, 2)]
    parts = [columns_of(half) for half in halves]
    wanted = merge_parts(parts, "a step")
    for name in ("tensor.order", "tensor.owner", "tensor.alias", "chunk.codec", "chunk.algorithm"):
        del parts[1][name]
        assert_same(merge_parts(parts, "a step"), wanted)


def test_the_order_of_the_tree_is_that_of_the_first_part_that_has_a_tensor() -> None:
    names = [["model.d", "model.b"], ["model.c", "model.b", "model.a"], ["model.e", "model.d"]]
    columns = merge_parts([columns_of(Part([Tensor(name) for name in of_part])) for of_part in names], "a step")
    order = np.argsort(columns["tensor.order"])
    assert [Strings.read(columns, "tensor.name")[row] for row in order] == [f"model.{key}" for key in "dbcae"]
    assert sorted(columns["tensor.order"].tolist()) == [0, 1, 2, 3, 4]


# --- ties -------------------------------------------------------------------------------------------------------------

UPPER, LOWER = entry(((0, 0), (2, 3))), entry(((2, 0), (2, 3)))
WHOLE = entry(((0, 0), (4, 3)))


def merged_index(*parts: list[Tensor]) -> Index:
    return Index(merge_parts([columns_of(Part(tensors)) for tensors in parts], "a step"), "a step")


def test_an_alias_in_every_part_that_has_it_stays_one() -> None:
    tied = Tensor("model.head", alias="model.embedding")
    index = merged_index(
        [Tensor("model.embedding", entries=[UPPER]), tied],
        [Tensor("model.other", entries=[WHOLE])],
        [Tensor("model.embedding", entries=[LOWER]), tied],
    )
    prove_cover(index)
    head = index.tensor(index.find("model.head"))
    assert index.canonical(head).name == "model.embedding"


def test_a_tensor_that_is_an_alias_only_where_both_are_held_is_none() -> None:
    index = merged_index(
        [Tensor("model.embedding", entries=[WHOLE]), Tensor("model.head", alias="model.embedding")],
        [Tensor("model.head", entries=[WHOLE])],
    )
    prove_cover(index)
    head = index.tensor(index.find("model.head"))
    assert head.alias == -1
    assert len(index.entries(head)) == 1


def test_a_tensor_that_nobody_wrote_is_missing_and_no_alias() -> None:
    index = merged_index(
        [Tensor("model.embedding", entries=[WHOLE]), Tensor("model.head", alias="model.embedding")], [Tensor("model.head")]
    )
    with pytest.raises(Refused, match=r"model\.head.*12 of 12 elements are missing"):
        prove_cover(index)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Tensor("model.w", "bfloat16"), r"float32 \[4, 3\] in part 1, bfloat16 \[4, 3\] in part 2"),
        (Tensor("model.w", shape=(4, 4)), r"float32 \[4, 3\] in part 1, float32 \[4, 4\] in part 2"),
        (Tensor("model.w", shape=(4, 3, 1)), r"float32 \[4, 3\] in part 1, float32 \[4, 3, 1\] in part 2"),
        (Tensor("model.w", shape=()), r"float32 \[4, 3\] in part 1, float32 \[\] in part 2"),
    ],
)
def test_parts_that_describe_a_tensor_differently_are_refused(other: Tensor, said: str) -> None:
    for more in ([], [Tensor("model.a"), Tensor("model.z", shape=(1,))]):
        with pytest.raises(Refused, match=rf"two writers give model\.w different dtypes, shapes or aliases: {said}, in a step"):
            merged_index([], [*more, Tensor("model.w")], [*more, other], [*more, Tensor("model.w")])


def test_parts_that_tie_a_tensor_to_different_ones_are_refused() -> None:
    both = [Tensor("model.a", entries=[WHOLE]), Tensor("model.b", entries=[WHOLE])]
    with pytest.raises(Refused, match=r"model\.c.* an alias of model\.a in part 0, .* an alias of model\.b in part 1"):
        merged_index([*both, Tensor("model.c", alias="model.a")], [*both, Tensor("model.c", alias="model.b")])


def test_an_overlap_names_both_boxes_and_both_holders_and_the_way_out() -> None:
    parts = [[Tensor("model.w", entries=[entry(((0, 0), (3, 3)))])], [], [Tensor("model.w", entries=[LOWER])]]
    found = merge([columns_of(Part(tensors)) for tensors in parts], "a step")
    with pytest.raises(Refused) as raised:
        prove_cover(Index(found.columns), lambda row: f"rank {found.part_of_entry[row]}")
    message = str(raised.value)
    assert "model.w, shape [4, 3]" in message
    assert "the boxes [0, 0]+[3, 3] of rank 0 and [2, 0]+[2, 3] of rank 2 overlap" in message
    assert "different names" in message
    assert "holdfast.PerRank" in message


def test_of_several_tensors_that_are_not_covered_the_first_is_explained_and_the_others_are_counted() -> None:
    tensors = [Tensor(f"model.{key}", entries=[UPPER] if key in "bd" else [UPPER, LOWER]) for key in "abcd"]
    with pytest.raises(Refused, match=r"model\.b,.*6 of 12 elements are missing \(and 1 other tensor\)"):
        prove_cover(merged_index(tensors, []))


# --- parts that are no index ------------------------------------------------------------------------------------------

SOUND = Part([Tensor("model.a", entries=[UPPER, LOWER]), Tensor("model.b", entries=[WHOLE])])


DEFAULTS = ("tensor.owner", "tensor.alias", "tensor.order", "chunk.codec", "chunk.algorithm")
MISFITS = [(name, how) for name in columns_of(SOUND) for how in ("missing", "shorter", "longer")
           if how != "missing" or name not in DEFAULTS]  # fmt: skip


@pytest.mark.parametrize(("name", "how"), MISFITS)
def test_a_part_whose_columns_do_not_fit_together_is_corrupt(name: str, how: str) -> None:
    """Also where another part has too much of what this one lacks, so that the sums would fit."""
    parts = [columns_of(SOUND), columns_of(SOUND), columns_of(SOUND)]
    if how == "missing":
        del parts[1][name]
    else:
        one, other = (1, 2) if how == "shorter" else (2, 1)
        parts[other][name] = np.concatenate([parts[other][name], parts[other][name][-1:]])
        parts[one][name] = parts[one][name][:-1]
    with pytest.raises(Corrupt, match="a step"):
        merge_parts(parts, "a step")


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("tensor.dtype", 0, 9), ("tensor.role", 1, 9), ("tensor.alias", 0, 2), ("tensor.owner", 1, 7), ("chunk.file", 0, 1),
        ("chunk.codec", 2, 1), ("tensor.entries", 1, 9), ("tensor.entries", 0, 1), ("entry.chunks", 2, 0),
        ("entry.box.offsets", 1, 3), ("tensor.shape.offsets", 1, 3), ("tensor.alias", 0, 1),
    ],
)  # fmt: skip
def test_a_part_with_a_row_that_is_not_there_is_corrupt(name: str, row: int, value: int) -> None:
    parts = [columns_of(SOUND), columns_of(SOUND)]
    parts[1][name][row] = value
    with pytest.raises((Corrupt, Refused), match="a step"):
        merge_parts(parts, "a step")


def test_strides_are_not_dropped() -> None:
    parts = [columns_of(SOUND), columns_of(SOUND) | {"entry.strides": np.ones(6, np.int64)}]
    with pytest.raises(Unsupported, match="strides"):
        merge_parts(parts, "a step")
