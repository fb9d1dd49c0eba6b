"""One measurement at scale, in a process of its own on one core: `python -m bench.scale_measure WHAT MODEL RANKS DIRECTORY`.

Each function runs the shipped code and returns seconds, bytes and counts; peak memory is that of its process, mapped files
included.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import msgspec
import numpy as np

import holdfast
from bench.scale_models import JOBS, TARGETS, Job
from bench.scale_parts import FOLDER, PARTS
from holdfast.format.index import Index
from holdfast.layout import layouts
from holdfast.layout.boxes import intersect, volume
from holdfast.layout.layouts import Mesh, Shard
from holdfast.plan.load import LoadPlan, Wanted, plan_load
from holdfast.run import write
from holdfast.run.census import Census, Common, Structure, compare
from holdfast.run.contents import Contents, TensorItem
from holdfast.run.decide import gather_parts
from holdfast.run.image import ArraySource
from holdfast.run.joint import Joint
from holdfast.run.marks import intent
from holdfast.run.proof import digest_by_holders
from holdfast.run.session import Session
from holdfast.run.shares import plan, structure_of, written_by
from holdfast.run.team import Said, Team
from holdfast.run.unite import writer_of
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore

LIBRARIES = {"holdfast": holdfast.__version__}
REPEATS = 5
RUN = "run"
"""Below the directory that has the parts."""


class Clock:
    """Seconds since it was made: of the wall's clock, and of the processor, which other programs do not lengthen."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._start[0], time.process_time() - self._start[1]


def seconds(name: str, found: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_seconds": found[0], f"{name}_cpu_seconds": found[1]}


def some_ranks(job: Job) -> list[int]:
    """The first, one in the middle, and the last."""
    return [0, job.ranks // 2 + 1, job.ranks - 1]


def memory() -> dict[str, int]:
    """Peak resident bytes of this process, and how many of those resident now are mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        name: int(lines[key].split()[0]) * 1024 for name, key in (("peak_bytes", "VmHWM"), ("mapped_bytes_at_the_end", "RssFile"))
    }


# --- the plan of a save -----------------------------------------------------------------------------------------------


def share(model: str, ranks: int, root: str) -> dict[str, Any]:
    """What one rank, and the leader, compute when the structure has changed; and what a rank computes at every save."""
    job = replace(JOBS[model](ranks), streams=False)
    per = job.ranks_in_stage
    tables = [structure_of(job.contents(stage * per)).encode() for stage in range(job.stages)]
    groups = tuple(tuple(range(stage * per, (stage + 1) * per)) for stage in range(job.stages))
    leader, answer = [], b""
    for _ in range(REPEATS):
        start = time.perf_counter()
        answer = compare([Structure.decode(table) for table in tables], groups).encode()
        leader.append(time.perf_counter() - start)
    first: list[tuple[float, float]] = []
    steady, messages = [], []
    for rank in some_ranks(job):
        contents = job.contents(rank)
        for _ in range(REPEATS):
            layouts._grid.cache_clear()
            clock = Clock()
            structure = structure_of(contents)
            digest = structure.digest()
            known = clock.read()[0]
            census = Census(structure, Common.decode(answer), rank)
            planned = plan(contents, census)
            first.append(clock.read())
            clock = Clock()
            written_by(planned, contents)
            steady.append(known + clock.read()[0])
        begin = {"structure": digest, "census": census.common.digest(), "kind": "full", "metrics": {}}
        proofs = digest_by_holders({holding.name: (holding.holders, "0" * 32) for holding in planned.undeclared})
        messages.append(sum(len(msgspec.msgpack.encode(Said(said))) for said in (begin, {"proofs": proofs, "part": "0" * 32})))
    return {
        "leader_compare_seconds": median(leader),
        "structures": len(tables),
        "answer_bytes": len(answer),
        **seconds("share", (median(wall for wall, _ in first), median(cpu for _, cpu in first))),
        **seconds("share_worst", max(first)),
        "steady_plan_seconds": median(steady),
        "steady_bytes_of_a_rank": max(messages),
    } | memory()


# --- the commit -------------------------------------------------------------------------------------------------------


def commit(model: str, ranks: int, root: str) -> dict[str, Any]:
    """The leader's work after all have written: parts read, merged, proved, the whole index written, the step committed."""
    laps: dict[str, float] = {}

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            clock = Clock()
            try:
                return work(*arguments, **options)
            finally:
                laps.update(seconds(name, clock.read()))

        return run

    digests = json.loads((Path(root) / PARTS / "digests.json").read_text())
    store = LocalStore(Path(root) / RUN)
    session = Session(store, LIBRARIES)
    record, parents = session.record(1, world=ranks)
    os.rename(Path(root) / PARTS / "steps", Path(root) / RUN / "steps")  # no session finds steps before its first attempt
    with ExitStack() as stack:
        for name in ("combine", "prove_cover", "publish_part", "decide"):
            stack.enter_context(mock.patch.object(write, name, timed(name, getattr(write, name))))
        expires = stack.enter_context(intent(store, 1, record.attempt, parents)).record.expires
        may_commit = timed("may_commit", lambda found, needed: session.may_commit(found, needed, expires))
        clock = Clock()
        writers = [writer_of(rank) for rank in range(ranks)]
        parts = gather_parts(store, FOLDER, writers, time.monotonic() + 600, digests)
        laps |= seconds("gather", clock.read())
        step = write.settle(store, FOLDER, record, parts, parts[0][2].path, may_commit, write.Decision())
        laps |= seconds("commit", clock.read())
    assert step is not None
    return (
        {
            "tensors": step.commit.tensors,
            "state_bytes": step.commit.raw_bytes,
            "index_bytes": step.commit.parts[0].bytes,
            "record_bytes": store.size(f"{FOLDER}/commit.json"),
        }
        | laps
        | memory()
    )


# --- opening, and the plan of a load ----------------------------------------------------------------------------------


def load(model: str, ranks: int, root: str) -> dict[str, Any]:
    """A rank of another layout opens the step and plans what it reads."""
    clock = Clock()
    with holdfast.open(Path(root) / RUN) as checkpoint:
        opened = clock.read()
        index = checkpoint.index
        rows = {tensor.name: tensor for tensor in index.tensors()}
        plans = [_plan(target, rank, index, rows) for target in TARGETS[model] for rank in some_ranks(target)]
        return {
            "entries": index.entry_count,
            "chunks": index.chunk_count,
            "files": index.file_count,
            **seconds("open", opened),
            "load_plan_seconds": max(found["plan_seconds"] for found in plans),
            "load_plan_cpu_seconds": max(found["plan_cpu_seconds"] for found in plans),
            "load_plans": plans,
        } | memory()


def _plan(target: Job, rank: int, index: Index, rows: dict[str, Any]) -> dict[str, Any]:
    tensors = target.tensors(rank // target.ranks_in_stage)
    layouts._grid.cache_clear()
    clock = Clock()
    wanted = [Wanted(rows[t.name], piece.box) for t in tensors for piece in t.layout.pieces(t.shape, rank)]
    boxed = clock.read()
    found = plan_load(index, wanted)
    chunks = index.all_chunks().take(found.chunks)
    done = clock.read()
    _check(index, wanted, found)
    return {
        "target": target.title,
        "rank": rank,
        "wanted_boxes": len(wanted),
        "joins": len(found.wanted),
        "chunks": len(found.chunks),
        "files": len(np.unique(chunks.file)),
        "over_read": int(chunks.raw_bytes.sum(dtype=np.int64)) / sum(volume(w.box) * w.tensor.dtype.itemsize for w in wanted) - 1,
        **seconds("boxes", boxed),
        **seconds("plan", done),
    }


def _check(index: Index, wanted: Sequence[Wanted], found: LoadPlan) -> None:
    """Each wanted element is met once, and each chunk read once."""
    met = [0] * len(wanted)
    for number, entry in zip(found.wanted.tolist(), found.entry.tolist(), strict=True):
        part = intersect(index.box(wanted[number].tensor, entry), wanted[number].box)
        assert part is not None
        met[number] += volume(part)
    assert met == [volume(want.box) for want in wanted]
    assert len(np.unique(found.chunks)) == len(found.chunks)


# --- what ranks say ---------------------------------------------------------------------------------------------------


class Counted:
    """A rank's place at a board in this process's memory, that counts what the rank posts."""

    def __init__(self, notes: dict[str, bytes], news: threading.Condition) -> None:
        self._notes, self._news = notes, news
        self.posted_bytes = self.posts = 0

    def post(self, key: str, data: bytes) -> None:
        self.posted_bytes += len(key) + len(data)
        self.posts += 1
        with self._news:
            self._notes[key] = data
            self._news.notify_all()

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        with self._news:
            return self._news.wait_for(lambda: all(key in self._notes for key in keys), seconds)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        with self._news:
            return [self._notes[key] for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        with self._news:
            for key in keys:
                self._notes.pop(key, None)

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        with self._news:
            if self._notes.get(key, b"") == expected:
                self.post(key, data)
            return self._notes.get(key, expected)

    def decide(self, key: str, data: bytes) -> bytes:
        return self.swap(key, b"", data)


def small_state(rank: int, ranks: int, tensors: int) -> Contents:
    """Sharded tensors, each with a plain scalar."""
    mesh = Mesh(tuple(range(ranks)), (ranks,), (Shard(0),))
    items, known = [], {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        box = mesh.pieces((ranks * 4,), rank)[0].box
        path = ("model", f"layers.{number}.weight")
        items.append(TensorItem(name, path, "float32", (ranks * 4,), "model", ArraySource(bytes(16)), box=box))
        items.append(TensorItem(f"{name}.step", (*path, "step"), "float32", (), "model", ArraySource(bytes(4))))
        known[name] = mesh
    return Contents(items, [[["model", "lr"], 0.1]], {}, {"model": "dict"}, known)


def said(ranks: int, tensors: int) -> dict[str, Any]:
    """The bytes that ranks post in the first and in the third of three saves, by `Joint.save` of all of them in threads."""
    store, notes, news = MemoryStore(), {}, threading.Condition()
    boards = [Counted(notes, news) for _ in range(ranks)]
    posted: list[list[int]] = []

    def saves(rank: int, step: int) -> None:
        made = small_state(rank, ranks, tensors)
        joints[rank].save(lambda: (made, "full"), lambda: Session(store, LIBRARIES), step, 60.0)

    joints = [Joint(Team(tuple(range(ranks)), rank, board), store) for rank, board in enumerate(boards)]
    for step in (1, 2, 3):
        before = [board.posted_bytes for board in boards]
        threads = [threading.Thread(target=saves, args=(rank, step)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        posted.append([board.posted_bytes - b for board, b in zip(boards, before, strict=True)])
    return {
        "ranks": ranks,
        "tensors": 2 * tensors,
        "first_bytes_of_a_rank": max(posted[0][1:]),
        "steady_bytes_of_a_rank": max(posted[2][1:]),
        "steady_bytes_of_the_leader": posted[2][0],
    }


def messages(model: str, ranks: int, root: str) -> dict[str, Any]:
    return {"said": [said(number, tensors) for number in (2, 4, 16) for tensors in (5, 50, 500)]}


MEASUREMENTS = {"share": share, "commit": commit, "load": load, "messages": messages}


def main() -> None:
    what, model, ranks, root = sys.argv[1:5]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = MEASUREMENTS[what](model, int(ranks), root)
    print(json.dumps(found, default=lambda value: math.nan))


if __name__ == "__main__":
    main()
