"""From what one writer wrote to the columns of its index part."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..format.codec import Codec
from ..format.columns import Columns, Strings
from ..format.digest import DIGEST_BYTES
from ..format.names import stored_path
from .contents import TensorItem
from .files import Placed
from .merge import offsets_of, write_file_table

_encode = json.JSONEncoder(separators=(",", ":")).encode


def build_columns(items: Sequence[TensorItem], placed: Placed) -> Columns:
    """The index columns of one writer's part."""
    entries = sorted((i for i in items if i.source is not None), key=lambda i: (i.name.encode(), i.key, i.box_shape))
    known: dict[str, TensorItem] = {}
    for item in items:
        known.setdefault(item.name, item)
    order = {name: number for number, name in enumerate(known)}  # the same for all ranks, whatever each of them writes
    items = sorted(known.values(), key=lambda item: item.name.encode())
    rows = {item.name: row for row, item in enumerate(items)}
    dtypes, roles = sorted({i.dtype for i in items}), sorted({i.role for i in items})
    columns: Columns = {}
    Strings.of([i.name for i in items]).write(columns, "tensor.name")
    Strings.of([_encode(stored_path(i.path)) for i in items]).write(columns, "tensor.path")
    Strings.of(dtypes).write(columns, "dtype.name")
    Strings.of(roles).write(columns, "role.name")
    codecs = sorted(range(len(placed.codecs)), key=lambda row: (row > 0, _codec_json(placed.codecs[row])))  # `raw` is the first
    Strings.of([_codec_json(placed.codecs[row]) for row in codecs]).write(columns, "codec.json")
    columns["tensor.dtype"] = np.array([dtypes.index(i.dtype) for i in items], np.uint8)
    columns["tensor.role"] = np.array([roles.index(i.role) for i in items], np.uint16)
    columns["tensor.shape.offsets"] = offsets_of([len(i.shape) for i in items])
    columns["tensor.shape"] = np.array([d for i in items for d in i.shape], np.int64)
    columns["tensor.order"] = np.array([order[i.name] for i in items], np.int64)
    columns["tensor.owner"] = np.array([rows.get(i.owner or "", -1) for i in items], np.int64)
    columns["tensor.alias"] = np.array([rows[i.alias] if i.alias else -1 for i in items], np.int64)

    counts = dict.fromkeys(order, 0)
    for entry in entries:
        counts[entry.name] += 1
    columns["tensor.entries"] = offsets_of([counts[i.name] for i in items])
    columns["entry.box.offsets"] = offsets_of([len(i.shape) for i in entries])
    columns["entry.box"] = np.array([x for i in entries for x in (*i.key[1], *i.box_shape)], np.int64)
    places = [placed.places[i.key] for i in entries]
    columns["entry.chunks"] = offsets_of([len(p.file) for p in places])

    def joined(name: str, kind: type) -> np.ndarray:
        return np.concatenate([getattr(p, name) for p in places] or [np.zeros(0)]).astype(kind)

    columns["chunk.raw_start"] = joined("raw_start", np.int64)
    columns["chunk.raw_bytes"] = joined("raw_bytes", np.uint32)
    columns["chunk.file"] = joined("file", np.uint32)
    columns["chunk.offset"] = joined("offset", np.int64)
    columns["chunk.stored_bytes"] = joined("stored_bytes", np.uint32)
    if len(codecs) > 1:
        columns["chunk.codec"] = np.argsort(codecs)[joined("codec", np.int64)].astype(np.uint16)
    columns["chunk.digest"] = np.concatenate([np.zeros((0, DIGEST_BYTES), np.uint8), *(p.digest for p in places)])
    write_file_table(columns, placed.files)
    return columns


def _codec_json(codec: Codec) -> str:
    return json.dumps([codec.name, codec.version, codec.parameters])
