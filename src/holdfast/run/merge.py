"""One index from the parts of several writers, and what building one part shares with that."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..errors import Refused
from ..format.columns import Array, Columns, Strings
from ..format.digest import DIGEST_BYTES
from ..format.index import FileRow, Index, is_fresh
from ..format.names import stored_path


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
    columns["tensor.shape.offsets"] = offsets_of([len(t.shape) for t in tensors])
    columns["tensor.shape"] = np.array([d for t in tensors for d in t.shape], np.int64)
    columns["tensor.owner"] = np.array(
        [rows[indexes[first[n][0]].names[owner_of[n]]] if owner_of[n] >= 0 else -1 for n in names], np.int64
    )
    columns["tensor.alias"] = np.array(
        [rows[indexes[first[t.name][0]].canonical(t).name] if t.alias >= 0 else -1 for t in tensors], np.int64
    )
    columns["tensor.entries"] = offsets_of([len(e) for e in entries])
    columns["entry.box.offsets"] = offsets_of([len(e[0]) for e in flat])
    columns["entry.box"] = np.array([x for e in flat for x in (*e[0], *e[1])], np.int64)
    for _, _, number, entry in flat:
        chunk_rows.append(indexes[number].chunks(entry))
    columns["entry.chunks"] = offsets_of([len(c) for c in chunk_rows])
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
    write_file_table(columns, [f for index in indexes for f in index.files()])
    return columns


def write_file_table(columns: Columns, files: Sequence[FileRow]) -> None:
    """The columns of the file table."""
    Strings.of([f.path for f in files]).write(columns, "file.path")
    Strings.of([f.stamp for f in files]).write(columns, "file.stamp")
    columns["file.step"] = np.array([f.step for f in files], np.int64)
    columns["file.attempt"] = np.array([f.attempt for f in files], np.int64)
    columns["file.bytes"] = np.array([f.nbytes for f in files], np.int64)
    columns["file.header_bytes"] = np.array([f.header_bytes for f in files], np.int64)
    columns["file.digest"] = np.frombuffer(b"".join(f.digest for f in files), np.uint8).reshape(-1, DIGEST_BYTES)


def offsets_of(counts: Sequence[int] | Sequence[bool]) -> Array:
    """Offsets of runs of these lengths: one more than there are runs, beginning at 0."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.asarray(counts, np.int64), out=offsets[1:])
    return offsets
