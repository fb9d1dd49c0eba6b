"""The methods: one small class for each way to save and load the state, all with one interface.

Each peer is used as its documentation says, in the variant that measured best on a machine without an accelerator;
what was chosen is in the docstring of its class. A library is imported when its class is made, so that one that is
missing takes only itself out. Loads end with the values in the tensors that exist already.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.measure import remove
from bench.state import TrainingState


class Method:
    """One way to checkpoint. `directory` is its own; what a save leaves there is what is loaded next."""

    key: ClassVar[str]
    title: ClassVar[str]
    package: ClassVar[str] = "torch"
    holds_a_copy: ClassVar[bool] = False
    """It keeps a copy of the whole state between saves: its process does not stay while others are measured."""
    loads: ClassVar[bool] = True
    reads_one_tensor: ClassVar[bool] = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        self.state = state
        self.tensors = state.tensors
        self.directory = directory

    @property
    def checkpoint(self) -> Path:
        """The directory whose files are the checkpoint last written."""
        return self.directory

    def prepare(self) -> None:
        """Before each save, untimed. As it stands: the previous checkpoint goes, the next gets fresh blocks."""
        remove(self.directory)
        self.directory.mkdir(parents=True)

    def save(self) -> None:
        """Returns when the trainer may change the state."""
        raise NotImplementedError

    def finish(self) -> None:
        """Returns when the library says that the save is complete."""

    def load(self) -> None:
        raise NotImplementedError

    def load_one(self, name: str) -> Tensor:
        raise NotImplementedError

    def discard(self) -> None:
        """After its turn: give the disk back to the others."""
        remove(self.directory)

    def copy_in(self, stored: dict[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(stored[name])


class Holdfast(Method):
    """`holdfast.save` and `holdfast.restore`, to fresh blocks: the run is deleted before."""

    key, title, package = "holdfast", "holdfast, fresh", "holdfast"
    recycle: ClassVar[bool] = False

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import holdfast

        self.holdfast = holdfast
        self.job = holdfast.State(model=state.model, optimizer=state.optimizer, rng=False)
        self.run = directory / "run"
        self.step = 0

    @property
    def checkpoint(self) -> Path:
        return max((self.run / "steps").iterdir())

    def save(self) -> None:
        self.step += 1
        self.holdfast.save(self.run, self.job, step=self.step, recycle=self.recycle)

    def load(self) -> None:
        self.holdfast.restore(self.run, self.job, ranks=[0])  # alone, also where others have saved with it

    def load_one(self, name: str) -> Tensor:
        with self.holdfast.open(self.run) as checkpoint:
            tensor: Tensor = checkpoint[name][:]
            return tensor


class HoldfastRecycled(Holdfast):
    """As a long training run has it: the save writes over the files of a checkpoint that pruning took away.

    Before each timed save, pruning leaves one checkpoint of two, and the files of the other to write over.
    """

    key, title = "holdfast_recycled", "holdfast, recycled"
    recycle = True

    def prepare(self) -> None:
        if not self.run.exists():
            super().prepare()
            self.save()
            self.state.advance()
            self.save()
        self.holdfast.Run(self.run).prune(self.holdfast.Keep(last=1), recycle=True)

    def discard(self) -> None:
        """What the next save will write over stays."""


class TorchSave(Method):
    """`torch.save`, and `torch.load` with mmap, which measured faster than without."""

    key, title = "torch_save", "torch.save"

    def save(self) -> None:
        torch.save(self.tensors, self.directory / "state.pt")

    def _stored(self) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = torch.load(self.directory / "state.pt", mmap=True, weights_only=True)
        return stored

    def load(self) -> None:
        self.copy_in(self._stored())

    def load_one(self, name: str) -> Tensor:
        return self._stored()[name].clone()


class Safetensors(Method):
    """`save_file` of a flat dict, `load_file` and a copy; one tensor by `safe_open`."""

    key, title, package = "safetensors", "safetensors", "safetensors"

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import safetensors.torch

        self.library = safetensors
        self.path = directory / "state.safetensors"

    def save(self) -> None:
        self.library.torch.save_file(self.tensors, self.path)

    def load(self) -> None:
        self.copy_in(self.library.torch.load_file(self.path))

    def load_one(self, name: str) -> Tensor:
        with self.library.safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name).clone()
            return tensor


class DCP(Method):
    """`torch.distributed.checkpoint.save` with its defaults, which sync files; one rank, no process group."""

    key, title = "dcp", "DCP save"
    saves_alone: ClassVar[bool] = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import torch.distributed.checkpoint as dcp

        self.dcp = dcp

    def save(self) -> None:
        self.dcp.save(self.tensors, checkpoint_id=self.directory, no_dist=self.saves_alone)

    def load(self) -> None:
        self.dcp.load(self.tensors, checkpoint_id=self.directory, no_dist=True)

    def load_one(self, name: str) -> Tensor:
        target = torch.empty_like(self.tensors[name])
        self.dcp.load({name: target}, checkpoint_id=self.directory, no_dist=True)
        return target


class DCPAsync(DCP):
    """`async_save` in a thread, with one stager that is kept and stages in the background.

    The trainer may continue when staging is complete. Pinned memory and copies that do not block need an accelerator.
    """

    key, title = "dcp_async", "DCP async_save"
    holds_a_copy = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self.pending: Any = None

    def save(self) -> None:
        self.pending = self.dcp.async_save(self.tensors, checkpoint_id=self.directory, async_stager=self.stager, no_dist=True)
        self.pending.staging_completion.result()

    def finish(self) -> None:
        self.pending.upload_completion.result()


class Torchsnapshot(Method):
    """`async_take`, which stalls less than `take` and is complete as soon; restore into the live tensors."""

    key, title, package = "torchsnapshot", "torchsnapshot", "torchsnapshot"

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import torchsnapshot

        self.library = torchsnapshot
        self.app_state = {"state": torchsnapshot.StateDict(**self.tensors)}
        self.path = str(directory / "snapshot")
        self.pending: Any = None

    def save(self) -> None:
        self.pending = self.library.Snapshot.async_take(self.path, self.app_state)

    def finish(self) -> None:
        self.pending.wait()

    def load(self) -> None:
        self.library.Snapshot(self.path).restore(self.app_state)

    def load_one(self, name: str) -> Tensor:
        target = torch.empty_like(self.tensors[name])
        self.library.Snapshot(self.path).read_object(f"0/state/{name}", obj_out=target)
        return target


class TorchCheckpointing(Method):
    """torch_checkpointing's synchronous saver, model and optimizer as its two items.

    Direct I/O is off: with it, closing a file fails on the last part of a block (OSError 22, version 0.1.1).
    """

    key, title, package = "torch_checkpointing", "torch_checkpointing", "torch_checkpointing"
    reads_one_tensor = False  # a load reads each file in full

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import torch_checkpointing
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.library = torch_checkpointing
        self.manager = torch_checkpointing.CheckpointManager(
            torch_checkpointing.CheckpointManager.Config(
                save=self.saver(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
            )
        )
        self.items = {"model": state.part("model."), "optimizer": state.part("optimizer.")}
        self.path = str(directory / "checkpoint")

    def saver(self) -> Any:
        return self.library.SyncCheckpointSaverConfig()

    def save(self) -> None:
        self.manager.save(self.path, self.items)

    def load(self) -> None:
        self.manager.load(self.path, into=self.items, strict=True)


class TorchCheckpointingAsync(TorchCheckpointing):
    """Its asynchronous saver: the trainer waits in `lock()` until staging in the background is complete."""

    key, title = "torch_checkpointing_async", "torch_checkpointing async"
    holds_a_copy = True
    pending: Any = None

    def saver(self) -> Any:
        return self.library.AsyncCheckpointSaverConfig()

    def save(self) -> None:
        self.pending = self.manager.save(self.path, self.items)
        with self.manager.lock():
            pass

    def finish(self) -> None:
        self.pending.result()


METHODS: dict[str, type[Method]] = {
    method.key: method
    for method in (
        Holdfast,
        HoldfastRecycled,
        TorchSave,
        Safetensors,
        DCP,
        DCPAsync,
        Torchsnapshot,
        TorchCheckpointing,
        TorchCheckpointingAsync,
    )
}
