"""An index that lies under right digests: the checks behind the digests refuse it, in bounded time and memory.

Each lie is written with the digests of part, content and record made right, as a faulty writer would have written it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import holdfast
from holdfast import HoldfastError, Unsupported

from .lies import LIES
from .refuse import assert_same, exact_or_refused, never_wrong, refused
from .wreck import Columns, Kinds, read_columns, rewrite_index, table

Saved = tuple[Path, dict[int, dict[str, Any]]]

HARMLESS = {
    "a negative alias",
    "no part",
    "a part that is no JSON",
    "a part in depth",
    "another layout digest",
    "file.stamp of no rows",
    "the layout of 'steps/0000000003-a0001/index-n0000.safetensors'",
    "the layout of 'steps/0000000001-a0001/index-n0000.safetensors'",
}
"""What a reader may ignore, and then gives the right state."""
IN_THE_BYTES = {
    "another digest", "a file larger than it is", "an offset far away", "the other file",
    'the codec ["zstd", 1, ""]', 'the codec ["planes", 1, "4"]', 'the codec ["int8", 1, "\\"float',
}  # fmt: skip
"""What can only be found by reading the bytes; the live state is marked then."""
PLACES = ("steps/0000000003-a0001", "steps/0000000009-a0001", "model.", "progress.", "holdfast.json")


@pytest.mark.parametrize("name", LIES)
def test_the_lie_is_refused(name: str, run: Path, saved: Saved) -> None:
    (run.parent / "secret").write_bytes(bytes(8192))
    files = Kinds(run)

    def edit(columns: Columns, metadata: dict[str, Any]) -> None:
        LIES[name](columns, metadata)
        if name == "a grid that cuts elements":
            digest_again(files, columns)

    rewrite_index(files, edit)
    never_wrong(str(run), saved[1][3])
    if name in HARMLESS and exact(run, saved):
        return
    refused(str(run), *PLACES, touches=None if name in IN_THE_BYTES else False)


def exact(run: Path, saved: Saved) -> bool:
    return exact_or_refused(str(run), saved[1][3], *PLACES)


def digest_again(files: Kinds, columns: Columns) -> None:
    paths = table(columns, "file.path")
    for chunk in (0, 1):
        data = (files.run / paths[columns["chunk.file"][chunk]].decode()).read_bytes()
        start = int(columns["chunk.offset"][chunk])
        raw = data[start : start + int(columns["chunk.raw_bytes"][chunk])]
        columns["chunk.digest"][chunk] = np.frombuffer(xxhash.xxh3_128_digest(raw), np.uint8)


@pytest.mark.parametrize(
    "name",
    [
        'the codec ["planes", 1, ""]',
        'the codec ["raw", 2, ""]',
        "a dtype nobody knows",
        "a digest algorithm nobody knows",
        "strides",
    ],
)
def test_what_a_later_version_may_add_is_unsupported(name: str, run: Path) -> None:
    rewrite_index(Kinds(run), LIES[name])
    error = refused(str(run), *PLACES)
    assert isinstance(error, Unsupported)
    assert "upgrade" in str(error) or "stored form" in str(error)


def test_unknown_columns_and_metadata_are_ignored(run: Path, saved: Saved) -> None:
    rewrite_index(
        Kinds(run),
        lambda c, m: (
            c.update({"tensor.mood": np.arange(3), "file.colour": np.zeros((2, 2), np.uint8)}),
            m.update(author="later"),
        ),
    )
    columns, metadata = read_columns(Kinds(run).path("index"))
    assert "tensor.mood" in columns
    assert metadata["author"] == "later"
    assert exact(run, saved)


def test_columns_with_defaults_may_be_missing(run: Path, saved: Saved) -> None:
    rewrite_index(Kinds(run), lambda c, m: c.pop("tensor.owner"))
    assert exact(run, saved)


def test_a_free_grid_is_read(run: Path, saved: Saved) -> None:
    """Chunks of any size: here every tensor is cut into pieces of at most 40 bytes, the big one into 64 KiB."""

    def edit(c: Columns, m: dict[str, Any]) -> None:
        paths = [p.decode() for p in table(c, "file.path")]
        rows: list[tuple[int, int, int, int]] = []
        bounds = [0]
        for a, b in zip(c["entry.chunks"].tolist(), c["entry.chunks"].tolist()[1:], strict=False):
            for i in range(a, b):
                size = int(c["chunk.raw_bytes"][i])
                step = 65_536 if size > 10_000 else 40
                rows += [
                    (
                        int(c["chunk.raw_start"][i]) + at,
                        min(step, size - at),
                        int(c["chunk.file"][i]),
                        int(c["chunk.offset"][i]) + at,
                    )
                    for at in range(0, size, step)
                ]
            bounds.append(len(rows))
        data = {p: (run / p).read_bytes() for p in paths}
        c["entry.chunks"] = np.array(bounds, np.int64)
        for name, column in zip(("raw_start", "raw_bytes", "file", "offset"), zip(*rows, strict=True), strict=True):
            c[f"chunk.{name}"] = np.array(column, c[f"chunk.{name}"].dtype)
        c["chunk.stored_bytes"] = c["chunk.raw_bytes"]
        c["chunk.digest"] = np.frombuffer(
            b"".join(xxhash.xxh3_128_digest(data[paths[f]][o : o + n]) for _, n, f, o in rows), np.uint8
        ).reshape(-1, 16)

    rewrite_index(Kinds(run), edit)
    assert exact(run, saved)
    with holdfast.open(str(run)) as checkpoint:
        assert not checkpoint.verify()
        with holdfast.open(f"{run}@1") as other:
            assert checkpoint.digest("model.big") == other.digest("model.big")
    assert json.loads(Kinds(run).path("commit").read_bytes())["tensors"] == len(checkpoint.names)


@pytest.mark.parametrize("dims", [63, 64, 65, 100])
def test_a_tensor_of_many_dimensions_is_loadable_or_refused_by_the_save(dims: int, tmp_path: Path) -> None:
    tensor = torch.arange(2, dtype=torch.float32).reshape([1] * (dims - 1) + [2])
    try:
        holdfast.save(str(tmp_path / "run"), {"a": {"x": tensor}}, 1)
    except HoldfastError as error:
        assert "a.x" in str(error)
    else:
        assert_same(holdfast.load(str(tmp_path / "run"))["a"]["x"], tensor)
