"""Tools to damage a saved run: flip, cut and replace bytes; rewrite a record or an index so that every digest is right again.

What is "lied" with `rewrite_index` is sealed, digested and named by the commit record as if holdfast had written it: only the
checks behind the digests can find it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

import holdfast
from holdfast.format.index import content_digest
from holdfast.run.parts import values_bytes

CHUNK = 4 << 20
TAGS = {"|u1": "U8", "<u2": "U16", "<i2": "I16", "<u4": "U32", "<i4": "I32", "<i8": "I64"}
KINDS = {tag: kind for kind, tag in TAGS.items()}
HEADROOM_BYTES = 3 << 30
"""Address space that a refusal may need: threads, buffers, caches. What a lie asks for is far more."""
PATIENCE_SECONDS = 20.0


# --- a run to damage --------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """A few tensors; one of several chunks, one whose memory is not contiguous, one tied, one empty, one scalar."""

    def __init__(self, big: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.big = torch.nn.Parameter(torch.rand(big, generator=generator))
        self.frozen = torch.nn.Parameter(torch.rand(3, 5, generator=generator).to(torch.bfloat16), requires_grad=False)
        self.small = torch.nn.Parameter(torch.rand(4, 6, generator=generator))
        self.tied = self.small
        self.turned = torch.nn.Parameter(torch.rand(6, 4, generator=generator).t())
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 3))


def make_state(big: int = (9 << 20) // 8) -> dict[str, Any]:
    """A model and a dict, with a tensor of `big` fp32 elements: by default 4.5 MiB, two chunks."""
    return {
        "model": Model(big),
        "progress": {"epoch": 3, "seen": 2**60, "name": "naïve", "tuple": (1, -0.0), "tensor": torch.arange(5)},
    }


def change(state: dict[str, Any], by: float = 1.0) -> None:
    """What a step of training would: everything but the big and the frozen tensor, and the values."""
    with torch.no_grad():
        state["model"].small.add_(by)
        state["model"].turned.mul_(1 + by)
        state["model"].count.add_(1)
    state["progress"]["epoch"] += 1


def make_run(path: Path, big: int = (9 << 20) // 8) -> dict[int, dict[str, Any]]:
    """Steps 1, 2 and 3; the later ones have the big tensor in the files of step 1. A pin on 2, a note on 3. What each holds."""
    state, held = make_state(big), {}
    for step in (1, 2, 3):
        if step > 1:
            change(state)
        holdfast.save(str(path), state, step, metrics={"loss": 1.0 / step})
        held[step] = holdfast.load(str(path))
    run = holdfast.Run(str(path))
    run.pin(2, "kept")
    run.note(3, {"accuracy": 0.5})
    return held


def copy_of(run: Path, target: Path) -> Path:
    """A run of its own that shares its files with the original until they are replaced."""
    shutil.copytree(run, target, copy_function=os.link)
    return target


@dataclass(frozen=True)
class Kinds:
    """Where each kind of file of a run lies, for the step `step`."""

    run: Path
    step: int = 3

    @property
    def folder(self) -> Path:
        (found,) = (self.run / "steps").glob(f"{self.step:010d}-a0001*")
        return found

    def path(self, kind: str) -> Path:
        plain = {
            "run": self.run / "holdfast.json",
            "attempt": self.run / "attempts" / "0001.json",
            "commit": self.folder / "commit.json",
        }
        if kind in plain:
            return plain[kind]
        (found,) = {
            "index": self.folder.glob("index-*"),
            "data": self.folder.glob("n0000-*"),
            "pin": (self.run / "pins").iterdir(),
            "note": (self.run / "notes").iterdir(),
        }[kind]
        return Path(found)

    def name(self, kind: str) -> str:
        """The file's path from the run's root, as messages give it."""
        return str(self.path(kind).relative_to(self.run))


# --- bytes ------------------------------------------------------------------------------------------------------------


def put(path: Path, data: bytes | bytearray) -> None:
    """Replace a file; whatever else is linked to the old one keeps it."""
    path.unlink()
    path.write_bytes(data)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    put(path, data)


def cut(path: Path, length: int) -> None:
    put(path, path.read_bytes()[:length])


def seal(body: bytes) -> bytes:
    return body + b',\n  "check": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def rewrite_record(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a record's fields, and seal it again. `edit` may return another object, or bytes, to be sealed instead."""
    record = json.loads(path.read_bytes())
    record.pop("check")
    edited = edit(record)
    record = record if edited is None else edited
    body = record if isinstance(record, bytes) else json.dumps(record, indent=2, ensure_ascii=False).encode()[: -len(b"\n}")]
    put(path, seal(body))


# --- an index that lies -----------------------------------------------------------------------------------------------


@dataclass
class Raw:
    """A column by hand: any tag, any shape, whatever bytes."""

    tag: str
    shape: list[Any]
    data: bytes


Columns = dict[str, Any]
"""Column name to numpy array, or Raw."""


def read_columns(path: Path) -> tuple[Columns, dict[str, Any]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + length])
    metadata = table.pop("__metadata__")
    columns: Columns = {}
    for name, slot in table.items():
        start, stop = (8 + length + o for o in slot["data_offsets"])
        columns[name] = np.frombuffer(data[start:stop], KINDS[slot["dtype"]]).reshape(slot["shape"]).copy()
    return columns, metadata


def write_columns(path: Path, columns: Columns, metadata: dict[str, Any]) -> None:
    table: dict[str, Any] = {"__metadata__": metadata}
    blobs, at = [], 0
    for name, column in columns.items():
        raw = column if isinstance(column, Raw) else Raw(TAGS[column.dtype.str], list(column.shape), column.tobytes())
        table[name] = {"dtype": raw.tag, "shape": raw.shape, "data_offsets": [at, at + len(raw.data)]}
        blobs.append(raw.data)
        at += len(raw.data)
    text = json.dumps(table).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    put(path, struct.pack("<Q", len(text)) + text + b"".join(blobs))


def rewrite_index(files: Kinds, edit: Callable[[Columns, dict[str, Any]], Any], has_content: bool = True) -> None:
    """Edit the columns (and the metadata) of a step's index, and make every digest right: of part, content and record."""
    path = files.path("index")
    columns, metadata = read_columns(path)
    edit(columns, metadata)
    write_columns(path, columns, metadata)
    fix_digests(files, columns if has_content else None)


def fix_digests(files: Kinds, columns: Columns | None = None) -> None:
    """Make the commit record name the index as it is now; with `columns`, their content digest, too."""
    data = files.path("index").read_bytes()

    def edit(record: dict[str, Any]) -> None:
        record["parts"][0] |= {"bytes": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
        if columns is not None:
            with contextlib.suppress(Exception):
                arrays = {n: c for n, c in columns.items() if not isinstance(c, Raw)}
                record["content_digest"] = content_digest(arrays, values_bytes(record["values"], record["rank_values"]))

    rewrite_record(files.path("commit"), edit)


def table(columns: Columns, name: str) -> list[bytes]:
    at, data = columns[f"{name}.offsets"].tolist(), columns[f"{name}.bytes"].tobytes()
    return [data[a:b] for a, b in itertools.pairwise(at)]


def put_table(columns: Columns, name: str, texts: list[bytes]) -> None:
    columns[f"{name}.offsets"] = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    columns[f"{name}.bytes"] = np.frombuffer(b"".join(texts), np.uint8)


def spread(columns: Columns, name: str) -> list[list[int]]:
    """A column of offsets and what it points into, `NAME.offsets` and `NAME`, as a list for each row."""
    at, data = columns[f"{name}.offsets"].tolist(), columns[name].tolist()
    return [data[a:b] for a, b in itertools.pairwise(at)]


def row_of(columns: Columns, name: str) -> int:
    return table(columns, "tensor.name").index(name.encode())


# --- within bounds ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """Fails what takes long or asks for much memory: an allocation beyond HEADROOM_BYTES is a MemoryError."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM_BYTES, hard))
    start = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - start < PATIENCE_SECONDS
