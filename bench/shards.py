"""The methods of several ranks: each rank saves its shards of the state, and one process loads the whole.

The process of a method is rank 0. It starts the others, and a save is over when all ranks say so. Loads are those of a single
process into plain tensors, whatever number of ranks has saved: the layout changes on the way.
"""

import math
import multiprocessing
import os
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.channel import hear, serve
from bench.measure import sync_path
from bench.methods import DCP, Holdfast, HoldfastRecycled, Method, Safetensors
from bench.state import Segment, Size, TrainingState

RANKS = 2
SECONDS = 300.0


class ShardedState(TrainingState):
    """What one rank of FSDP2 holds: rows of every tensor as a DTensor, and step counters that are equal on all ranks.

    The rows lie where the whole state has them, so that one process changes, clears and compares the state of all.
    """

    def __init__(self, size: Size, segment: Segment, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        super().__init__(size, segment)

    def _tensor(self, shape: torch.Size, offset: int) -> Tensor:
        if not shape:
            return super()._tensor(shape, offset)
        rows = -(-shape[0] // self._mesh.size())
        first = rows * self._mesh.get_rank()
        held = torch.Size([min(rows, shape[0] - first), *shape[1:]])
        local = super()._tensor(held, offset + 4 * first * math.prod(shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    @property
    def local(self) -> dict[str, Tensor]:
        """The memory of this rank, as plain tensors."""
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in self.tensors.items()}


def join(method: type[Method], size: Size, segment: Segment, directory: Path, store: dist.Store, rank: int) -> Method:
    """Become one of the ranks; returns the method on its shards."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=SECONDS))
    mesh = init_device_mesh("cpu", (RANKS,))
    return method(ShardedState(size, segment, mesh), directory)


def follow(
    channel: Connection, method: type[Method], size: Size, segment: Segment, directory: Path, port: int, rank: int
) -> None:
    """Be a rank that does what rank 0 says."""

    def make() -> Method:
        return join(method, size, segment, directory, dist.TCPStore("localhost", port, is_master=False), rank)

    serve(channel, make)
    os._exit(0)


class Ranks(Method):
    """Saves with several ranks. `directory` is shared by all."""

    each: ClassVar[type[Method]]
    """What every rank runs on its shards."""
    reads_one_tensor = False

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        spawn = multiprocessing.get_context("spawn")
        self.others: list[Connection] = []
        for rank in range(1, RANKS):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, self.each, state.size, state.segment, directory, store.port, rank)
            spawn.Process(target=follow, args=arguments).start()
            theirs.close()
            self.others.append(ours)
        self.own = join(self.each, state.size, state.segment, directory, store, 0)
        for other in self.others:
            hear(other, "join", SECONDS)

    def save(self) -> None:
        self._all("save")

    def finish(self) -> None:
        self._all("finish")

    def _all(self, command: str) -> None:
        for other in self.others:
            other.send((command, {}))
        getattr(self.own, command)()
        for other in self.others:
            hear(other, command, SECONDS)


class HoldfastRanks(Ranks, Holdfast):
    """`holdfast.save`, called by every rank; `holdfast.restore` by one."""

    key, title = "holdfast_ranks", f"holdfast, fresh, {RANKS} ranks"
    each = Holdfast


class HoldfastRecycledRanks(Ranks, HoldfastRecycled):
    key, title = "holdfast_recycled_ranks", f"holdfast, recycled, {RANKS} ranks"
    each = HoldfastRecycled


class DCPRank(DCP):
    """A rank that saves with the others of the default process group."""

    saves_alone = False


class DCPRanks(Ranks, DCP):
    """`torch.distributed.checkpoint.save` with its defaults by every rank, `load` by one process."""

    key, title = "dcp_ranks", f"DCP save, {RANKS} ranks"
    each = DCPRank


class FilePerRank(Method):
    """A rank that saves what it has as a file of its own, and syncs it itself, beside the others."""

    suffix: ClassVar[str]

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        assert isinstance(state, ShardedState)
        self.tensors = state.local
        self.path = directory / f"rank-{dist.get_rank()}{self.suffix}"

    def finish(self) -> None:
        sync_path(self.path)


class TorchSaveRank(FilePerRank):
    suffix = ".pt"

    def save(self) -> None:
        torch.save(self.tensors, self.path)


class TorchSaveRanks(Ranks):
    """One `torch.save` for each rank, of its local tensors. Only as many ranks can load it."""

    key, title = "torch_save_ranks", f"torch.save per rank, {RANKS} ranks"
    each = TorchSaveRank
    loads = False


class SafetensorsRank(FilePerRank):
    suffix = ".safetensors"

    def save(self) -> None:
        from safetensors.torch import save_file

        save_file(self.tensors, self.path)


class SafetensorsRanks(Ranks):
    """One `save_file` for each rank, of its local tensors. Only as many ranks can load it."""

    key, title, package = "safetensors_ranks", f"safetensors per rank, {RANKS} ranks", Safetensors.package
    each = SafetensorsRank
    loads = False


METHODS: dict[str, type[Method]] = {
    method.key: method
    for method in (
        HoldfastRanks,
        HoldfastRecycledRanks,
        DCPRanks,
        TorchSaveRanks,
        SafetensorsRanks,
        Holdfast,
        HoldfastRecycled,
    )
}
