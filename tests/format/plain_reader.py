"""A reader of runs, written from docs/format.md alone: json, struct and numpy; xxhash only to check digests.

It knows nothing of holdfast's code and nothing of torch. Where it refuses, it raises `Refused`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex128": 16, "complex64": 8, "int64": 8, "int32": 4, "int16": 2,
    "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
DEFAULTS = {"tensor.owner": -1, "tensor.alias": -1, "chunk.codec": 0, "chunk.algorithm": 1}
FRESH = ("chunk.digest", "chunk.algorithm", "file.")
COLUMN_KINDS = {"U8": "|u1", "U16": "<u2", "U32": "<u4", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


class Refused(Exception):
    """What the document says a reader must refuse."""


def digest(data: Any) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(bytes(data))


# --- records ----------------------------------------------------------------------------------------------------------


def unseal(data: bytes) -> dict[str, Any]:
    body, tail = data[:-50], data[-50:]
    if tail != b',\n  "check": "%s"\n}\n' % digest(body).hex().encode():
        raise Refused("the seal is broken")
    record: dict[str, Any] = json.loads(data.decode())
    if record["format"] != 1 or record.get("required_features"):
        raise Refused("a later version")
    return record


def lineage(attempts: dict[int, Any], checkpoints: list[tuple[int, int]]) -> list[tuple[int, int]]:
    bound: dict[int, float] = {}
    number, last = max(attempts, default=None), float("inf")
    while number is not None and number not in bound:
        bound[number] = last
        parent = attempts[number].get("parent")
        number, last = (parent["attempt"], min(last, parent["step"])) if parent else (None, 0)
    return sorted(c for c in checkpoints if c[0] <= bound.get(c[1], -1))


# --- names and values -------------------------------------------------------------------------------------------------


def logical_name(path: list[Any]) -> str:
    def component(part: Any) -> str:
        text = part if isinstance(part, str) else json.dumps(part, separators=(",", ":"))
        text = "".join(f"%{ord(c):02X}" if c in "%@\x7f" or c < " " else c for c in text)
        return "%5F_metadata__" if text == "__metadata__" else text

    return ".".join(map(component, path))


def safe(path: str) -> str:
    if any(p in ("", ".", "..") for p in path.split("/")) or "\\" in path or any(c < " " for c in path):
        raise Refused(f"the path {path!r}")
    return path


def value(data: Any) -> Any:
    """Typed JSON as a Python value; for tags that only Python has a meaning for, a (tag, body) pair."""
    if isinstance(data, list):
        return [value(v) for v in data]
    if not isinstance(data, dict):
        return data
    tag, body = next(iter(data.items())) if len(data) == 1 else ("", None)
    if not tag.startswith("$"):
        return {k: value(v) for k, v in data.items()}
    simple: dict[str, Callable[[Any], Any]] = {
        "$int": int,
        "$float": lambda b: struct.unpack(">d", bytes.fromhex(b))[0],
        "$utf16": lambda b: base64.b64decode(b).decode("utf-16-le", "surrogatepass"),
        "$bytes": base64.b64decode,
        "$bytearray": lambda b: bytearray(base64.b64decode(b)),
        "$tuple": lambda b: tuple(map(value, b)),
        "$set": lambda b: set(map(value, b)),
        "$frozenset": lambda b: frozenset(map(value, b)),
        "$dict": lambda b: {value(k): value(v) for k, v in b},
        "$odict": lambda b: {value(k): value(v) for k, v in b},
        "$complex": lambda b: complex(value(b[0]), value(b[1])),
        "$range": lambda b: range(*b),
        "$numpy": lambda b: np.frombuffer(base64.b64decode(b[1]), b[0])[0],
    }
    return simple[tag](body) if tag in simple else (tag, body)


def canonical(data: Any) -> str:
    """Canonical JSON, as the content digest takes it."""
    if isinstance(data, dict):
        items = sorted(data.items(), key=lambda item: item[0].encode())
        return "{" + ",".join(f"{canonical(k)}:{canonical(v)}" for k, v in items) + "}"
    if isinstance(data, list):
        return "[" + ",".join(map(canonical, data)) + "]"
    if isinstance(data, str):
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
        return '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in data) + '"'
    return canonical_float(data) if isinstance(data, float) else json.dumps(data)


def canonical_float(number: float) -> str:
    mantissa, _, power = repr(abs(number)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits, point = (whole + fraction).lstrip("0"), len(whole) + int(power or 0)
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0") or "0"
    sign = "-" if np.signbit(number) else ""
    if number == 0:
        return f"{sign}0.0"
    if -5 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    if 0 < point <= 16:
        return f"{sign}{digits.ljust(point, '0')[:point]}.{digits[point:] or '0'}"
    return f"{sign}{digits[0]}{'.' if digits[1:] else ''}{digits[1:]}e{point - 1}"


# --- columns ----------------------------------------------------------------------------------------------------------


def safetensors(data: bytes) -> tuple[dict[str, Any], dict[str, str], int]:
    """Entries by key, metadata, and the bytes before the first entry."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return header, header.pop("__metadata__", {}), 8 + length


def columns_of(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    header, metadata, base = safetensors(data)
    columns = {}
    for name, entry in header.items():
        start, stop = (base + o for o in entry["data_offsets"])
        columns[name] = np.frombuffer(data[start:stop], COLUMN_KINDS[entry["dtype"]]).reshape(entry["shape"])
    return columns, metadata


def strings(columns: dict[str, np.ndarray], table: str) -> list[str]:
    at, data = columns[f"{table}.offsets"].tolist(), columns[f"{table}.bytes"].tobytes()
    return [data[a:b].decode() for a, b in itertools.pairwise(at)]


def layout_digest(columns: dict[str, np.ndarray]) -> str:
    layout = sorted(n for n in columns if not n.startswith(FRESH) and n != "part.json")
    return digest(
        b"".join(f"{n}:{columns[n].dtype.str}:{columns[n].shape};".encode() + columns[n].tobytes() for n in layout)
    ).hex()


def content_digest(columns: dict[str, np.ndarray], values: Any, rank_values: Any) -> str:
    names = [
        "tensor.name.offsets", "tensor.name.bytes", "tensor.dtype", "tensor.shape.offsets", "tensor.shape", "tensor.alias",
        "tensor.entries", "entry.box", "entry.chunks", "chunk.raw_bytes", "chunk.digest",
    ]  # fmt: skip
    text = "\n".join(strings(columns, "dtype.name")).encode()
    text += b"".join(columns[n].tobytes() for n in names if n in columns)
    return digest(text + canonical([values, rank_values]).encode()).hex()


# --- codecs -----------------------------------------------------------------------------------------------------------


def decode(codec: list[Any], stored: bytes, raw_bytes: int) -> bytes:
    name, version, parameters = codec
    known = {"raw": {""}, "zstd": {""}, "planes": {"2", "4", "8"}, "int8": {'"float32"', '"bfloat16"', '"float16"'}}
    if version != 1 or parameters not in known.get(name, ()):
        raise Refused(f"the codec {codec}")
    if name == "zstd":
        stored = frame(stored, raw_bytes)
    elif name == "planes":
        stored = planes(stored, raw_bytes, int(parameters))
    elif name == "int8":
        stored = int8(stored, raw_bytes, parameters.strip('"'))
    if len(stored) != raw_bytes:
        raise Refused("a chunk of another length")
    return stored


def frame(stored: bytes, length: int) -> bytes:
    import zstandard

    with zstandard.ZstdDecompressor().stream_reader(stored) as reader:
        content: bytes = reader.read(length + 1)
    if len(content) != length:
        raise Refused("a frame of another length")
    return content


def planes(stored: bytes, raw_bytes: int, item: int) -> bytes:
    """One item after the other, byte by byte from its planes."""
    widths = {2: [1, 1], 4: [2, 1, 1], 8: [4, 2, 1, 1]}[item]
    items, at, parts = raw_bytes // item, 4 * len(widths), []
    for width, length in zip(widths, struct.unpack_from(f"<{len(widths)}I", stored), strict=True):
        plane = stored[at : at + length]
        plane = plane if length == items * width else frame(plane, items * width)
        parts.append(np.frombuffer(plane, np.uint8).reshape(items, width))
        at += length
    if len(stored) - at != raw_bytes % item:
        raise Refused("planes of other lengths")
    return np.hstack(parts).tobytes() + stored[at:]


def int8(stored: bytes, raw_bytes: int, dtype: str) -> bytes:
    """The numbers that the codes stand for, block by block."""
    items = raw_bytes // ITEM_BYTES[dtype]
    blocks = -(-items // 256)
    if len(stored) != 4 + 4 * blocks + items or stored[:4] not in (b"\0\0\0\0", b"\1\0\0\0"):
        raise Refused("damaged int8")
    numbers = np.empty(items, np.float32)
    for block, scale in enumerate(struct.unpack_from(f"<{blocks}f", stored, 4)):
        codes = np.frombuffer(stored, np.uint8, min(256, items - 256 * block), 4 + 4 * blocks + 256 * block)
        shares = (codes / 255.0) ** 2 if stored[0] else codes.view(np.int8).astype(np.float32) / np.float32(127)
        numbers[256 * block : 256 * (block + 1)] = shares.astype(np.float32) * np.float32(scale)
    if dtype != "bfloat16":
        return numbers.astype("<f4" if dtype == "float32" else "<f2").tobytes()
    bits = numbers.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


# --- runs -------------------------------------------------------------------------------------------------------------


class Checkpoint:
    """One checkpoint of one writer. `tensors`: name to (dtype, shape, row-major bytes); `values`: name to value."""

    def __init__(self, run: str, folder: str) -> None:
        self.run = run
        self.commit = unseal(self._read(f"{folder}/commit.json"))
        if self.commit["decision"] != "committed":
            raise Refused("aborted")
        (part,) = self.commit["parts"]
        data = self._read(safe(part["path"]))
        if digest(data).hex() != part["digest"]:
            raise Refused("the index differs from its digest")
        self.columns, metadata = columns_of(data)
        if metadata["holdfast"] != "index" or metadata["version"] != "1" or metadata.get("features"):
            raise Refused("a later index")
        if source := metadata.get("layout_of"):
            layout, _ = columns_of(self._read(safe(source)))
            self.columns = {n: c for n, c in layout.items() if not n.startswith(FRESH)} | self.columns
        self.columns.pop("part.json", None)
        if layout_digest(self.columns) != metadata["layout"]:
            raise Refused("the layout differs from its digest")
        self.values = {logical_name(p): value(v) for p, v in self.commit["values"] if not (isinstance(v, dict) and "$node" in v)}
        self.files = strings(self.columns, "file.path")
        self.codecs = [json.loads(c) for c in strings(self.columns, "codec.json")]
        self.tensors = self._tensors()

    def _read(self, path: str, start: int = 0, size: int = -1) -> bytes:
        with open(os.path.join(self.run, path), "rb") as file:
            file.seek(start)
            return file.read(size)

    def column(self, name: str, row: int) -> int:
        return int(self.columns[name][row]) if name in self.columns else DEFAULTS[name]

    def rows(self, name: str, row: int) -> range:
        return range(*self.columns[name][row : row + 2].tolist())

    def _tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        columns, found = self.columns, {}
        names, dtypes = strings(columns, "tensor.name"), strings(columns, "dtype.name")
        self.paths = {n: json.loads(p) for n, p in zip(names, strings(columns, "tensor.path"), strict=True)}
        for row, name in enumerate(names):
            alias = self.column("tensor.alias", row)
            holder = row if alias < 0 else alias
            dtype = dtypes[self.column("tensor.dtype", row)]
            shape = tuple(columns["tensor.shape"][list(self.rows("tensor.shape.offsets", row))].tolist())
            whole = np.zeros(shape, np.dtype((np.void, ITEM_BYTES[dtype])))
            for entry in self.rows("tensor.entries", holder):
                dims = self.rows("entry.box.offsets", entry)
                box = columns["entry.box"][2 * dims.start : 2 * dims.stop].tolist()
                offset, extent = box[: len(dims)], box[len(dims) :]
                raw = b"".join(self._chunk(chunk) for chunk in self.rows("entry.chunks", entry))
                region = tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))
                whole[region] = np.frombuffer(raw, whole.dtype).reshape(extent) if raw else whole[region]
            found[name] = (dtype, shape, whole.tobytes())
        return found

    def _chunk(self, chunk: int) -> bytes:
        codec = self.codecs[self.column("chunk.codec", chunk)]
        size = self.column("chunk.stored_bytes", chunk)
        raw = self._read(safe(self.files[self.column("chunk.file", chunk)]), self.column("chunk.offset", chunk), size)
        if len(raw) != size:
            raise Refused("a short file")
        raw = decode(codec, raw, self.column("chunk.raw_bytes", chunk))
        if digest(raw) != self.columns["chunk.digest"][chunk].tobytes():
            raise Refused("a chunk differs from its digest")
        return raw


def checkpoints(run: str) -> dict[tuple[int, int], str]:
    """Directories by (step, attempt) of the lineage, ascending."""

    def record(path: str) -> dict[str, Any]:
        with open(os.path.join(run, path), "rb") as file:
            return unseal(file.read())

    run_id = record("holdfast.json")["run"]
    attempts = {int(n[:-5]): record(f"attempts/{n}") for n in os.listdir(f"{run}/attempts")}
    found = {}
    for name in sorted(os.listdir(f"{run}/steps")):
        if os.path.exists(f"{run}/steps/{name}/commit.json"):
            commit = record(f"steps/{name}/commit.json")
            if commit["decision"] == "committed" and commit["run"] == run_id and commit["kind"] == "full":
                found.setdefault((commit["step"], commit["attempt"]), f"steps/{name}")
    return {ref: found[ref] for ref in lineage(attempts, list(found))}
