"""What a capture copies: for each tensor that this rank writes, where its bytes are and where they go. Made once for a structure.

The slot of a version is laid out as the data file will be: by item size, then in order. Rows are numbered in the order in which
the optimizers will need their tensors, so that what is needed first is copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from ..agent.messages import Row as Told
from ..agent.messages import Table
from ..format.dtypes import dtype
from ..format.names import stored_path
from ..layout.boxes import Box
from ..plan.image import file_order
from ..plan.save import Share
from ..run.contents import Contents, TensorItem
from ..run.image import ByteRange, Source
from ..run.shares import Plan, box_of, share_of
from ..tensors import TensorSource, as_flat
from .device import device_of

SMALL_BYTES = 1024
"""What is so small is copied at once, always: step counters, scales, statistics of narrow layers."""
JOB_BYTES = 8 << 20
PROBE_BYTES = 64
SAMPLE_BYTES = 1 << 20
_ONE_PROBE_BYTES = 64 << 10


class Trust(Enum):
    """Whether a tensor may be copied in the background."""

    UNPROVEN = "not seen yet to hold still until its optimizer steps"
    PROVEN = "held still from a call of `step` until the optimizer's next step"
    BROKEN = "has changed where nothing should have changed it"


def probes_of(data: Any) -> tuple[Any, ...]:
    """Views of the first, the middle and the last of some bytes; of few, one."""
    middle = len(data) // 2
    if len(data) <= _ONE_PROBE_BYTES:
        return (data[middle : middle + PROBE_BYTES],)
    return data[:PROBE_BYTES], data[middle : middle + PROBE_BYTES], data[-PROBE_BYTES:]


@dataclass(slots=True, eq=False)
class Row:
    """One tensor, or the part of it that this rank writes."""

    name: str
    position: int
    """In the contents' tensors."""
    share: Share | None
    source: Source
    at: int
    """Bytes from the start of the slot."""
    nbytes: int
    owner: int
    """`id` of the optimizer that changes it; 0 where none is known to."""
    ready: int = 0
    """Its number in the order of copying, from 1 on."""
    trust: Trust = Trust.UNPROVEN
    bytes: Any = None
    """The live bytes, where they lie in host memory in this order; None elsewhere."""
    probes: tuple[Any, ...] = ()
    """Views of the first, the middle and the last of them."""
    device: torch.device | None = None
    """Where it lies, if a stream of the device copies it."""
    flat: torch.Tensor | None = None
    """The live bytes on the device, if they lie there in this order."""
    apart: torch.Tensor | None = None
    """What is to be set aside on the device to have its bytes: `flat`, or a tensor whose elements are not in order yet."""

    def __post_init__(self) -> None:
        self._see()

    def renew(self, source: Source) -> bool:
        """Take another source of the same bytes; whether it shows the same memory, so that what was proved of it stands."""
        before, self.source = memory_of(self.tensor), source
        self._see()
        is_same = before == memory_of(self.tensor) != 0
        if not is_same:
            self.trust = Trust.UNPROVEN
        return is_same

    def _see(self) -> None:
        self.device = device_of(self.tensor)
        view = getattr(self.source, "view", None)
        self.bytes = None if view is None or self.device is not None else view(0, self.nbytes)
        if self.bytes is not None:
            self.probes = probes_of(self.bytes)
        self.flat = self.apart = None
        if self.device is not None:
            self.flat, self.apart = _on_device(self.source, self.nbytes)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The live tensor whose memory it is, if it is one."""
        source: object = self.source
        while isinstance(source, ByteRange):
            source = source.whole
        return source.tensor if isinstance(source, TensorSource) else None

    @property
    def is_small(self) -> bool:
        return self.nbytes <= SMALL_BYTES

    @property
    def is_instant(self) -> bool:
        """Whether its bytes are in the slot when the call returns, always."""
        return self.is_small and (self.apart is None or not self.nbytes)


class Glance(NamedTuple):
    """Some bytes of a row."""

    row: Row
    start: int
    nbytes: int


def sample(rows: Sequence[Row], turn: int) -> list[Glance]:
    """A megabyte of one row after the other; another one at each turn."""
    found, left = [], SAMPLE_BYTES
    for number in range(len(rows)):
        row = rows[(turn + number) % len(rows)]
        start = turn * SAMPLE_BYTES % row.nbytes if row.nbytes > SAMPLE_BYTES else 0
        found.append(Glance(row, start, min(left, row.nbytes - start)))
        left -= found[-1].nbytes
        if left <= 0:
            break
    return found


@dataclass(slots=True, eq=False)
class Job:
    """Some bytes of a row to be copied; or a replica to be digested."""

    row: Row
    start: int
    nbytes: int
    replica: Replica | None = None


@dataclass(frozen=True)
class Replica:
    """What several ranks hold without having declared it: its digest goes with each capture."""

    name: str
    holders: tuple[int, ...]
    row: Row
    """All of what this rank holds of it; it has no place in the slot."""


@dataclass(frozen=True)
class Rows:
    """All rows, in the order of copying, and what the agent is told of them."""

    rows: list[Row]
    replicas: list[Replica]
    table: list[Told]
    nbytes: int
    """Of a slot."""
    jobs: dict[int, list[Job]] = field(default_factory=dict)
    """By owner: all that is not small, cut into pieces."""
    later: dict[int, int] = field(default_factory=dict)
    """Bytes of what may be copied after the call, by the number of the row."""
    devices: list[torch.device] = field(default_factory=list)
    """Whose streams copy some of it."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if not row.is_instant:
                self.later[row.ready] = row.nbytes
            if not row.is_small:
                self.jobs.setdefault(row.owner, []).extend(jobs_of(row))
        for row in (*self.rows, *(replica.row for replica in self.replicas)):
            if row.device is not None and row.device not in self.devices:
                self.devices.append(row.device)

    def message(self, number: int, slots: int) -> Table:
        return Table(number, self.table, slots, self.nbytes)


def jobs_of(row: Row) -> list[Job]:
    """A row's copying, in pieces."""
    return [Job(row, start, min(JOB_BYTES, row.nbytes - start)) for start in range(0, row.nbytes, JOB_BYTES)]


def rows_of(contents: Contents, plan: Plan | None, optimizers: Sequence[torch.optim.Optimizer], known: Rows | None) -> Rows:
    """The rows of a structure.

    Args:
        plan: what of it this rank writes; None: all. optimizers: in the order in which they step.
        known: of the structure before: what it has proved of a tensor's memory stands.
    """
    held = _held(contents, plan)
    owners = _owners(optimizers)
    order = file_order([dtype(contents.tensors[position].dtype).itemsize for position, _, _ in held]).tolist()
    trust = {} if known is None else {(row.name, row.at, row.nbytes, memory_of(row.tensor)): row.trust for row in known.rows}
    rows, at = [], 0
    for number in order:
        position, share, source = held[number]
        item = contents.tensors[position]
        row = Row(item.name, position, share, source, at, source.nbytes, 0)
        row.owner = owners.get(memory_of(row.tensor), 0)
        row.trust = trust.get((row.name, row.at, row.nbytes, memory_of(row.tensor)), Trust.UNPROVEN)
        rows.append(row)
        at += source.nbytes
    turn = {id(optimizer): number for number, optimizer in enumerate(optimizers)}
    rows.sort(key=lambda row: (not row.is_small, turn.get(row.owner, -1), row.at))
    for number, row in enumerate(rows, 1):
        row.ready = number
    return Rows(rows, _replicas(contents, plan, owners), _table(contents, plan, rows), at)


def _replicas(contents: Contents, plan: Plan | None, owners: dict[int, int]) -> list[Replica]:
    if plan is None:
        return []
    positions = {item.key: n for n, item in enumerate(contents.tensors) if item.source is not None}
    found = []
    for holding in plan.undeclared:
        position = positions[plan.keys[holding.key]]
        source = contents.tensors[position].source
        assert source is not None
        row = Row(holding.name, position, None, source, -1, source.nbytes, 0)
        row.owner = owners.get(memory_of(row.tensor), 0)
        found.append(Replica(holding.name, holding.holders, row))
    return found


def _held(contents: Contents, plan: Plan | None) -> list[tuple[int, Share | None, Source]]:
    """(position, share, source) of all that this rank writes, in the order of the contents."""
    if plan is None:
        return [(n, None, item.source) for n, item in enumerate(contents.tensors) if item.source is not None]
    positions = {item.key: n for n, item in enumerate(contents.tensors) if item.source is not None}
    found = []
    for share in plan.mine:
        position = positions[plan.keys[share.key]]
        source = share_of(contents.tensors[position], share).source
        assert source is not None
        found.append((position, share, source))
    return sorted(found, key=lambda one: one[0])


def _table(contents: Contents, plan: Plan | None, rows: Sequence[Row]) -> list[Told]:
    """The rows, and every tensor and alias that this rank knows and others write."""
    by_position: dict[int, list[Row]] = {}
    for row in rows:
        by_position.setdefault(row.position, []).append(row)
    written = {contents.tensors[position].name for position in by_position}
    found = []
    for position, item in enumerate(contents.tensors):
        for row in by_position.get(position, ()):
            cut = item if row.share is None else share_of(item, row.share)
            held = box_of(item) if row.share is not None and row.share.box != box_of(item) else None
            declared = plan.declared.get(item.key, "") if plan is not None else ""
            found.append(_told(cut, row, held, declared))
        if position not in by_position and item.name not in written:
            written.add(item.name)
            found.append(_told(item, None))
    return found


def _told(item: TensorItem, row: Row | None, held: Box | None = None, declared: str = "") -> Told:
    at, nbytes, ready = (row.at, row.nbytes, row.ready) if row is not None else (-1, 0, 0)
    box = item.box if row is not None else None
    path = stored_path(item.path)
    return Told(
        item.name, path, item.dtype, item.shape, item.role, item.owner, item.alias, box, at, nbytes, ready, held, declared
    )


def _owners(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
    """By the address of a storage: the optimizer that changes it."""
    found: dict[int, int] = {}
    for optimizer in reversed(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                values = optimizer.state[parameter].values() if parameter in optimizer.state else ()
                for value in (parameter, *values):
                    if isinstance(value, torch.Tensor):
                        found[memory_of(getattr(value, "_local_tensor", value))] = id(optimizer)
    found.pop(0, None)
    return found


def _on_device(source: object, nbytes: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`flat` and `apart` of a row with this source."""
    start = 0
    while isinstance(source, ByteRange):
        start += source.start
        source = source.whole
    tensor = source.tensor if isinstance(source, TensorSource) else None
    if tensor is None:
        return None, None
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        flat = as_flat(tensor).view(torch.uint8)[start : start + nbytes]
        return flat, flat
    return None, tensor if nbytes == tensor.numel() * tensor.element_size() else None


def memory_of(tensor: torch.Tensor | None) -> int:
    """The address of a tensor's storage; 0 where there is none."""
    return 0 if tensor is None else tensor.untyped_storage().data_ptr()
