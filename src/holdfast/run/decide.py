"""Parts and the decision: each writer publishes its index part; one of them decides, once, for all.

The store decides who was first. Whoever gives up waiting may publish the abort; a committer that finds one has lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..errors import Deadline, StepExists
from ..format.codec import RAW
from ..format.columns import Array, Columns, pack
from ..format.digest import Running
from ..format.index import Index, content_digest, index_metadata, is_fresh, layout_digest
from ..format.records import Commit, PartRef, StepRef, seal
from ..store.base import Store
from .history import read_record
from .merge import merge
from .parts import Part, read_part, values_bytes
from .unite import unite

_INLINE_LAYOUT_CHUNKS = 1 << 16
_POLL_SECONDS = 0.02


def publish_part(
    store: Store, folder: str, part: Part, columns: Columns, layout_of: tuple[str, str] | None = None
) -> tuple[PartRef, str]:
    """Make a writer's index part durable, and with it the names of the data files beside it.

    Returns the part, and the path of the part that holds its layout: itself, or the earlier one.

    Args:
        layout_of: path and layout digest of an earlier step's part: a large layout that is equal to it is not written again.
    """
    stored = dict(columns)
    reused = ""
    if layout_of and len(columns["chunk.raw_bytes"]) >= _INLINE_LAYOUT_CHUNKS and layout_of[1] == layout_digest(columns):
        reused = layout_of[0]
        stored = {name: array for name, array in stored.items() if is_fresh(name)}
    metadata = index_metadata(columns, reused)
    stored["part.json"] = np.frombuffer(msgspec.json.encode(part), np.uint8)
    path = f"{folder}/index-{part.writer}.safetensors"
    running, nbytes = Running(), 0

    def counted() -> Any:
        nonlocal nbytes
        for piece in pack(stored, metadata):
            running.update(piece)
            nbytes += len(piece)
            yield piece

    store.create(path, counted())
    return PartRef(writer=part.writer, path=path, bytes=nbytes, digest=running.hex()), reused or path


def gather_parts(
    store: Store, folder: str, writers: Sequence[str], deadline: float, digests: Sequence[str] = ()
) -> list[tuple[Columns, Part, PartRef]]:
    """The parts of all `writers`, in their order, as soon as all are published.

    Args:
        deadline: seconds on the monotonic clock. digests: of the parts, where they are known.
    Raises:
        Deadline: naming the writers whose part did not come.  StepExists: somebody aborted meanwhile.
        Corrupt: a part is not what its writer says it wrote.
    """
    found: dict[str, tuple[Columns, Part, PartRef]] = {}
    start = time.monotonic()
    while True:
        for number, writer in enumerate(writers):
            if writer not in found:
                try:
                    digest = digests[number] if digests else None
                    found[writer] = read_part(store, f"{folder}/index-{writer}.safetensors", digest)
                except FileNotFoundError:
                    continue
        missing = [w for w in writers if w not in found]
        if not missing:
            return [found[w] for w in writers]
        if (decided := read_record(store, f"{folder}/commit.json", Commit)) is not None:
            raise StepExists(f"{folder} was {decided.decision} while its parts were awaited: {decided.reason}", decided)
        if time.monotonic() >= deadline:
            raise Deadline(
                f"{folder}: waited {time.monotonic() - start:.1f} s for the index parts of {', '.join(missing)}; "
                f"{len(found)} of {len(writers)} writers are done"
            )
        time.sleep(_POLL_SECONDS)


def combine(commit: Commit, parts: Sequence[tuple[Columns, Part, PartRef]], where: str) -> tuple[Commit, Index, Array]:
    """The commit record that stands for these parts, the whole index, and of each of its entries the part it is from.

    Proves nothing: see `cover.prove_cover`.
    """
    merged = merge([columns for columns, _, _ in parts], where)
    index = Index(merged.columns, where)
    files = [file for _, part, _ in parts for file in part.files]
    values, rank_values = unite([part for _, part, _ in parts])
    owned = {(commit.step, commit.attempt)}
    references = sorted({(f.step, f.attempt) for f in index.files() if not f.is_foreign} - owned)
    record = msgspec.structs.replace(
        commit,
        parts=[ref for _, _, ref in parts],
        files=files,
        values=values,
        rank_values=rank_values,
        roles={role: kind for _, part, _ in parts for role, kind in part.roles.items()},
        references=[StepRef(*r) for r in references],
        tensors=len(index),
        raw_bytes=int(index.columns["chunk.raw_bytes"].sum(dtype=np.int64)),
        new_bytes=sum(f.bytes for f in files),
        codecs=sorted({codec.name for codec in index.codecs} - {RAW.name}),
        lossy=sorted({codec.name for codec in index.codecs if codec.is_lossy} | set(commit.lossy)),
        content_digest=content_digest(index.columns, values_bytes(values, rank_values)),
    )
    return record, index, merged.part_of_entry


def decide(store: Store, folder: str, record: Commit) -> Commit:
    """Publish the decision, once. All that the record names must be durable before the call.

    Raises:
        StepExists: another decision was first; it is in `.existing`.
    """
    try:
        store.create(f"{folder}/commit.json", seal(record))
    except FileExistsError:
        existing = read_record(store, f"{folder}/commit.json", Commit)
        said = f"{existing.decision} ({existing.reason})" if existing else "decided and deleted"
        raise StepExists(f"{folder} was already {said}; a decision is taken once", existing) from None
    except FileNotFoundError:
        raise StepExists(f"{folder} was removed while it was being written: another process took it for dead", None) from None
    return record


def abort(store: Store, folder: str, record: Commit, reason: str) -> None:
    """Decide that this step does not exist, unless it was decided already."""
    try:
        decide(store, folder, msgspec.structs.replace(record, decision="aborted", reason=reason))
    except StepExists:
        return
