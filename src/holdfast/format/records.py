"""Records: the small create-once JSON files of a run, each sealed by a digest of its own bytes.

Unknown fields are ignored, so that later versions can add them; what an old reader must not ignore is named in
`required_features`. A record whose seal does not match is `Corrupt`, never half believed.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ..errors import Corrupt, Unsupported
from .digest import hex_digest

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
"""The features beyond format 1 that this version can read."""

_SEAL = re.compile(rb',\n  "check": "([0-9a-f]{32})"\n}\n\Z')


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What all records share."""

    format: int = FORMAT
    required_features: list[str] = []


class StepRef(msgspec.Struct, frozen=True, order=True):
    """A checkpoint by step and attempt."""

    step: int
    attempt: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Who wrote a record: enough to tell, on the same machine, whether that process still lives."""

    host: str = ""
    boot: str = ""
    """The kernel's boot id; another one means that the process is gone."""
    pid: int = 0
    started: str = ""
    """The process's start time in clock ticks since boot, so that a reused pid is not taken for it."""


class RunRecord(Record, frozen=True, kw_only=True):
    """`holdfast.json`: written once, when the run is made."""

    run: str
    created: float
    """Seconds since 1970, UTC; so are all times in records."""
    library: str = ""


class Attempt(Record, frozen=True, kw_only=True):
    """`attempts/0007.json`: one start of the job on a run, or a rollback."""

    run: str
    attempt: int
    parent: StepRef | None = None
    reason: str = "start"
    """start, restart, rollback or copy."""
    skipped_samples: list[list[int]] | None = None
    """Half-open ranges of global sample positions that this line of the history leaves out."""
    world: int = 1
    created: float = 0.0
    by: Process = Process()


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that one process has claimed and another writes under. No record: it goes from the one to the other."""

    run: str
    attempt: int
    parent: StepRef | None = None
    """The last commit of the line, from which the next one goes on."""


class PartRef(msgspec.Struct, frozen=True, kw_only=True):
    """An index part: one for each writer."""

    writer: str
    path: str
    """From the run's root; so are all paths in records."""
    bytes: int
    digest: str
    """xxh3-128 of the whole file."""


class FileRef(msgspec.Struct, frozen=True, kw_only=True):
    """A data file that this step owns."""

    path: str
    bytes: int
    header_bytes: int
    """Bytes before the first entry: 8 and the safetensors header. The rest is covered by the chunks' digests."""
    digest: str
    """xxh3-128 of those first bytes."""


class Commit(Record, frozen=True, kw_only=True):
    """`steps/*/commit.json`: the decision about a checkpoint, create-once, written last."""

    decision: str
    """committed or aborted."""
    reason: str = ""
    kind: str = "full"
    """full, increment, virtual, partial or composite."""
    run: str
    step: int
    attempt: int
    parent: StepRef | None = None
    references: list[StepRef] = []
    """Other steps of this run whose files this one reads."""
    created: float = 0.0
    tier: str = ""
    origin: dict[str, Any] | None = None
    """Where a copy came from: run, step, attempt."""
    world: int = 1
    mesh: dict[str, Any] | None = None
    groups: list[list[int]] = []
    """Structure groups: ranks that hold the same names."""
    roles: dict[str, str] = {}
    """Role to kind: module, optimizer, object, dict, rng, tensor, generator."""
    parts: list[PartRef] = []
    files: list[FileRef] = []
    tensors: int = 0
    raw_bytes: int = 0
    """Bytes of all tensors; aliases counted once."""
    new_bytes: int = 0
    """Bytes of data files that this step wrote."""
    codecs: list[str] = []
    """Names of the codecs of its chunks other than `raw`, sorted."""
    lossy: list[str] = []
    """Names of the codecs by which this state has lost bits, here or in the step that it is a copy of; sorted."""
    values: list[Any] = []
    """[path, typed JSON] pairs, in the order of the state's tree."""
    rank_values: dict[str, list[Any]] = {}
    """The same by rank, for values that differ."""
    metrics: dict[str, Any] = {}
    best: list[str] | None = None
    """[metric, min or max] by which this run's owner ranks steps."""
    kernel: dict[str, Any] | None = None
    """Fingerprint of the optimizer's kernels, for replay."""
    libraries: dict[str, str] = {}
    content_digest: str = ""
    """Identity of the state: see docs/format.md."""


class Intent(Record, frozen=True, kw_only=True):
    """`intents/*.json`: a save under way and the steps whose files it may refer to."""

    step: int
    attempt: int
    parents: list[StepRef] = []
    created: float = 0.0
    expires: float = 0.0
    """After this the writer commits nothing under this intent."""
    by: Process = Process()


class Tombstone(Record, frozen=True, kw_only=True):
    """`tombstones/*.json`: a step that is being deleted; nothing may begin to refer to it."""

    step: int
    attempt: int
    created: float = 0.0
    by: Process = Process()


class Pin(Record, frozen=True, kw_only=True):
    """`pins/*.json`: a step that pruning keeps, by name; or held by a reader for as long as it lives."""

    name: str
    step: int
    attempt: int
    created: float = 0.0
    expires: float | None = None
    """None for a pin; a hold ends then, or when its process is gone."""
    by: Process = Process()


class Note(Record, frozen=True, kw_only=True):
    """`notes/*.json`: metrics added to a step after its commit."""

    step: int
    attempt: int
    metrics: dict[str, Any] = {}
    created: float = 0.0


R = TypeVar("R", bound=Record)


def seal(record: Record) -> bytes:
    """The bytes of `record` as stored: indented JSON whose last field, `check`, is the digest of all bytes before it."""
    body = msgspec.json.format(msgspec.json.encode(record), indent=2)[: -len(b"\n}")]
    return body + b',\n  "check": "' + hex_digest(body).encode() + b'"\n}\n'


def unseal(data: bytes, kind: type[R], path: str) -> R:
    """The record in `data`, checked.

    Raises:
        Corrupt: no seal, wrong seal, not JSON, or not of this kind.
        Unsupported: written by a later format, or with a required feature that is not known here.
    """
    match = _SEAL.search(data)
    if match is None or hex_digest(data[: match.start()]).encode() != match[1]:
        raise Corrupt(f"{path} is damaged: its bytes differ from the digest they were sealed with", file=path)
    try:
        head = msgspec.json.decode(data, type=Record)
        if head.format > FORMAT:
            raise Unsupported(f"{path} is of format {head.format}; this version of holdfast reads up to {FORMAT}: upgrade it")
        if unknown := sorted(set(head.required_features) - FEATURES):
            raise Unsupported(f"{path} needs {', '.join(unknown)}, which this version of holdfast does not have: upgrade it")
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{path} is not a {kind.__name__} record: {error}", file=path) from error
