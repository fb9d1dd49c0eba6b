"""Writing a checkpoint for others: sharded safetensors as Hugging Face lays them out, or one torch file.

One tensor at a time is in memory. The target appears whole or not at all: files are written beside it under a name of their own
and renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import Refused, Unsupported
from ..format import datafile
from ..format.dtypes import dtype
from ..loading.checkpoint import Checkpoint
from ..patterns import as_list, matches_any

FORMATS = ("safetensors", "hf", "torch")
_PIECE_BYTES = 64 << 20


def export_checkpoint(
    checkpoint: Checkpoint,
    target: Any,
    to: str,
    select: str | Sequence[str] | None,
    cast: Mapping[str, Any],
    max_shard_bytes: int,
) -> list[str]:
    """See `holdfast.export`."""
    if to not in FORMATS:
        raise Unsupported(f"cannot export to {to!r}; known: {', '.join(FORMATS)}")
    path = os.path.abspath(os.fspath(target))
    if (os.path.isdir(path) and os.listdir(path)) or os.path.isfile(path):
        raise Refused(f"{path} exists and is not empty; give another target")
    patterns = as_list(select) or (
        ["*"] if to != "hf" else [f"{r}.*" for r, kind in checkpoint.commit.roles.items() if kind == "module"]
    )
    if to == "torch":
        return [_export_torch(checkpoint, path, patterns, cast)]
    names = _distinct(checkpoint, [n for n in checkpoint.names if matches_any(n, patterns)])
    if not names:
        raise Refused(f"nothing in step {checkpoint.step} of {checkpoint.store.url} matches {', '.join(patterns)}")
    plan = [(_outer_name(checkpoint, name, to), name, _cast_to(name, checkpoint[name].dtype, cast)) for name in names]
    outer = [name for name, _, _ in plan]
    if twice := [name for name, count in Counter(outer).items() if count > 1]:
        raise Refused(f"two modules have {', '.join(twice)}; select one, or export to safetensors, which keeps roles")
    scratch = f"{path}.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch)
    try:
        written = _write_shards(checkpoint, plan, scratch, max_shard_bytes)
        if os.path.isdir(path):
            os.rmdir(path)
        os.rename(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return [os.path.join(path, name) for name in written]


def _distinct(checkpoint: Checkpoint, names: list[str]) -> list[str]:
    """The names without those that share their memory with an earlier one of them."""
    seen: set[str] = set()
    kept = []
    for name in sorted(names, key=lambda n: checkpoint[n].alias_of is not None):
        memory = checkpoint[name].alias_of or name
        if memory not in seen:
            seen.add(memory)
            kept.append(name)
    return sorted(kept)


def _outer_name(checkpoint: Checkpoint, name: str, to: str) -> str:
    role = checkpoint[name].role
    return name.removeprefix(f"{role}.") if to == "hf" else name


def _cast_to(name: str, stored: str, cast: Mapping[str, Any]) -> str:
    wanted = next((w for pattern, w in cast.items() if matches_any(name, pattern)), stored)
    return dtype(str(wanted).removeprefix("torch.")).name


def _write_shards(checkpoint: Checkpoint, plan: list[tuple[str, str, str]], folder: str, max_shard_bytes: int) -> list[str]:
    shards: list[list[tuple[str, str, str]]] = [[]]
    filled = 0
    for item in plan:
        nbytes = _nbytes(checkpoint, item)
        if shards[-1] and filled + nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for name, shard in zip(names, shards, strict=True):
        _write_shard(checkpoint, sorted(shard, key=lambda item: -dtype(item[2]).itemsize), os.path.join(folder, name))
    if len(shards) == 1:
        return names
    index = {
        "metadata": {"total_size": sum(_nbytes(checkpoint, item) for item in plan)},
        "weight_map": {outer: name for name, shard in zip(names, shards, strict=True) for outer, _, _ in shard},
    }
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump(index, file, indent=2, sort_keys=True)
    return [*names, "model.safetensors.index.json"]


def _nbytes(checkpoint: Checkpoint, item: tuple[str, str, str]) -> int:
    tensor = checkpoint[item[1]]
    return tensor.nbytes // dtype(tensor.dtype).itemsize * dtype(item[2]).itemsize


def _write_shard(checkpoint: Checkpoint, shard: list[tuple[str, str, str]], path: str) -> None:
    entries, at = [], 0
    for item in shard:
        tag, nbytes = dtype(item[2]).tag, _nbytes(checkpoint, item)
        if tag is None:
            raise Unsupported(f"{item[1]} has dtype {item[2]}, which safetensors lacks; cast it")
        entries.append(datafile.Entry(item[0], tag, checkpoint[item[1]].shape, at, at + nbytes))
        at += nbytes
    metadata = {"format": "pt"}
    reserved = datafile.header_bound([e.key for e in entries], [max(1, len(e.shape)) for e in entries], metadata)
    with open(path, "xb") as file:
        file.write(datafile.build_header(entries, metadata, reserved))
        for _, name, kind in shard:
            for piece in _pieces(checkpoint, name, kind):
                file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _pieces(checkpoint: Checkpoint, name: str, kind: str) -> Iterator[Any]:
    """The bytes of a tensor in the dtype `kind`, at most _PIECE_BYTES at a time."""
    tensor = checkpoint.tensor(name)
    step = _PIECE_BYTES // 16 * 16
    for start in range(0, tensor.nbytes, step):
        raw = checkpoint.read_bytes(tensor, start, min(start + step, tensor.nbytes))
        if kind == tensor.dtype.name:
            yield raw.data
        else:
            import torch

            stored = torch.from_numpy(raw).view(getattr(torch, tensor.dtype.name))
            yield stored.to(getattr(torch, kind)).view(torch.uint8).numpy().data


def _export_torch(checkpoint: Checkpoint, path: str, patterns: list[str], cast: Mapping[str, Any]) -> str:
    """One file that `torch.load(weights_only=True)` reads: the whole state is in memory once."""
    import torch

    from ..loading.tree import load_tree

    tree = load_tree(checkpoint, patterns, ())
    if cast:
        raise Unsupported("cast= works for safetensors and hf; convert after torch.load instead")
    scratch = f"{path}.partial"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        torch.save(tree, scratch)
        with open(scratch, "rb") as file:
            os.fsync(file.fileno())
        os.rename(scratch, path)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise
    return path
