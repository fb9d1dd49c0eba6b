"""holdfast: checkpoints for training large models with PyTorch that do not lie and are not lost.

A reader's map, from the bottom up:

    errors              the tree of errors, with exit codes
    format, layout      what bytes mean: records, index, data files, digests, values; boxes (pure)
    plan                what goes where, as values (pure)
    store               where bytes go: local directories, memory, wrappers
    run                 writing a step, the decision, history, marks, pruning
    policy              when to save, what to keep, what a save will take (pure)
    tensors, tree, live a job's state, taken apart
    loading             opening, matching, filling, the ledger
    ranks, sharding     the ranks of the job as a team; from DTensor, FSDP1, ZeRO to boxes
    preemption          what tells a job to stop; stopping as all ranks agree on it
    data                samplers and loaders whose position fits any number of ranks
    parts, state        modules, optimizers, generators, objects, containers
    interop             safetensors in and out, torch out
    api, runs           the verbs; a run
    agent               the process of a node that holds snapshots and writes them; its engine
    capture, background copying state while training goes on, and what it takes to begin
    checkpointer        the one object that a trainer holds

Names are loaded when first used, so that the command line starts without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import VERSION

if TYPE_CHECKING:
    from .api import export, load, restore, save
    from .api import open_checkpoint as open
    from .background import Agent
    from .checkpointer import Checkpointer, Init
    from .errors import (
        Corrupt,
        Deadline,
        HoldfastError,
        Mismatch,
        NoCheckpoint,
        NoSpace,
        Overdue,
        Refused,
        Superseded,
        Torn,
        Unavailable,
        Unsupported,
    )
    from .format.values import register
    from .handle import Handle
    from .loading.checkpoint import Checkpoint
    from .loading.ledger import Ledger
    from .per_rank import PerRank
    from .policy.keep import Keep
    from .policy.save import Every
    from .preemption.settings import Preemption
    from .provider import Provider
    from .runs import Run
    from .state import State

_HOMES = {
    "Agent": ".background",
    "Checkpoint": ".loading.checkpoint",
    "Checkpointer": ".checkpointer",
    "Corrupt": ".errors",
    "Deadline": ".errors",
    "Every": ".policy.save",
    "Handle": ".handle",
    "HoldfastError": ".errors",
    "Init": ".checkpointer",
    "Keep": ".policy.keep",
    "Ledger": ".loading.ledger",
    "Mismatch": ".errors",
    "NoCheckpoint": ".errors",
    "NoSpace": ".errors",
    "Overdue": ".errors",
    "PerRank": ".per_rank",
    "Preemption": ".preemption.settings",
    "Provider": ".provider",
    "Refused": ".errors",
    "Run": ".runs",
    "State": ".state",
    "Superseded": ".errors",
    "Torn": ".errors",
    "Unavailable": ".errors",
    "Unsupported": ".errors",
    "export": ".api",
    "load": ".api",
    "open": ".api",
    "register": ".format.values",
    "restore": ".api",
    "save": ".api",
}
_CALLED = {"open": "open_checkpoint"}

__version__ = VERSION

__all__ = [
    "Agent",
    "Checkpoint",
    "Checkpointer",
    "Corrupt",
    "Deadline",
    "Every",
    "Handle",
    "HoldfastError",
    "Init",
    "Keep",
    "Ledger",
    "Mismatch",
    "NoCheckpoint",
    "NoSpace",
    "Overdue",
    "PerRank",
    "Preemption",
    "Provider",
    "Refused",
    "Run",
    "State",
    "Superseded",
    "Torn",
    "Unavailable",
    "Unsupported",
    "__version__",
    "export",
    "load",
    "open",
    "register",
    "restore",
    "save",
]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module(".data", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name], __name__), _CALLED.get(name, name))
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
