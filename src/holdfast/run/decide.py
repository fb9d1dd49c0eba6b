"""Parts and the decision: each writer publishes its index part; one of them decides, once, for all.

The store decides who was first. Whoever gives up waiting may publish the abort; a committer that finds one has lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..errors import Corrupt, Deadline, StepExists
from ..format.columns import Columns, pack
from ..format.digest import Running, hex_digest
from ..format.index import Index, content_digest, index_metadata, is_fresh, layout_digest, read_index
from ..format.names import safe_path
from ..format.records import Commit, FileRef, PartRef, StepRef, seal
from ..store.base import Store
from .assemble import join_layout, merge_parts
from .history import read_record

_INLINE_LAYOUT_CHUNKS = 1 << 16
_POLL_SECONDS = 0.02


class Part(msgspec.Struct, kw_only=True):
    """What a writer says of its part besides the columns; JSON in the column `part.json`."""

    writer: str
    step: int
    attempt: int
    files: list[FileRef] = []
    values: list[Any] = []
    rank_values: dict[str, list[Any]] = {}
    roles: dict[str, str] = {}


def publish_part(
    store: Store, folder: str, part: Part, columns: Columns, layout_of: tuple[str, Columns] | None = None
) -> tuple[PartRef, str]:
    """Make a writer's index part durable, and with it the names of the data files beside it.

    Returns the part, and the path of the part that holds its layout: itself, or the earlier one.

    Args:
        layout_of: path and columns of an earlier step's whole part: large layouts that are equal to it are not written again.
    """
    stored = dict(columns)
    reused = ""
    if (
        layout_of
        and len(columns["chunk.raw_bytes"]) >= _INLINE_LAYOUT_CHUNKS
        and layout_digest(layout_of[1]) == layout_digest(columns)
    ):
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


def read_part(store: Store, path: str, digest: str | None = None, *, follow: bool = True) -> tuple[Columns, Part, PartRef]:
    """A writer's part; its layout fetched from the earlier part that holds it.

    Raises:
        FileNotFoundError: not published.  Corrupt: differs from `digest`, or is not an index.
    """
    data = store.map(path)
    found = hex_digest(data)
    if digest is not None and found != digest:
        raise Corrupt(f"{path} differs from the digest in the commit record", file=path)
    try:
        columns, metadata = read_index(data, path)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"{path} is not an index: {error}", file=path) from error
    try:
        part = msgspec.json.decode(columns.pop("part.json").tobytes(), type=Part)
    except (KeyError, msgspec.DecodeError) as error:
        raise Corrupt(f"{path} does not say who wrote it: {error}", file=path) from error
    if follow and (source := metadata.get("layout_of")):
        layout, _, _ = read_part(store, safe_path(source, path), follow=False)
        columns = join_layout(columns, layout)
        if layout_digest(columns) != metadata.get("layout"):
            raise Corrupt(f"the layout of {path} in {source} is not the one it was written with", file=source)
    return columns, part, PartRef(writer=part.writer, path=path, bytes=len(data), digest=found)


def gather_parts(store: Store, folder: str, writers: Sequence[str], deadline: float) -> list[tuple[Columns, Part, PartRef]]:
    """The parts of all `writers`, in their order, as soon as all are published.

    Args:
        deadline: seconds on the monotonic clock.
    Raises:
        Deadline: naming the writers whose part did not come.  StepExists: somebody aborted meanwhile.
    """
    found: dict[str, tuple[Columns, Part, PartRef]] = {}
    start = time.monotonic()
    while True:
        for writer in writers:
            if writer not in found:
                try:
                    found[writer] = read_part(store, f"{folder}/index-{writer}.safetensors")
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


def combine(commit: Commit, parts: Sequence[tuple[Columns, Part, PartRef]], where: str) -> tuple[Commit, Index]:
    """The commit record that stands for these parts, and the whole index. Proves nothing: see `cover.prove_cover`."""
    index = Index(merge_parts([columns for columns, _, _ in parts], where), where)
    files = [file for _, part, _ in parts for file in part.files]
    values: list[Any] = []
    for _, part, _ in parts:
        known = {msgspec.json.encode(path) for path, _ in values}
        values += [pair for pair in part.values if msgspec.json.encode(pair[0]) not in known]
    rank_values = {rank: pairs for _, part, _ in parts for rank, pairs in part.rank_values.items()}
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
        content_digest=content_digest(index.columns, values_bytes(values, rank_values)),
    )
    return record, index


def values_bytes(values: list[Any], rank_values: dict[str, list[Any]]) -> bytes:
    """The bytes of the values that enter the content digest: compact JSON of [values, values by rank], keys sorted."""
    return msgspec.json.encode([values, rank_values], order="deterministic")


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
