"""A directory of safetensors files, or one such file, opened as a checkpoint: the index points into the files, nothing is copied.

Names get the role `model`: `wte.weight` in the file is `model.wte.weight` here. There are no digests to check against.
"""

from __future__ import annotations

import json
import os

import numpy as np

from ..errors import Corrupt, NoCheckpoint, Unsupported
from ..format import datafile
from ..format.columns import Columns, Strings
from ..format.digest import DIGEST_BYTES
from ..format.dtypes import BY_TAG
from ..format.index import NO_DIGEST, Index
from ..format.names import dotted, safe_path
from ..format.records import Commit
from ..loading.checkpoint import Checkpoint
from ..plan.image import chunk_grid
from ..store.local import LocalStore

ROLE = "model"
_INDEX = "model.safetensors.index.json"


def open_safetensors(path: str) -> Checkpoint:
    """Open `path`, a directory of `*.safetensors` (with or without an index) or one file.

    Raises:
        NoCheckpoint: there are no such files.  Corrupt: not valid safetensors, or the index names what is not there.
        Unsupported: a dtype without a stored form.
    """
    folder, names = _files(path)
    weights = _weight_map(folder) if len(names) > 1 or os.path.isdir(path) else None
    if weights is not None:
        names = sorted(set(weights.values()))
    store = LocalStore(folder)
    tensors: dict[str, tuple[int, datafile.Entry, int]] = {}
    sizes = []
    for number, name in enumerate(names):
        entries, header_bytes, size = read_header(os.path.join(folder, name))
        sizes.append(size)
        for entry in entries:
            if entry.key in tensors:
                raise Corrupt(f"{entry.key} stands in {names[tensors[entry.key][0]]} and in {name} of {folder}", file=name)
            if entry.tag not in BY_TAG:
                raise Unsupported(f"{entry.key} in {name} has dtype {entry.tag}, which holdfast has no stored form for")
            tensors[entry.key] = (number, entry, header_bytes)
    for key, name in (weights or {}).items():
        if key not in tensors or names[tensors[key][0]] != name:
            raise Corrupt(f"{_INDEX} in {folder} says that {key} is in {name}, where it is not", file=name, tensor=key)
    columns = _columns(tensors, names, sizes)
    commit = Commit(
        decision="committed", kind="virtual", run=folder, step=0, attempt=0, roles={ROLE: "module"}, tensors=len(tensors),
        raw_bytes=sum(e.stop - e.start for _, e, _ in tensors.values()),
    )  # fmt: skip
    return Checkpoint(store, commit, Index(columns, folder))


def read_header(path: str) -> tuple[list[datafile.Entry], int, int]:
    """Entries, bytes before the first entry, and size of a safetensors file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = datafile.header_length(prefix, size, path)
        entries, _ = datafile.parse_header(prefix + file.read(length - 8), size, path)
    return entries, length, size


def _files(path: str) -> tuple[str, list[str]]:
    if os.path.isfile(path):
        return os.path.dirname(os.path.abspath(path)), [os.path.basename(path)]
    names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors")) if os.path.isdir(path) else []
    if not names:
        raise NoCheckpoint(f"there are no safetensors files in {path}")
    return os.path.abspath(path), names


def _weight_map(folder: str) -> dict[str, str] | None:
    """The index's map from tensor to file, or None where there is no index."""
    try:
        with open(os.path.join(folder, _INDEX)) as file:
            weights = json.load(file)["weight_map"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupt(f"{_INDEX} in {folder} is damaged: {error}", file=_INDEX) from error
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise Corrupt(f"{_INDEX} in {folder} is damaged: weight_map is no map from tensors to files", file=_INDEX)
    for key, name in weights.items():
        if not os.path.isfile(os.path.join(folder, safe_path(name, _INDEX))):
            raise Corrupt(f"{_INDEX} in {folder} says that {key} is in {name}, which is not there", file=name, tensor=key)
    return weights


def _columns(tensors: dict[str, tuple[int, datafile.Entry, int]], names: list[str], sizes: list[int]) -> Columns:
    keys = sorted(tensors, key=lambda key: dotted((ROLE, key)).encode())
    rows = [tensors[key] for key in keys]
    kinds = [BY_TAG[entry.tag].name for _, entry, _ in rows]
    dtypes = sorted(set(kinds))
    grids = [chunk_grid(entry.stop - entry.start) for _, entry, _ in rows]
    flat = [
        (number, head + entry.start, start, size)
        for (number, entry, head), grid in zip(rows, grids, strict=True)
        for start, size in grid
    ]
    table = np.array(flat, np.int64).reshape(-1, 4)
    columns: Columns = {}
    for name, texts in (
        ("tensor.name", [dotted((ROLE, key)) for key in keys]), ("tensor.path", [json.dumps([ROLE, key]) for key in keys]),
        ("dtype.name", dtypes), ("role.name", [ROLE]), ("codec.json", [json.dumps(["raw", 1, ""])]), ("file.path", names),
        ("file.stamp", [""] * len(names)),
    ):  # fmt: skip
        Strings.of(texts).write(columns, name)
    dims = [len(entry.shape) for _, entry, _ in rows]
    columns["tensor.dtype"] = np.array([dtypes.index(kind) for kind in kinds], np.uint8)
    columns["tensor.role"] = np.zeros(len(keys), np.uint16)
    columns["tensor.shape.offsets"] = columns["entry.box.offsets"] = _offsets(dims)
    columns["tensor.shape"] = np.array([d for _, e, _ in rows for d in e.shape], np.int64)
    columns["tensor.entries"] = np.arange(len(keys) + 1)
    columns["entry.box"] = np.array([d for _, e, _ in rows for d in (*(0,) * len(e.shape), *e.shape)], np.int64)
    columns["entry.chunks"] = _offsets([len(grid) for grid in grids])
    columns["chunk.file"], columns["chunk.offset"] = table[:, 0].astype(np.uint32), table[:, 1] + table[:, 2]
    columns["chunk.raw_start"] = table[:, 2]
    columns["chunk.raw_bytes"] = columns["chunk.stored_bytes"] = table[:, 3].astype(np.uint32)
    columns["chunk.digest"] = np.zeros((len(table), DIGEST_BYTES), np.uint8)
    columns["chunk.algorithm"] = np.full(len(table), NO_DIGEST, np.uint8)
    columns["file.step"] = columns["file.attempt"] = np.full(len(names), -1, np.int64)
    columns["file.bytes"] = np.array(sizes, np.int64)
    columns["file.header_bytes"] = np.zeros(len(names), np.int64)
    columns["file.digest"] = np.zeros((len(names), DIGEST_BYTES), np.uint8)
    return columns


def _offsets(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
