"""Lies that an index can tell under right digests: each an edit of its columns and metadata, by a name in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np

from .wreck import Columns, Raw, put_table, row_of, spread, table

Edit = Callable[[Columns, dict[str, Any]], Any]
LIES: dict[str, Edit] = {}
BIG = 2**62


def lie(edit: Edit) -> Edit:
    LIES[edit.__name__.replace("_", " ")] = edit
    return edit


def set_row(name: str, row: int | slice, value: Any) -> Edit:
    def edit(columns: Columns, metadata: dict[str, Any]) -> None:
        columns[name][row] = value

    return edit


def of_tensor(name: str, column: str, value: Any) -> Edit:
    """Set a column of the tensor table for the tensor `name`."""

    def edit(columns: Columns, metadata: dict[str, Any]) -> None:
        columns[column][row_of(columns, name)] = value

    return edit


# --- where chunks lie -------------------------------------------------------------------------------------------------

LIES |= {
    "an offset at the end of the file": lambda c, m: c["chunk.offset"].__setitem__(-1, c["file.bytes"][c["chunk.file"][-1]]),
    "an offset far away": set_row("chunk.offset", -1, BIG),
    "a negative offset": set_row("chunk.offset", 0, -4096),
    "the least offset": set_row("chunk.offset", 0, -(2**63)),
    "the greatest offset": set_row("chunk.offset", 0, 2**63 - 1),
    "an offset in the header": set_row("chunk.offset", -1, 8),
    "all at one place": set_row("chunk.offset", slice(None), 4096),
    "a file that is not in the table": set_row("chunk.file", 0, 2),
    "the last file there can be": set_row("chunk.file", 0, 2**32 - 1),
    "the other file": lambda c, m: c["chunk.file"].__setitem__(slice(None), 1 - c["chunk.file"]),
    "more stored bytes than raw ones": set_row("chunk.stored_bytes", -1, 48),
    "less stored bytes than raw ones": set_row("chunk.stored_bytes", -1, 1),
    "all the stored bytes there can be": set_row("chunk.stored_bytes", 0, 2**32 - 1),
    "a chunk of more than 64 MiB": set_row("chunk.raw_bytes", 0, (64 << 20) + 1),
    "less raw bytes": set_row("chunk.raw_bytes", 0, 4),
    "no raw bytes": set_row("chunk.raw_bytes", 0, 0),
    "more raw bytes": set_row("chunk.raw_bytes", -1, 48),
    "a file larger than it is": lambda c, m: (
        c["file.bytes"].__setitem__(slice(None), BIG),
        c["chunk.offset"].__setitem__(-1, BIG - 64),
    ),
    "a negative file": set_row("file.bytes", 0, -1),
    "two chunks at the start of their entry": set_row("chunk.raw_start", slice(0, 2), 0),
    "a chunk before its entry": set_row("chunk.raw_start", 1, -(4 << 20)),
    "a chunk after its entry": set_row("chunk.raw_start", 1, BIG),
    "a gap between chunks": set_row("chunk.raw_start", 1, (4 << 20) + 4),
    "chunks in the wrong order": lambda c, m: c["chunk.raw_start"].__setitem__(slice(0, 2), c["chunk.raw_start"][1::-1].copy()),
    "another digest": set_row("chunk.digest", 0, 7),
}


@lie
def a_huge_chunk_of_a_huge_coded_file(c: Columns, m: dict[str, Any]) -> None:
    put_table(c, "codec.json", [b'["zstd", 1, ""]'])
    c["file.bytes"][:] = BIG
    c["chunk.stored_bytes"][:] = 2**32 - 1


@lie
def a_grid_that_cuts_elements(c: Columns, m: dict[str, Any]) -> None:
    """The big tensor's second chunk begins in the middle of an element; its digests are recomputed below."""
    c["chunk.raw_bytes"][0] -= 2
    c["chunk.stored_bytes"][0] -= 2
    c["chunk.raw_bytes"][1] += 2
    c["chunk.stored_bytes"][1] += 2
    c["chunk.raw_start"][1] -= 2
    c["chunk.offset"][1] -= 2


# --- boxes and shapes -------------------------------------------------------------------------------------------------


def reshape(name: str, shape: list[int], offset: list[int] | None = None, box: list[int] | None = None) -> Edit:
    """Give a tensor another shape, and its only entry a box of the same shape, or another."""

    def edit(columns: Columns, metadata: dict[str, Any]) -> None:
        row = row_of(columns, name)
        entry = int(columns["tensor.entries"][row])
        shapes = spread(columns, "tensor.shape")
        bounds = columns["entry.box.offsets"].tolist()
        boxes = [columns["entry.box"][2 * a : 2 * b].tolist() for a, b in itertools.pairwise(bounds)]
        shapes[row], boxes[entry] = shape, [*(offset or [0] * len(shape)), *(box or shape)]
        for number, alias in enumerate(columns["tensor.alias"]):
            if alias == row:
                shapes[number] = shape
        columns["tensor.shape"] = np.array(list(chain(*shapes)), np.int64)
        columns["tensor.shape.offsets"] = np.cumsum([0, *map(len, shapes)]).astype(np.int64)
        columns["entry.box"] = np.array(list(chain(*boxes)), np.int64)
        columns["entry.box.offsets"] = np.cumsum([0, *(len(b) // 2 for b in boxes)]).astype(np.int64)

    return edit


LIES |= {
    "a negative shape": reshape("model.small", [-4, -6]),
    "one negative dimension": reshape("model.small", [4, -6]),
    "a shape with more elements": reshape("model.small", [4, 7]),
    "a shape with fewer elements": reshape("model.small", [4, 5]),
    "a huge shape": reshape("model.small", [2**40, 6]),
    "a shape whose size overflows": reshape("model.none", [2**32, 2**32]),
    "an empty shape whose size overflows": reshape("model.none", [BIG, BIG, 0]),
    "a shape whose bytes overflow": reshape("model.small", [BIG]),
    "ten thousand dimensions": reshape("model.small", [1] * 10_000),
    "an empty tensor that is not": reshape("model.none", [1, 3]),
    "a scalar that is not": reshape("model.count", [2]),
    "a box that leaves its tensor": reshape("model.small", [4, 6], [1, 0]),
    "a box that is too small": reshape("model.small", [5, 6], None, [4, 6]),
    "a box that is too large": reshape("model.small", [3, 6], None, [4, 6]),
    "a negative box": reshape("model.small", [4, 6], [0, 0], [-4, -6]),
    "a box at a negative place": reshape("model.small", [4, 6], [-1, 0]),
    "a box far away": reshape("model.small", [4, 6], [BIG, BIG]),
    "a box of other dimensions": lambda c, m: c["entry.box.offsets"].__setitem__(-1, c["entry.box.offsets"][-1] + 1),
}


@lie
def a_tensor_without_entries(c: Columns, m: dict[str, Any]) -> None:
    c["tensor.entries"][-1] = c["tensor.entries"][-2]


@lie
def a_tensor_whose_entry_is_gone(c: Columns, m: dict[str, Any]) -> None:
    """Consistently: the last tensor's entry and chunk are in no table."""
    c["tensor.entries"][-1] -= 1
    for name in ("entry.box.offsets", "entry.chunks"):
        c[name] = c[name][:-1]
    c["entry.box"] = c["entry.box"][: 2 * int(c["entry.box.offsets"][-1])]
    for name in [n for n in c if n.startswith("chunk.")]:
        c[name] = c[name][:-1]


@lie
def an_entry_without_chunks(c: Columns, m: dict[str, Any]) -> None:
    c["entry.chunks"][1:-1] = c["entry.chunks"][2:]


@lie
def two_tensors_with_the_same_entry(c: Columns, m: dict[str, Any]) -> None:
    c["tensor.entries"][1:-1] -= 1


# --- offsets, strings -------------------------------------------------------------------------------------------------

for column in ("tensor.shape.offsets", "tensor.entries", "entry.box.offsets", "entry.chunks"):
    LIES |= {
        f"{column} negative": set_row(column, 1, -1),
        f"{column} huge": set_row(column, -1, BIG),
        f"{column} decreasing": set_row(column, 1, 7),
        f"{column} not from zero": set_row(column, 0, 1),
        f"{column} short of its end": set_row(column, -1, 1),
        f"{column} wrapping": set_row(column, slice(1, 5), [BIG, -(2**63), -BIG, 0]),
        f"{column} of zeros": set_row(column, slice(None), 0),
        f"{column} empty": lambda c, m, n=column: c.update({n: np.zeros(0, np.int64)}),
        f"{column} longer": lambda c, m, n=column: c.update({n: np.append(c[n], c[n][-1])}),
        f"{column} in two dimensions": lambda c, m, n=column: c.update({n: c[n][:, None].copy()}),
        f"{column} a scalar": lambda c, m, n=column: c.update({n: Raw("I64", [], bytes(8))}),
        f"{column} of narrow integers": lambda c, m, n=column: c.update({n: c[n].astype(np.int16)}),
        f"{column} missing": lambda c, m, n=column: c.pop(n),
    }
for column in ("tensor.name", "tensor.path", "dtype.name", "role.name", "codec.json", "file.path", "file.stamp"):
    LIES |= {
        f"{column} decreasing": set_row(f"{column}.offsets", 0, 3),
        f"{column} beyond its bytes": set_row(f"{column}.offsets", -1, BIG),
        f"{column} negative": set_row(f"{column}.offsets", -1, -1),
        f"{column} not UTF-8": lambda c, m, n=column: put_table(c, n, [b"\xff\xfe"] * len(table(c, n))),
        f"{column} without offsets": lambda c, m, n=column: c.pop(f"{n}.offsets"),
        f"{column} without bytes": lambda c, m, n=column: c.pop(f"{n}.bytes"),
        f"{column} of no rows": lambda c, m, n=column: put_table(c, n, []),
        f"{column} with offsets in two dimensions": lambda c, m, n=column: c.update(
            {f"{n}.offsets": c[f"{n}.offsets"][:, None].copy()}
        ),
        f"{column} with wide bytes": lambda c, m, n=column: c.update({f"{n}.bytes": c[f"{n}.bytes"].astype(np.int64)}),
        f"{column} with no offsets": lambda c, m, n=column: c.update({f"{n}.offsets": np.zeros(0, np.int64)}),
    }
LIES |= {
    f"{column} {how}": edit
    for column in (
        "tensor.dtype",
        "tensor.role",
        "chunk.raw_start",
        "chunk.raw_bytes",
        "chunk.file",
        "chunk.offset",
        "chunk.stored_bytes",
        "chunk.digest",
        "file.step",
        "file.attempt",
        "file.bytes",
        "file.header_bytes",
        "file.digest",
        "tensor.shape",
        "entry.box",
        "tensor.owner",
        "tensor.alias",
    )
    for how, edit in {
        "missing": lambda c, m, n=column: c.pop(n) if n not in ("tensor.owner", "tensor.alias") else c.update({n: c[n][:0]}),
        "shorter": lambda c, m, n=column: c.update({n: c[n][:-1]}),
        "longer": lambda c, m, n=column: c.update({n: np.concatenate([c[n], c[n][-1:]])}),
        "negative": lambda c, m, n=column: c.update({n: np.full(c[n].shape, -1, np.int16)}),
        "in two dimensions": lambda c, m, n=column: c.update({n: c[n][:, None].copy()}),
    }.items()
}

# --- names, rows of other tables --------------------------------------------------------------------------------------


def rename(old: str, new: bytes, path: bytes | None = None) -> Edit:
    def edit(columns: Columns, metadata: dict[str, Any]) -> None:
        names, paths, row = table(columns, "tensor.name"), table(columns, "tensor.path"), row_of(columns, old)
        names[row], paths[row] = new, paths[row] if path is None else path
        put_table(columns, "tensor.name", names)
        put_table(columns, "tensor.path", paths)

    return edit


PATHS = [
    b"",
    b"{}",
    b"[]",
    b"5",
    b"null",
    b'"model"',
    b"[[]]",
    b'[{"a": []}]',
    b'["model"]',
    b'["model", "other"]',
    b'["other", "small"]',
    b"[" * 99_999,
    b'["model", NaN]',
    b'["progress", "epoch", "small"]',
]
LIES |= {f"the path {path[:20].decode()}": rename("model.small", b"model.small", path) for path in PATHS}
LIES |= {
    "one name twice": rename("model.small", b"model.none", b'["model","none"]'),
    "names out of order": rename("model.small", b"model.a", b'["model","a"]'),
    "an empty name": rename("model.big", b"", b'[""]'),
    "a name that climbs": rename("model.small", b"../../secret"),
    "an absolute name": rename("model.small", b"/etc/passwd"),
    "a dtype that is not in the table": of_tensor("model.small", "tensor.dtype", 200),
    "a role that is not in the table": of_tensor("model.small", "tensor.role", 60_000),
    "a dtype of another size": of_tensor("model.small", "tensor.dtype", 0),
    "an alias that is not there": of_tensor("model.tied", "tensor.alias", 99),
    "an alias far away": of_tensor("model.tied", "tensor.alias", BIG),
    "an alias of itself": lambda c, m: of_tensor("model.tied", "tensor.alias", row_of(c, "model.tied"))(c, m),
    "a negative alias": of_tensor("model.tied", "tensor.alias", -7),
    "an alias of an alias": lambda c, m: of_tensor("model.none", "tensor.alias", row_of(c, "model.tied"))(c, m),
    "an alias of another shape": lambda c, m: of_tensor("model.tied", "tensor.alias", row_of(c, "model.frozen"))(c, m),
    "an alias with bytes of its own": lambda c, m: of_tensor("model.turned", "tensor.alias", row_of(c, "model.small"))(c, m),
    "no alias and no bytes": of_tensor("model.tied", "tensor.alias", -1),
    "an owner that is not there": of_tensor("model.small", "tensor.owner", 99),
    "a dtype nobody knows": lambda c, m: put_table(c, "dtype.name", [b"float7"] * len(table(c, "dtype.name"))),
    "a codec that is not in the table": lambda c, m: c.update({"chunk.codec": np.full(len(c["chunk.file"]), 9, np.uint16)}),
    "a negative codec": lambda c, m: c.update({"chunk.codec": np.full(len(c["chunk.file"]), -1, np.int16)}),
    "a digest algorithm nobody knows": lambda c, m: c.update({"chunk.algorithm": np.full(len(c["chunk.file"]), 2, np.uint8)}),
    "no digests": lambda c, m: c.update({"chunk.algorithm": np.zeros(len(c["chunk.file"]), np.uint8)}),
    "strides": lambda c, m: c.update({"entry.strides": np.ones(len(c["entry.box"]) // 2, np.int64)}),
}
CODECS = [
    b"",
    b"5",
    b"[]",
    b'["raw"]',
    b'["raw", 2, ""]',
    b'["planes", 1, ""]',
    b'["planes", 1, "4"]',
    b'["planes", 1, "3"]',
    b'["int8", 1, "\\"float32\\""]',
    b'[["raw"], 1, ""]',
    b"[{}, {}, {}]",
    b'["raw", 1, "", 1]',
    b'["zstd", 1, ""]',
    b"[" * 99_999,
    b'["raw", 1, "level=9"]',
]
LIES |= {f"the codec {text[:20].decode()}": lambda c, m, text=text: put_table(c, "codec.json", [text]) for text in CODECS}
FILES = [
    b"../secret",
    b"/etc/passwd",
    b"steps/../../secret",
    b"",
    b".",
    b"steps//x",
    b"/dev/zero",
    b"steps/\x00",
    b"holdfast.json",
    b"steps\\x",
    b"steps/0000000003-a0001",
    b"\n",
]
LIES |= {
    f"the file {path!r}": lambda c, m, path=path: put_table(c, "file.path", [path] * len(table(c, "file.path"))) for path in FILES
}
LIES |= {
    f"the foreign file {path!r}": lambda c, m, path=path: (
        put_table(c, "file.path", [path] * 2),
        c["file.attempt"].__setitem__(slice(None), -1),
        c["file.step"].__setitem__(slice(None), -1),
    )
    for path in (b"../secret", b"/etc/passwd", b"/dev/zero", b"holdfast.json")
}
LIES |= {
    f"the layout of {path!r}": lambda c, m, path=path: m.update(layout_of=path)
    for path in (
        "../secret",
        "/etc/passwd",
        "steps/0000000009-a0001/index-n0000.safetensors",
        "steps/0000000003-a0001/index-n0000.safetensors",
        "steps/0000000001-a0001/index-n0000.safetensors",
        "steps/0000000001-a0001/n0000-00.safetensors",
        "holdfast.json",
        5,
        ["x"],
        {"a": 1},
    )
}
LIES |= {
    "metadata of numbers": lambda c, m: m.update(version=1),
    "no metadata": lambda c, m: m.clear(),
    "features that are a list": lambda c, m: m.update(features=["x"]),
    "another layout digest": lambda c, m: m.update(layout="0" * 32),
    "no part": lambda c, m: c.pop("part.json"),
    "a part that is no JSON": lambda c, m: c.update({"part.json": np.zeros(9, np.uint8)}),
    "a part in depth": lambda c, m: c.update({"part.json": np.frombuffer(b"[" * 99_999, np.uint8)}),
    "no columns at all": lambda c, m: c.clear(),
    "a column no array can be": lambda c, m: c.update(x=Raw("U8", [0, 2**70], b"")),
    "a column of a hundred dimensions": lambda c, m: c.update(x=Raw("U8", [1] * 100, b"x")),
    "a column of floats": lambda c, m: c.update(x=Raw("F32", [1], bytes(4))),
}
