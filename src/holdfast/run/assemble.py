"""From what was written to the index's columns, and from the parts of several writers to one index."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..errors import Refused
from ..format.codec import RAW
from ..format.columns import Columns, Strings
from ..format.digest import DIGEST_BYTES
from ..format.index import Index, is_fresh
from ..format.names import stored_path
from .contents import TensorItem
from .files import Placed


def build_columns(items: Sequence[TensorItem], placed: Placed) -> Columns:
    """The index columns of one writer's part."""
    order = {item.name: number for number, item in enumerate(items)}
    items = sorted(items, key=lambda item: item.name.encode())
    rows = {item.name: row for row, item in enumerate(items)}
    dtypes, roles = sorted({i.dtype for i in items}), sorted({i.role for i in items})
    columns: Columns = {}
    Strings.of([i.name for i in items]).write(columns, "tensor.name")
    Strings.of([json.dumps(stored_path(i.path), separators=(",", ":")) for i in items]).write(columns, "tensor.path")
    Strings.of(dtypes).write(columns, "dtype.name")
    Strings.of(roles).write(columns, "role.name")
    Strings.of([json.dumps([RAW.name, RAW.version, RAW.parameters])]).write(columns, "codec.json")
    columns["tensor.dtype"] = np.array([dtypes.index(i.dtype) for i in items], np.uint8)
    columns["tensor.role"] = np.array([roles.index(i.role) for i in items], np.uint16)
    columns["tensor.shape.offsets"] = _offsets([len(i.shape) for i in items])
    columns["tensor.shape"] = np.array([d for i in items for d in i.shape], np.int64)
    columns["tensor.order"] = np.array([order[i.name] for i in items], np.int64)
    columns["tensor.owner"] = np.array([rows.get(i.owner or "", -1) for i in items], np.int64)
    columns["tensor.alias"] = np.array([rows[i.alias] if i.alias else -1 for i in items], np.int64)

    held = [i for i in items if i.alias is None]
    columns["tensor.entries"] = _offsets([i.alias is None for i in items])
    columns["entry.box.offsets"] = _offsets([len(i.shape) for i in held])
    boxes = [x for i in held for x in (*(i.box[0] if i.box else (0,) * len(i.shape)), *i.box_shape)]
    columns["entry.box"] = np.array(boxes, np.int64)
    places = [placed.places[i.name] for i in held]
    columns["entry.chunks"] = _offsets([len(p.file) for p in places])

    def joined(name: str, kind: type) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in places] or [np.zeros(0)]).astype(kind)

    columns["chunk.raw_start"] = joined("raw_start", np.int64)
    columns["chunk.raw_bytes"] = joined("raw_bytes", np.uint32)
    columns["chunk.file"] = joined("file", np.uint32)
    columns["chunk.offset"] = joined("offset", np.int64)
    columns["chunk.stored_bytes"] = joined("stored_bytes", np.uint32)
    columns["chunk.digest"] = np.concatenate([np.zeros((0, DIGEST_BYTES), np.uint8), *(p.digest for p in places)])
    _write_files(columns, placed)
    return columns


def _write_files(columns: Columns, placed: Placed) -> None:
    files = placed.files
    Strings.of([f.path for f in files]).write(columns, "file.path")
    Strings.of([f.stamp for f in files]).write(columns, "file.stamp")
    columns["file.step"] = np.array([f.step for f in files], np.int64)
    columns["file.attempt"] = np.array([f.attempt for f in files], np.int64)
    columns["file.bytes"] = np.array([f.nbytes for f in files], np.int64)
    columns["file.header_bytes"] = np.array([f.header_bytes for f in files], np.int64)
    columns["file.digest"] = np.frombuffer(b"".join(f.digest for f in files), np.uint8).reshape(-1, DIGEST_BYTES)


def join_layout(columns: Columns, layout: Columns) -> Columns:
    """`columns` with the layout columns of another part."""
    return {name: array for name, array in layout.items() if not is_fresh(name)} | columns


def merge_parts(parts: Sequence[Columns], where: str) -> Columns:
    """One index from the parts of several writers: tensors united by name, entries in order of their boxes.

    Raises:
        Refused: two parts give one name another dtype, shape or alias.
    """
    if len(parts) == 1:
        return parts[0]
    indexes = [Index(columns, where) for columns in parts]
    names = sorted({name for index in indexes for name in index.names}, key=str.encode)
    rows = {name: row for row, name in enumerate(names)}
    dtypes = sorted({t for c in parts for t in Strings.read(c, "dtype.name")})
    roles = sorted({t for c in parts for t in Strings.read(c, "role.name")})
    codec_table = sorted(
        {t for c in parts for t in Strings.read(c, "codec.json")}, key=lambda t: (t != json.dumps(["raw", 1, ""]), t)
    )
    first: dict[str, tuple[int, int]] = {}
    entries: list[list[tuple[tuple[int, ...], tuple[int, ...], int, int]]] = [[] for _ in names]
    for number, index in enumerate(indexes):
        for row in range(len(index)):
            tensor = index.tensor(row)
            known = first.setdefault(tensor.name, (number, row))
            other = indexes[known[0]].tensor(known[1])
            ours = (tensor.dtype, tensor.shape, index.canonical(tensor).name)
            theirs = (other.dtype, other.shape, indexes[known[0]].canonical(other).name)
            if ours != theirs:
                raise Refused(
                    f"two writers give {tensor.name} different dtypes, shapes or aliases: {theirs} and {ours} in {where}"
                )
            entries[rows[tensor.name]] += [(*index.box(tensor, e), number, e) for e in index.entries(tensor)]
    tensors = [indexes[number].tensor(row) for number, row in (first[name] for name in names)]
    owner_of = {n: indexes[i].tensor(r).owner for n, (i, r) in first.items()}
    flat = [entry for of_tensor in entries for entry in sorted(of_tensor)]
    chunk_rows, file_base, base = [], [], 0
    for index in indexes:
        file_base.append(base)
        base += index.file_count
    columns: Columns = {}
    Strings.of(names).write(columns, "tensor.name")
    Strings.of([json.dumps(stored_path(t.path), separators=(",", ":")) for t in tensors]).write(columns, "tensor.path")
    Strings.of(dtypes).write(columns, "dtype.name")
    Strings.of(roles).write(columns, "role.name")
    Strings.of(codec_table).write(columns, "codec.json")
    columns["tensor.dtype"] = np.array([dtypes.index(t.dtype.name) for t in tensors], np.uint8)
    columns["tensor.role"] = np.array([roles.index(t.role) for t in tensors], np.uint16)
    columns["tensor.shape.offsets"] = _offsets([len(t.shape) for t in tensors])
    columns["tensor.shape"] = np.array([d for t in tensors for d in t.shape], np.int64)
    columns["tensor.owner"] = np.array(
        [rows[indexes[first[n][0]].names[owner_of[n]]] if owner_of[n] >= 0 else -1 for n in names], np.int64
    )
    columns["tensor.alias"] = np.array(
        [rows[indexes[first[t.name][0]].canonical(t).name] if t.alias >= 0 else -1 for t in tensors], np.int64
    )
    columns["tensor.entries"] = _offsets([len(e) for e in entries])
    columns["entry.box.offsets"] = _offsets([len(e[0]) for e in flat])
    columns["entry.box"] = np.array([x for e in flat for x in (*e[0], *e[1])], np.int64)
    for _, _, number, entry in flat:
        chunk_rows.append(indexes[number].chunks(entry))
    columns["entry.chunks"] = _offsets([len(c) for c in chunk_rows])
    numbers = [number for _, _, number, _ in flat]
    for name, kind in (("raw_start", np.int64), ("raw_bytes", np.uint32), ("offset", np.int64), ("stored_bytes", np.uint32),
                       ("algorithm", np.uint8)):  # fmt: skip
        columns[f"chunk.{name}"] = np.concatenate([getattr(c, name) for c in chunk_rows] or [np.zeros(0)]).astype(kind)
    shifted = [c.file.astype(np.int64) + file_base[n] for c, n in zip(chunk_rows, numbers, strict=True)]
    columns["chunk.file"] = np.concatenate([np.zeros(0, np.int64), *shifted]).astype(np.uint32)
    recoded = [np.array([codec_table.index(Strings.read(parts[n], "codec.json")[x]) for x in c.codec.tolist()], np.uint16)
               for c, n in zip(chunk_rows, numbers, strict=True)]  # fmt: skip
    columns["chunk.codec"] = np.concatenate(recoded or [np.zeros(0, np.uint16)])
    columns["chunk.digest"] = np.concatenate([np.zeros((0, DIGEST_BYTES), np.uint8), *(c.digest for c in chunk_rows)])
    _write_files(columns, Placed(files=[f for index in indexes for f in index.files()]))
    return columns


def _offsets(counts: Sequence[int] | Sequence[bool]) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=offsets[1:])
    return offsets
