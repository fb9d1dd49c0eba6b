"""The methods of `bench.stall`: saving beside a training loop, split into the parts at which a trainer can lose time.

A save is begun by a call; before the next update of the state the trainer passes a guard; meanwhile the library writes. Each
save has a directory of its own, so that two can be on their way at once. Each peer is used as its documentation says, in
the variant that measured best without an accelerator.
"""

import inspect
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from bench import measure
from bench.methods import DCP, DCPAsync, Method, TorchCheckpointingAsync, Torchsnapshot
from bench.state import TrainingState

STRIDE = 10_000
"""Saves are those of steps that this divides; far more than the updates between two of them, which have numbers, too."""
SECONDS = 300.0

Done = Callable[[], None]
"""Returns when the library says that the save is complete, or raises why it is not."""


class Declined(Exception):
    """The library does not save this step: it has chosen so, since another save is under way."""


class Overlapping(Method):
    """One way to save while training goes on."""

    forks: ClassVar[bool] = False
    """The snapshot is the memory of a forked process: the state must then be private memory, not shared."""
    first_saves: ClassVar[int] = 2
    """How many unmeasured saves it takes until a save is as in a long run."""

    def place(self, step: int) -> Path:
        """The directory whose files are the checkpoint of `step`."""
        return self.directory / f"step-{step}"

    def clear(self) -> None:
        """Before a save, untimed: what was saved before goes, and the next save gets fresh blocks."""
        for path in self.directory.iterdir():
            measure.remove(path)

    def begin(self, step: int) -> Done:
        """The call that a trainer makes after step `step`. Returns when the library gives control back, or raises Declined."""
        raise NotImplementedError

    def passed(self, step: int) -> None:
        """The trainer is done with a step that is not saved."""

    def guard(self) -> AbstractContextManager[Any]:
        """What an update of the state must be inside of."""
        return nullcontext()

    def between(self) -> None:
        """Called by the trainer between two pieces of its work, while a save is under way."""

    def load_step(self, step: int) -> None:
        """Bring a step back into the tensors that exist already."""
        raise NotImplementedError

    def close(self) -> None:
        """The end of training."""


class HoldfastStep(Overlapping):
    """`Checkpointer.step` after each optimizer step, keeping two checkpoints and writing over the files of pruned ones."""

    key, title, package = "holdfast", "holdfast", "holdfast"
    first_saves = 4
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        import holdfast

        if missing := self.options.keys() - inspect.signature(holdfast.Checkpointer).parameters:
            raise NotImplementedError(f"skipped: the Checkpointer of this version takes no {', '.join(missing)}=")
        self.holdfast = holdfast
        self.job = holdfast.State(model=state.model, optimizer=state.optimizer, rng=False)
        self.run = directory / "run"
        self.checkpointer = holdfast.Checkpointer(
            self.run,
            self.job,
            save=holdfast.Every(steps=STRIDE),
            keep=holdfast.Keep(last=2),
            recycle=True,
            on_failure="raise",
            **self.options,
        )

    def place(self, step: int) -> Path:
        return next((self.run / "steps").glob(f"{step:010d}*"))

    def clear(self) -> None:
        """Pruning is its own affair, and part of what is measured."""

    def begin(self, step: int) -> Done:
        handle = self.checkpointer.step(step)
        if handle is None:
            raise Declined(f"step {step} was due, and was not saved")
        return lambda: handle.wait("durable", timeout=SECONDS)

    def passed(self, step: int) -> None:
        self.checkpointer.step(step)

    def load_step(self, step: int) -> None:
        self.holdfast.restore(self.run, self.job, step=step)

    def close(self) -> None:
        self.checkpointer.close()


class HoldfastThread(HoldfastStep):
    """The same without the agent: a thread of the trainer writes."""

    key, title = "holdfast_thread", "holdfast, agent=False"
    options: ClassVar[dict[str, Any]] = {"agent": False}


class DCPSync(Overlapping, DCP):
    """`dcp.save`, which blocks until all is written: what the call is compared with."""

    key, title = "dcp", "DCP save"
    first_saves = 1

    def begin(self, step: int) -> Done:
        self.dcp.save(self.tensors, checkpoint_id=self.place(step), no_dist=True)
        return lambda: None

    def load_step(self, step: int) -> None:
        self.dcp.load(self.tensors, checkpoint_id=self.place(step), no_dist=True)


class StagedDCP(DCPSync, DCPAsync):
    """`async_save` with one stager that is kept and stages in the background; the update waits until it has."""

    process: ClassVar[bool]
    pending: Any = None
    first_saves = 2

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.where = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD

    def begin(self, step: int) -> Done:
        pending = self.pending = self.dcp.async_save(
            self.tensors,
            checkpoint_id=self.place(step),
            async_checkpointer_type=self.where,
            async_stager=self.stager,
            no_dist=True,
        )
        return lambda: pending.upload_completion.result()

    def guard(self) -> AbstractContextManager[Any]:
        if self.pending is not None:
            self.pending.staging_completion.result()
        return nullcontext()


class DCPThread(StagedDCP):
    """A thread writes."""

    key, title = "dcp_thread", "DCP async_save, thread"
    process = False


class DCPProcess(StagedDCP):
    """Another process writes, from a stager in shared memory."""

    key, title = "dcp_process", "DCP async_save, process"
    process = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        os.environ["MASTER_ADDR"] = "localhost"
        be_alone()
        super().__init__(state, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(
            StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False)
        )


class TorchCheckpointingLock(Overlapping, TorchCheckpointingAsync):
    """Its asynchronous saver; updates inside `lock()`, which waits until staging in the background is complete."""

    def begin(self, step: int) -> Done:
        pending = self.manager.save(str(self.place(step)), self.items)
        return lambda: pending.result()

    def guard(self) -> AbstractContextManager[Any]:
        guard: AbstractContextManager[Any] = self.manager.lock()
        return guard

    def load_step(self, step: int) -> None:
        self.manager.load(str(self.place(step)), into=self.items, strict=True)


class TorchsnapshotTake(Overlapping, Torchsnapshot):
    """`async_take`, which returns when the state is copied; nothing waits before the update."""

    title = "torchsnapshot async_take"

    def begin(self, step: int) -> Done:
        pending = self.library.Snapshot.async_take(str(self.place(step)), self.app_state)
        return lambda: pending.wait()

    def load_step(self, step: int) -> None:
        self.library.Snapshot(str(self.place(step))).restore(self.app_state)


class Resiliency(Overlapping):
    """nvidia-resiliency-ext's asynchronous writer for DCP, two processes, plans cached, with its forking caller.

    The persistent caller takes no copy of CPU tensors: what it would write is the state as it has become. The fork's memory
    is copied page by page when the trainer writes to it. Three functions of `torch.cuda` that it calls are replaced
    by ones that do nothing, since there is no such device.
    """

    key, title, package = "nvrx", "nvidia-resiliency-ext, fork", "nvidia-resiliency-ext"
    forks = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        torch.cuda.synchronize = lambda device=None: None
        torch.cuda.current_device = lambda: "cpu"
        torch.cuda.set_device = lambda device: None
        be_alone()
        import torch.distributed.checkpoint as dcp
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        self.dcp, self.core, self.writers, self.saver = dcp, core, filesystem_async, state_dict_saver
        self.queue = core.AsyncCallsQueue(persistent=False)
        self.cache = state_dict_saver.CheckpointMetadataCache()

    def begin(self, step: int) -> Done:
        writer = self.writers.FileSystemWriterAsync(self.place(step), thread_count=2)
        planned = self.saver.save_state_dict_async_plan(
            self.tensors, writer, planner=self.dcp.DefaultSavePlanner(), enable_cache=True, metadata_cache=self.cache
        )
        save, preload, arguments = writer.get_save_function_and_args()
        finished = threading.Event()
        at_the_end = [lambda: self.saver.save_state_dict_async_finalize(*planned), finished.set]
        self.queue.schedule_async_request(self.core.AsyncRequest(save, arguments, at_the_end, preload_fn=preload))

        def done() -> None:
            if not finished.wait(SECONDS):
                raise TimeoutError(f"step {step} was not finalized in {SECONDS:.0f} s")

        return done

    def between(self) -> None:
        """Finalizing is the trainer's work here; a poll costs it little while the writers run."""
        self.queue.maybe_finalize_async_calls(no_dist=True)

    def load_step(self, step: int) -> None:
        self.dcp.load(self.tensors, checkpoint_id=self.place(step), no_dist=True)

    def close(self) -> None:
        self.queue.close()


def be_alone() -> None:
    """A process group of this process only, for libraries that will not work without."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


METHODS: dict[str, type[Overlapping]] = {
    method.key: method
    for method in (
        HoldfastStep,
        HoldfastThread,
        DCPSync,
        DCPThread,
        DCPProcess,
        TorchCheckpointingLock,
        TorchsnapshotTake,
        Resiliency,
    )
}
