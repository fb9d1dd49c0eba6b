"""Index parts of all ranks of a job, made fast: what each rank would have written, with random digests, and no data.

Who writes what is the shipped `plan.save.shares`; tables are those of the shipped `build_columns`. Only what is equal for many
ranks is made once for them, and what is left are columns. `check` compares with the long way, rank by rank.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from bench.scale_models import ITEM_BYTES, JOBS, ROLES, Job
from holdfast.format.columns import Columns
from holdfast.format.index import FileRow
from holdfast.format.names import step_dir
from holdfast.format.records import FileRef
from holdfast.plan.image import CHUNK_BYTES, chunk_grid, file_order
from holdfast.plan.save import Holding, Share, shares
from holdfast.run.assemble import build_columns
from holdfast.run.census import Census, compare
from holdfast.run.decide import publish_part
from holdfast.run.files import Placed, Placement
from holdfast.run.merge import offsets_of, write_file_table
from holdfast.run.parts import Part
from holdfast.run.shares import plan, structure_of, written_by
from holdfast.run.unite import writer_of
from holdfast.store.local import LocalStore

FOLDER = step_dir(1, 1)
PARTS = "parts"
"""Below the directory: where they wait for the run's first attempt."""
HEADER_BYTES = 64 << 10
BUSY = 2
"""Processes that make parts."""


class Quick(LocalStore):
    """A local store that does not wait for the disk."""

    def create(self, path: str, data: Any, sync: bool = True) -> None:
        super().create(path, data, sync=False)


def census_of(job: Job, rank: int) -> Census:
    """What a rank knows of the others, streams aside."""
    job = replace(job, streams=False)
    per = job.ranks_in_stage
    structures = [structure_of(job.contents(stage * per)) for stage in range(job.stages)]
    groups = [range(stage * per, (stage + 1) * per) for stage in range(job.stages)]
    return Census(structures[rank // per], compare(structures, groups), rank)


class Stage:
    """The ranks of one pipeline stage."""

    def __init__(self, job: Job, stage: int, census: Census) -> None:
        self.job, self._common = job, census.common
        contents = job.contents(stage * job.ranks_in_stage)
        self.structure, self.values = structure_of(contents), contents.values
        self.tensors = job.tensors(stage)
        known = {item.name: replace(item, source=None, box=None) for item in contents.tensors if item.role != "rng"}
        self.table = build_columns(list(known.values()), Placed())
        in_order = sorted(known, key=str.encode)
        rows = {name: row for row, name in enumerate(in_order)}
        self.row = np.array([rows[tensor.name] for tensor in self.tensors])
        self.itemsize = np.array([ITEM_BYTES[tensor.dtype] for tensor in self.tensors])
        self._items = list(known.values())
        self._alike: dict[tuple[Any, ...], int] = {}
        self._kind = [self._alike.setdefault((tensor.shape, tensor.layout), n) for n, tensor in enumerate(self.tensors)]

    def shares(self, rank: int) -> list[Share]:
        """What a rank writes; the keys are the numbers of the tensors."""
        census = Census(self.structure, self._common, rank)
        found: dict[int, tuple[Any, Any]] = {}
        holdings = []
        for number, (tensor, kind) in enumerate(zip(self.tensors, self._kind, strict=True)):
            if kind not in found:
                pieces = tensor.layout.pieces(tensor.shape, rank)
                found[kind] = [p.box for p in pieces], census.holders(tensor.name, tensor.shape, tensor.layout)[0]
            boxes, holders = found[kind]
            holdings += [Holding(number, tensor.name, box, ITEM_BYTES[tensor.dtype], holders) for box in boxes]
        for number, item in enumerate(self.job.streams_of(rank), len(self.tensors)):
            holdings.append(Holding(number, item.name, ((0,), item.shape), 1, (rank,)))
        return shares(holdings, rank)

    def columns(self, rank: int, digests: np.random.Generator) -> tuple[Columns, FileRef]:
        """A rank's index part, and its data file."""
        mine, streams = self.shares(rank), self.job.streams_of(rank)
        table, row, itemsize = self.table, self.row, self.itemsize
        if streams:
            last = len(self.tensors) + np.argsort(np.argsort([item.name for item in streams]))  # names that sort after all others
            table = build_columns([*self._items, *(replace(item, source=None) for item in streams)], Placed())
            row, itemsize = np.append(row, last), np.append(itemsize, np.ones(len(streams), np.int64))
        number = np.array([share.key for share in mine], np.int64)
        ndim = np.array([len(share.box[0]) for share in mine], np.int64)
        raw = np.array([math.prod(share.box[1]) for share in mine], np.int64) * itemsize[number]
        start = np.empty(len(mine), np.int64)
        order = file_order(itemsize[number].tolist())
        start[order] = HEADER_BYTES + np.cumsum(raw[order]) - raw[order]
        by_name = np.argsort(row[number], kind="stable")  # the pieces of a tensor are in order already
        chunks = -(-raw // CHUNK_BYTES)[by_name]
        first = offsets_of(chunks)
        at = (np.arange(int(first[-1])) - np.repeat(first[:-1], chunks)) * CHUNK_BYTES
        columns = dict(table)
        columns["tensor.entries"] = offsets_of(np.bincount(row[number], minlength=len(row)))
        columns["entry.box.offsets"] = offsets_of(ndim[by_name])
        columns["entry.box"] = np.array([x for n in by_name.tolist() for side in mine[n].box for x in side], np.int64)
        columns["entry.chunks"] = first
        columns["chunk.raw_start"], columns["chunk.offset"] = at, np.repeat(start[by_name], chunks) + at
        size = np.minimum(np.repeat(raw[by_name], chunks) - at, CHUNK_BYTES).astype(np.uint32)
        columns["chunk.raw_bytes"] = columns["chunk.stored_bytes"] = size
        columns["chunk.file"] = np.zeros(len(at), np.uint32)
        columns["chunk.digest"] = digests.integers(0, 256, (len(at), 16), np.uint8)
        file = FileRow(
            f"{FOLDER}/{writer_of(rank)}-00.safetensors", 1, 1, HEADER_BYTES + int(raw.sum()), "", HEADER_BYTES, bytes(16)
        )
        write_file_table(columns, [file] if len(mine) else [])
        return columns, FileRef(path=file.path, bytes=file.nbytes, header_bytes=HEADER_BYTES, digest="00" * 16)

    def check(self, rank: int, census: Census) -> None:
        """Refuse to go on if the columns are not those of the shipped code, all the way."""
        contents = self.job.contents(rank)
        mine = written_by(plan(contents, census), contents).tensors
        ours, file = self.columns(rank, np.random.default_rng(rank))
        held = [item for item in mine if item.source is not None]
        at = HEADER_BYTES
        placed = Placed(files=[FileRow(file.path, 1, 1, file.bytes, "", HEADER_BYTES, bytes(16))])
        for n in file_order([ITEM_BYTES[item.dtype] for item in held]):
            grid = np.array(chunk_grid(held[n].source.nbytes), np.int64).reshape(-1, 2)
            blank = np.zeros((len(grid), 16), np.uint8)
            placed.places[held[n].key] = Placement(
                np.zeros(len(grid)), at + grid[:, 0], grid[:, 0], grid[:, 1], grid[:, 1], blank, np.zeros(len(grid), np.int64)
            )
            at += held[n].source.nbytes
        theirs = build_columns(mine, placed)
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert name == "chunk.digest" or np.array_equal(ours[name], theirs[name]), (rank, name)


@dataclass(frozen=True)
class Task:
    """Some stages of a job, whose parts one process makes."""

    model: str
    ranks: int
    stages: tuple[int, ...]
    root: str

    def run(self) -> list[tuple[int, str]]:
        """The digest of each rank's part."""
        return list(self._parts())

    def _parts(self) -> Iterator[tuple[int, str]]:
        job, store = JOBS[self.model](self.ranks), Quick(self.root)
        for number in self.stages:
            low = number * job.ranks_in_stage
            census = census_of(job, low)
            stage = Stage(job, number, census)
            if not job.streams:  # with them, no census of so many ranks comes to an end
                stage.check(low, census)
            digests = np.random.default_rng(number)
            for rank in range(low, low + job.ranks_in_stage):
                columns, file = stage.columns(rank, digests)
                part = Part(writer=writer_of(rank), step=1, attempt=1, files=[file], values=stage.values, roles=ROLES)
                ref, _ = publish_part(store, FOLDER, part, columns)
                with open(Path(self.root) / file.path, "wb") as data:
                    data.truncate(file.bytes)
                yield rank, ref.digest


def make(model: str, ranks: int, root: str) -> dict[str, Any]:
    """Write all parts, and data files of their sizes without blocks; the parts' digests go into `digests.json`."""
    root = f"{root}/{PARTS}"
    (Path(root) / FOLDER).mkdir(parents=True)
    stages = JOBS[model](ranks).stages
    tasks = [Task(model, ranks, tuple(range(n, stages, BUSY)), root) for n in range(BUSY)]
    with get_context("spawn").Pool(BUSY) as pool:
        digests = dict(pair for found in pool.map(Task.run, tasks) for pair in found)
    (Path(root) / "digests.json").write_text(json.dumps([digests[rank] for rank in range(ranks)]))
    nbytes = sum(entry.stat().st_size for entry in os.scandir(Path(root) / FOLDER) if entry.name.startswith("index-"))
    return {"parts": ranks, "part_bytes": nbytes}


if __name__ == "__main__":
    print(json.dumps(make(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
