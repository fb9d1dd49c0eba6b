"""A reader that was written from docs/format.md alone reads what holdfast saves, and the document's test vectors hold."""

from __future__ import annotations

import collections
import datetime
import json
import math
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
import xxhash
from conftest import build_awkward_state

import holdfast
from holdfast.api import state_contents
from holdfast.coding import coder_of
from holdfast.format import datafile, index, names, records, values
from holdfast.format.codec import Codec, decode
from holdfast.format.digest import LogicalDigest, digest, element_bits
from holdfast.run.parts import values_bytes
from holdfast.run.session import Session
from holdfast.state import State
from holdfast.store.local import LocalStore

from . import plain_reader as reader

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "format.md").read_text()


# --- a checkpoint -----------------------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any, dict[str, Any]]:
    """Three checkpoints: the last has most of its bytes in the files of earlier ones. And the state it was saved from."""
    model, optimizer, extras = build_awkward_state()
    extras["tensors"]["long"] = torch.arange((5 << 20) // 4, dtype=torch.int32)
    state = {"model": model, "optimizer": optimizer, "extras": extras}
    path = str(tmp_path_factory.mktemp("saved") / "run")
    holdfast.save(path, state, 1)
    holdfast.save(path, state, 2, metrics={"loss": 0.5})
    with torch.no_grad():
        model.temperature.add_(1)
        model.blocks[3].adapter.mul_(-1)
    extras["epoch"] = 4
    holdfast.save(path, state, 3)
    return path, model, optimizer, extras


def test_the_reader_finds_the_lineage(run: tuple[Any, ...], tmp_path: Path) -> None:
    path = shutil.copytree(run[0], tmp_path / "copy")
    assert list(reader.checkpoints(path)) == [(1, 1), (2, 1), (3, 1)]
    holdfast.Run(path).rollback(2)
    holdfast.save(path, {"a": torch.ones(2)}, 5)
    found = list(reader.checkpoints(path))
    assert [step for step, _ in found] == [1, 2, 5]
    assert found == [(s.step, s.attempt) for s in holdfast.Run(path).steps()]


def test_the_reader_gives_every_bit_of_an_awkward_state(run: tuple[Any, ...]) -> None:
    path, model, optimizer, extras = run
    found = reader.Checkpoint(path, reader.checkpoints(path)[3, 1])
    expected = {f"model.{k}": v for k, v in model.state_dict().items()}
    parameters = {p: f"model.{n}" for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        expected |= {f"optimizer.{parameters[parameter]}.{k}": v for k, v in state.items()}
    expected |= {f"extras.tensors.{k}": v for k, v in extras["tensors"].items()}
    assert len(expected) > 300
    assert {str(t.dtype) for t in expected.values()} >= {"torch.float32", "torch.bfloat16", "torch.int64"}
    assert set(found.tensors) == set(expected)
    for name, tensor in expected.items():
        dtype, shape, raw = found.tensors[name]
        assert (dtype, shape) == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), name
        assert raw == raw_bytes(tensor), name
        assert reader.logical_name(found.paths[name]) == name


def test_most_of_those_bytes_lie_in_an_earlier_checkpoint(run: tuple[Any, ...]) -> None:
    found = reader.Checkpoint(run[0], reader.checkpoints(run[0])[3, 1])
    assert found.commit["references"]
    owners = {path.split("/")[1] for path in found.files}
    assert len(owners) > 1
    assert max(found.columns["entry.chunks"][1:] - found.columns["entry.chunks"][:-1]) > 1


def test_the_reader_gives_the_values(run: tuple[Any, ...]) -> None:
    path, _, optimizer, extras = run
    found = reader.Checkpoint(path, reader.checkpoints(path)[3, 1]).values
    assert found["extras.epoch"] == 4
    assert found["extras.samples"] == extras["samples"]
    assert struct.pack("<d", found["extras.best"]) == struct.pack("<d", -0.0)
    assert found["extras.worst"] == math.inf
    assert math.isnan(found["extras.undefined"])
    assert found["extras.name"] == extras["name"]
    assert found["extras.sizes"] == extras["sizes"]
    assert found["extras.by_layer.0"] == "first"
    assert found["extras.by_layer.extra.dotted"] == extras["by_layer"]["extra.dotted"]
    assert found["optimizer.param_groups.1.betas"] == optimizer.param_groups[1]["betas"]
    assert "model.blocks.0.adapter" in found["optimizer.param_groups.0.params"]


def test_the_reader_finds_the_same_content_digest(run: tuple[Any, ...]) -> None:
    path = run[0]
    for folder in reader.checkpoints(path).values():
        found = reader.Checkpoint(path, folder)
        computed = reader.content_digest(found.columns, found.commit["values"], found.commit["rank_values"])
        assert computed == found.commit["content_digest"]


def test_the_data_files_are_what_the_commit_record_says(run: tuple[Any, ...]) -> None:
    path = run[0]
    for folder in reader.checkpoints(path).values():
        for file in reader.Checkpoint(path, folder).commit["files"]:
            data = Path(path, file["path"]).read_bytes()
            entries, metadata, start = reader.safetensors(data)
            assert (len(data), start) == (file["bytes"], file["header_bytes"])
            assert start % 4096 == 0
            assert xxhash.xxh3_128_hexdigest(data[:start]) == file["digest"]
            assert (metadata["format"], metadata["holdfast"]) == ("pt", "1")
            spans = sorted(e["data_offsets"] for e in entries.values())
            assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
            assert spans[-1][1] == len(data) - start


def test_a_self_contained_step_is_plain_safetensors(run: tuple[Any, ...]) -> None:
    from safetensors.torch import load_file

    path, model = run[0], run[1]
    (file,) = Path(path, "steps", "0000000001-a0001").glob("n*.safetensors")
    tensors = load_file(file)
    assert raw_bytes(tensors["model.norm.weight"]) == raw_bytes(model.norm.weight)
    assert tensors["model.transposed"].shape == (7, 13)


# --- coded checkpoints ------------------------------------------------------------------------------------------------

DECODERS: dict[str, Any] = {}
for _block in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL):
    exec(_block, DECODERS)
CODINGS: list[Any] = ["zstd", "planes", {"optimizer.*.exp_avg*": "int8", "*": "planes"}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("coding", CODINGS, ids=str)
def test_the_reader_and_the_decoders_of_the_document_give_what_holdfast_loads(
    coding: Any, dtype: torch.dtype, tmp_path: Path
) -> None:
    if isinstance(coding, dict) and dtype == torch.float64:
        coding = "planes"  # moments in double precision are not stored lossy
    torch.manual_seed(0)
    model = torch.nn.Linear(301, 257).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)  # not 0 in half precision
    for _ in range(2):
        model(torch.randn(5, 301, dtype=dtype)).square().mean().backward()
        optimizer.step()
    contents, _ = state_contents(State(model=model, optimizer=optimizer), None)
    Session(LocalStore(tmp_path), {}).save(contents, 1, coding=coder_of(coding))
    found = reader.Checkpoint(str(tmp_path), "steps/0000000001-a0001")
    names = {codec[0] for codec in found.codecs}
    assert names == {"raw", *({coding} if isinstance(coding, str) else {"int8", "planes"})}
    with holdfast.open(tmp_path) as checkpoint:
        for name in checkpoint.names:
            loaded = raw_bytes(checkpoint[name][:] if checkpoint[name].shape else checkpoint[name][()])
            assert found.tensors[name][2] == loaded, name
    for chunk, size in enumerate(found.columns["chunk.raw_bytes"].tolist()):
        file = Path(tmp_path, found.files[found.column("chunk.file", chunk)]).read_bytes()
        start, stored = found.column("chunk.offset", chunk), found.column("chunk.stored_bytes", chunk)
        raw = DECODERS["decode"](found.codecs[found.column("chunk.codec", chunk)], file[start : start + stored], size)
        assert digest(raw.tobytes()) == found.columns["chunk.digest"][chunk].tobytes()


@pytest.mark.parametrize("codec", [["planes", 2, "4"], ["planes", 1, ""], ["int8", 1, '"float64"'], ["lz4", 1, ""]], ids=str)
def test_the_reader_refuses_codecs_that_the_document_does_not_have(codec: list[Any]) -> None:
    with pytest.raises(reader.Refused, match="the codec"):
        reader.decode(codec, bytes(100), 100)


def test_the_reader_refuses_a_changed_byte(run: tuple[Any, ...], tmp_path: Path) -> None:
    path = shutil.copytree(run[0], tmp_path / "copy")
    (file,) = Path(path, "steps", "0000000003-a0001").glob("n*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(reader.Refused, match="digest"):
        reader.Checkpoint(path, "steps/0000000003-a0001")


# --- the document's vectors -------------------------------------------------------------------------------------------

SECTION = DOCUMENT.partition("## Test vectors")[2]
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
LINES = [tuple(line.split(" ", 1)) for block in BLOCKS for line in block.splitlines() if re.match(r"[a-z]+ ", line)]


def vectors(kind: str) -> list[str]:
    return [rest for name, rest in LINES if name == kind]


def test_the_vectors_are_found() -> None:
    assert len(BLOCKS) == 3
    assert {name for name, _ in LINES} == {"digest", "logical", "name", "value", "codec", "canonical", "header"}


def test_the_sealed_record_is_the_one_in_the_document() -> None:
    data = BLOCKS[0].encode()
    record = reader.unseal(data)
    assert (record["step"], record["metrics"]) == (1000, {"loss": 2.5})
    note = records.unseal(data, records.Note, "note")
    assert records.seal(note) == data


@pytest.mark.parametrize("line", vectors("digest"))
def test_digest(line: str) -> None:
    data, expected = line.split(" ")
    raw = bytes.fromhex(data.strip("-"))
    assert digest(raw).hex() == reader.digest(raw).hex() == expected


@pytest.mark.parametrize("line", vectors("logical"))
def test_logical_digest(line: str) -> None:
    dtype, shape, data, expected = line.split(" ")
    raw = bytes.fromhex(data.strip("-"))
    found = LogicalDigest(dtype, tuple(json.loads(shape)))
    found.add(element_bits(np.frombuffer(raw, np.uint8), reader.ITEM_BYTES[dtype]), 0)
    assert found.hex() == expected
    shown: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL):
        exec(block, shown)
    assert shown["logical_digest"](dtype, tuple(json.loads(shape)), raw, reader.ITEM_BYTES[dtype]) == expected


@pytest.mark.parametrize("line", vectors("name"))
def test_name(line: str) -> None:
    path, expected = line.split(" -> ")
    assert names.dotted(json.loads(path)) == reader.logical_name(json.loads(path)) == expected


@pytest.mark.parametrize("line", vectors("value"))
def test_value(line: str) -> None:
    python, expected = line.split(" -> ")
    known = {"collections": collections, "datetime": datetime, "numpy": numpy, "float": float, "complex": complex}
    original = eval(python, known)
    assert values.encode(original, "value") == json.loads(expected)
    decoded = values.decode(json.loads(expected))
    assert type(decoded) is type(original)
    assert repr(decoded) == repr(original)
    if "timedelta" not in python:
        assert repr(reader.value(json.loads(expected))).replace("OrderedDict", "") == repr(
            dict(original) if isinstance(original, dict) else original
        )


@pytest.mark.parametrize("line", vectors("codec"))
def test_codec(line: str) -> None:
    coded, expected = line.split(" -> ")
    text, stored = coded.split(" ")
    codec, data, raw = json.loads(text), bytes.fromhex(stored), bytes.fromhex(expected)
    assert bytes(decode(Codec(*codec), data, len(raw))) == raw
    assert reader.decode(codec, data, len(raw)) == raw
    assert DECODERS["decode"](codec, data, len(raw)).tobytes() == raw


def test_canonical_json() -> None:
    (line,) = vectors("canonical")
    plain, expected = line.split(" -> ")
    data = json.loads(plain)
    assert reader.canonical(data) == expected
    assert values_bytes(data, {}).decode() == f"[{expected},{{}}]"


@pytest.mark.parametrize("number", [1.0, -2.5, 1e15, 9999999999999998.0, 1e16, 1.2e-5, 9.9e-6, 5e-324, 1.7976931348623157e308])
def test_floats_are_written_as_the_document_says(number: float) -> None:
    assert values_bytes([number], {}).decode() == f"[[{reader.canonical(number)}],{{}}]"


def test_header() -> None:
    (line,) = vectors("header")
    text, numbers = line.split(" -> ")
    length, first, expected = numbers.split(" ")
    table = json.loads(text)
    metadata = table.pop("__metadata__")
    entries = [datafile.Entry(key, e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for key, e in table.items()]
    bound = datafile.header_bound([e.key for e in entries], [len(e.shape) for e in entries], metadata)
    header = datafile.build_header(entries, metadata, bound)
    assert (len(header), header[:8].hex(), digest(header).hex()) == (int(length), first, expected)
    assert header[8:].rstrip(b" ").decode() == text
    assert reader.safetensors(header)[0] == table


def test_content_and_layout_digest() -> None:
    table = json.loads(BLOCKS[2])
    columns = {n: np.frombuffer(bytes.fromhex(c[2]), c[0]).reshape(c[1]) for n, c in table.items() if "." in n}
    plain = table["values"]
    assert index.content_digest(columns, values_bytes(plain, {})) == table["content"]
    assert reader.content_digest(columns, plain, {}) == table["content"]
    assert index.layout_digest(columns) == reader.layout_digest(columns) == table["layout"]
