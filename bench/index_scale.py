"""The index at scale: ten million chunks written, opened again and searched for one tensor, through the shipped code.

`python -m bench.index_scale [CHUNKS]` prints one JSON object. What is timed begins when the columns are there and ends when the
chunks of the tensor are known; the columns themselves are made before, as plans are. Peak memory is that of the whole process.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import holdfast
from holdfast.format.columns import Columns, Strings
from holdfast.format.records import Commit
from holdfast.run.cover import prove_cover
from holdfast.run.decide import combine, decide, publish_part
from holdfast.run.history import History, claim_attempt, create_run
from holdfast.run.parts import Part
from holdfast.store.local import LocalStore
from holdfast.version import VERSION

CHUNKS_IN_A_TENSOR = 25
CHUNK_BYTES = 4 << 20
FOLDER = "steps/0000000001-a0001"


def columns_of(chunks: int) -> Columns:
    """The index of a state of `chunks` chunks of 4 MiB, in tensors of 25 chunks, in files of 65,536 entries."""
    tensors = chunks // CHUNKS_IN_A_TENSOR
    names = sorted(f"optimizer.model.layers.{i % 128}.experts.{i // 128}.w.exp_avg" for i in range(tensors))
    files = -(-tensors // 65_536)
    rows = np.arange(chunks, dtype=np.int64)
    columns: Columns = {}
    Strings.of(names).write(columns, "tensor.name")
    Strings.of([json.dumps(name.split(".", 1)) for name in names]).write(columns, "tensor.path")
    for name, texts in (
        ("dtype.name", ["float32"]),
        ("role.name", ["optimizer"]),
        ("codec.json", [json.dumps(["raw", 1, ""])]),
        ("file.path", [f"steps/0000000001-a0001/n{i:04d}-00.safetensors" for i in range(files)]),
        ("file.stamp", [""] * files),
    ):
        Strings.of(texts).write(columns, name)
    columns["tensor.dtype"] = np.zeros(tensors, np.uint8)
    columns["tensor.role"] = np.zeros(tensors, np.uint16)
    columns["tensor.shape.offsets"] = columns["entry.box.offsets"] = np.arange(tensors + 1, dtype=np.int64)
    columns["tensor.shape"] = np.full(tensors, CHUNKS_IN_A_TENSOR * CHUNK_BYTES // 4, np.int64)
    columns["tensor.entries"] = np.arange(tensors + 1, dtype=np.int64)
    columns["entry.box"] = np.stack([np.zeros(tensors, np.int64), columns["tensor.shape"]], axis=1).reshape(-1)
    columns["entry.chunks"] = np.arange(0, chunks + 1, CHUNKS_IN_A_TENSOR, dtype=np.int64)
    columns["chunk.raw_start"] = rows % CHUNKS_IN_A_TENSOR * CHUNK_BYTES
    columns["chunk.raw_bytes"] = columns["chunk.stored_bytes"] = np.full(chunks, CHUNK_BYTES, np.uint32)
    columns["chunk.file"] = (rows // CHUNKS_IN_A_TENSOR // 65_536).astype(np.uint32)
    columns["chunk.offset"] = 4096 + rows % (65_536 * CHUNKS_IN_A_TENSOR) * CHUNK_BYTES
    columns["chunk.digest"] = np.random.default_rng(0).integers(0, 256, (chunks, 16), np.uint8)
    columns["file.step"] = columns["file.attempt"] = np.ones(files, np.int64)
    columns["file.bytes"] = np.full(files, 4096 + 65_536 * CHUNKS_IN_A_TENSOR * CHUNK_BYTES, np.int64)
    columns["file.header_bytes"] = np.full(files, 4096, np.int64)
    columns["file.digest"] = np.zeros((files, 16), np.uint8)
    return columns


def write(store: LocalStore, columns: Columns) -> int:
    """Publish the index and commit the step, as a save does after its data files; returns the bytes of the index."""
    run = create_run(store, VERSION).run
    claim_attempt(History(store), run, "start", None, None)
    part = Part(writer="n0000", step=1, attempt=1, roles={"optimizer": "optimizer"})
    ref, _ = publish_part(store, FOLDER, part, columns)
    record = Commit(decision="committed", run=run, step=1, attempt=1, created=time.time())
    record, index, _ = combine(record, [(columns, part, ref)], FOLDER)
    prove_cover(index)
    decide(store, FOLDER, record)
    return ref.bytes


def make_data_files(root: str, columns: Columns) -> None:
    """Files of the sizes that the index names, without blocks: opening a step opens its files, and reads nothing of them."""
    for path, nbytes in zip(Strings.read(columns, "file.path"), columns["file.bytes"].tolist(), strict=True):
        (Path(root) / path).parent.mkdir(parents=True, exist_ok=True)
        with open(Path(root) / path, "wb") as file:
            file.truncate(nbytes)


def main() -> None:
    chunks = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000
    columns = columns_of(chunks)
    wanted = f"optimizer.model.layers.77.experts.{chunks // CHUNKS_IN_A_TENSOR // 256}.w.exp_avg"
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        make_data_files(folder, columns)
        tensors = len(columns["tensor.dtype"])
        start = time.perf_counter()
        nbytes = write(LocalStore(folder), columns)
        written = time.perf_counter()
        del columns
        with holdfast.open(folder) as checkpoint:
            tensor = checkpoint.tensor(wanted)
            found = checkpoint.index.chunks(checkpoint.index.entries(tensor)[0], tensor.row)
        done = time.perf_counter()
    assert tensor.name == wanted
    assert len(found) == CHUNKS_IN_A_TENSOR
    print(
        json.dumps(
            {
                "chunks": chunks,
                "tensors": tensors,
                "file_bytes": nbytes,
                "write_seconds": round(written - start, 3),
                "open_and_search_seconds": round(done - written, 3),
                "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )
    )


if __name__ == "__main__":
    main()
