"""What ranks do in the tests of reading once: they restore states whose bits are known, from a store that counts, or fails."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.store.local import LocalStore
from holdfast.store.wrap import Trace, Wrapped

MIB = 1 << 20
T = TypeVar("T")


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Bits that differ from element to element and from seed to seed, made fast."""
    return ((torch.arange(math.prod(shape), dtype=torch.int32) * (2 * seed + 1)) % 8191 - seed).to(dtype).reshape(shape)


def awkward(mib: int, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of about so many MiB: large and tiny ones, odd sizes, three dtypes, strided, turned, empty and tied ones."""
    made = {
        "strided": drawn((mib * MIB // 32, 3), seed)[:, :2],
        "odd": drawn((mib * MIB // 16 + 13, 1), seed + 1, torch.int16),
        "turned": drawn((1031, mib * MIB // 16 // 1031), seed + 2).T,
        "half": drawn((mib * MIB // 16 + 7,), seed + 3, torch.bfloat16),
        "scalar": drawn((), seed + 4),
        "empty": drawn((0, 5), seed),
    }
    made |= {f"small{i}": drawn((i + 1, 7), seed + i) for i in range(200)}
    made |= {f"rest{i}": drawn((mib * MIB // 64 + i,), seed + i) for i in range(4)}
    return {**made, "tied": made["half"]}


def parts(seed: int, held_by: int | None) -> dict[str, torch.Tensor]:
    """Tensors of which a rank holds some: one that all hold, one for each pair of neighbours, and one of its own."""
    made = {"all": drawn((3 * MIB,), seed)}
    for rank in range(4):
        if held_by in (None, rank):
            made[f"own{rank}"] = drawn((2 * MIB + rank,), seed + rank)
        if held_by in (None, rank, rank + 1):
            made[f"pair{rank}"] = drawn((2 * MIB + 7 * rank,), seed + 10 + rank, torch.bfloat16)
    return made


@dataclass
class Seen:
    """What one rank saw of a restore."""

    read: int = 0
    """Bytes asked of the store."""
    told: int = 0
    """`read_bytes` of the ledger."""
    wrong: list[str] = field(default_factory=list)
    """Tensors that do not hold what was saved."""
    error: str = ""
    kind: str = ""
    seconds: float = 0.0
    touched: str | None = None
    left: list[str] = field(default_factory=list)
    """Descriptors, mappings and threads of the exchange that are still there."""


class Hurt(Wrapped):
    """Calls `hurt` before the read of a rank whose number is `at`."""

    def __init__(self, inner: Any, hurt: Callable[[], Any], at: int) -> None:
        super().__init__(inner)
        self._hurt, self._left = hurt, at

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if operation == "read_into":
            self._left -= 1
            if self._left == 0:
                self._hurt()
        return run()


def seen(inner: Any, live: dict[str, torch.Tensor], truth: Callable[[], dict[str, torch.Tensor]], **keywords: Any) -> Seen:
    """Restore, and say what came of it."""
    state, store = holdfast.State(rng=False, model=live), Trace(inner)
    began = time.monotonic()
    result = Seen()
    try:
        result.told = holdfast.restore(store, state, **keywords).read_bytes
    except holdfast.HoldfastError as error:
        result.error, result.kind = str(error), type(error).__name__
    result.seconds = time.monotonic() - began
    result.touched, result.read = state.touched, store.totals.nbytes["read_into"]
    if not result.error:
        result.wrong = [name for name, whole in truth().items() if not torch.equal(live[name], whole)]
    result.left = what_is_left()
    return result


def what_is_left() -> list[str]:
    """Of an exchange, in this process."""
    descriptors = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    with open("/proc/self/maps") as file:
        found = [line.strip() for line in file if "holdfast-exchange" in line]
    found += [target for target in descriptors if "holdfast-exchange" in target]
    return found + [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]


def restore_awkward(run: str, mib: int, seed: int, ranks: Sequence[int] | None = None, **keywords: Any) -> Seen | None:
    if ranks is not None and dist.get_rank() not in ranks:
        return None
    return seen(LocalStore(run), awkward(mib, seed + 1), lambda: awkward(mib, seed), ranks=ranks, **keywords)


def restore_parts(run: str, seed: int, **keywords: Any) -> Seen:
    rank = dist.get_rank()
    return seen(LocalStore(run), parts(seed + 1, rank), lambda: parts(seed, rank), **keywords)


def restore_hurt(run: str, mib: int, seed: int, rank: int, at: int, hurt: str, **keywords: Any) -> Seen:
    """One rank is killed, or sleeps, at one of its reads."""
    inner: Any = LocalStore(run)
    if dist.get_rank() == rank:
        acts = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "sleep": lambda: time.sleep(6), "refuse": refuse}
        inner = Hurt(inner, acts[hurt], at)
    return seen(inner, awkward(mib, seed + 1), lambda: awkward(mib, seed), **keywords)


def refuse() -> None:
    raise holdfast.Unavailable("the disk is on fire")


def restore_cut_off(run: str, mib: int, seed: int, rank: int) -> Seen | None:
    """One rank cannot open the memory of the others, as in a container with pids of its own."""
    from holdfast.loading import shared_memory

    if dist.get_rank() == rank:

        def refused(pid: int, fd: int) -> int:
            raise PermissionError(13, "Permission denied", f"/proc/{pid}/fd/{fd}")

        before, shared_memory.open_of = shared_memory.open_of, refused
        try:
            return restore_awkward(run, mib, seed)
        finally:
            shared_memory.open_of = before
    return restore_awkward(run, mib, seed)


def restore_unprepared(run: str, mib: int, seed: int, rank: int, is_before: bool) -> Seen:
    """One rank fails before, or after, it has met the others to say what it needs."""
    from holdfast.loading import together

    gather = together.gather

    def fail(*arguments: Any) -> Any:
        if not is_before:
            gather(*arguments).close()
        raise holdfast.Unavailable("no memory")

    if dist.get_rank() == rank:
        together.gather = fail
    try:
        return seen(LocalStore(run), awkward(mib, seed + 1), lambda: awkward(mib, seed), deadline=8)
    finally:
        together.gather = gather


def on_nodes_of(ranks: int, least: int, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Call a function on ranks that take themselves to be on different nodes, of so many ranks each.

    What needs less than `least` bytes is read by each node.
    """
    from holdfast.loading import pairing

    pairing.LEAST_BYTES = least
    os.environ["HOLDFAST_NODE"] = f"node{dist.get_rank() // ranks}"
    return function(*arguments, **keywords)


def restore_unreachable(run: str, mib: int, seed: int, rank: int) -> Seen | None:
    """One rank gives other nodes an address at which nobody answers."""
    from holdfast.loading import twins

    before, os.environ["MASTER_ADDR"] = twins._hosts, "127.0.0.1"
    if dist.get_rank() == rank:
        twins._hosts = lambda: ["127.255.255.254"]  # the port is closed there
    refused = twins.socket.create_connection

    def connect(where: tuple[str, int], seconds: float) -> Any:
        if where[0] == "127.255.255.254":
            raise ConnectionRefusedError(111, "Connection refused")
        return refused(where, seconds)

    twins.socket.create_connection = connect
    try:
        return restore_awkward(run, mib, seed)
    finally:
        twins._hosts, twins.socket.create_connection = before, refused


def restore_hybrid(run: str, seed: int) -> Seen:
    """Sharded over the two ranks of a node, replicated over nodes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
    live = sharded(seed + 1, 0, mesh)
    truth = {name: tensor.to_local() for name, tensor in sharded(seed, 0, mesh).items()}
    store = Trace(LocalStore(run))
    told = holdfast.restore(store, {"model": live}).read_bytes
    wrong = [name for name, tensor in live.items() if not _same(tensor, truth[name])]
    return Seen(store.totals.nbytes["read_into"], told, wrong, left=what_is_left())


def sharded(seed: int, dim: int, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Matrices, some of whose rows and columns do not divide, cut along one dimension over all ranks."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    wholes = {f"w{i}": drawn((1000 + 3 * i, 2000 + 7 * i), seed + i) for i in range(12)}
    return {name: distribute_tensor(whole, mesh, [Shard(dim)]) for name, whole in wholes.items()}


def save_sharded(run: str, seed: int, dim: int) -> None:
    holdfast.save(run, {"model": sharded(seed, dim)}, 1)


def restore_sharded(run: str, seed: int, dim: int) -> Seen:
    live = sharded(seed + 1, dim)
    truth = {name: tensor.to_local() for name, tensor in sharded(seed, dim).items()}
    store = Trace(LocalStore(run))
    told = holdfast.restore(store, {"model": live}).read_bytes
    wrong = [name for name, tensor in live.items() if not _same(tensor, truth[name])]
    return Seen(store.totals.nbytes["read_into"], told, wrong, left=what_is_left())


def _same(tensor: DTensor, local: torch.Tensor) -> bool:
    return torch.equal(tensor.to_local(), local)
