"""The ranks of this job as a team, over the key-value store that torch.distributed was started with.

That store is not a training process group: a rank that hangs in a collective, or is dead, does not block it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from .errors import BoardGone, Refused, Unavailable
from .run.identity import this_process
from .run.team import Team

_FIRST_PAUSE_SECONDS = 0.0005
_LATE_SHARE = 0.05
"""By how much longer than needed a rank may wait: each pause is that share of the time waited so far."""
_teams: MutableMapping[Any, dict[tuple[int, ...], Team]] = weakref.WeakKeyDictionary()


class TorchBoard:
    """A `Board` on a torch store. Its own connection where the store can be cloned: a wait must not block those of training.

    It asks again and again, rather than block in the store: so a wait can be interrupted, and writes no warnings. The more
    ranks, the longer the pauses.
    """

    def __init__(self, store: Any, prefix: str, ranks: int) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._longest_pause = max(0.02, ranks / 32768)

    def post(self, key: str, data: bytes) -> None:
        self._call("set", self._prefix + key, data)

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        names = [self._prefix + key for key in keys]
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
        while names and not self._call("check", names):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * (1 + _LATE_SHARE), self._longest_pause)
        return True

    def read(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._prefix + key for key in keys]
        if len(names) > 1 and hasattr(self._store, "multi_get") and self._store.has_extended_api():
            return [bytes(data) for data in self._call("multi_get", names)]
        return [bytes(self._call("get", name)) for name in names]

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._call("delete_key", self._prefix + key)
            except (Unavailable, NotImplementedError):
                return

    def swap(self, key: str, expected: bytes, data: bytes) -> bytes:
        # torch's stores take b"" for a key that is not there, and give back the value that stands
        return bytes(self._call("compare_set", self._prefix + key, expected, data))

    def decide(self, key: str, data: bytes) -> bytes:
        return self.swap(key, b"", data)

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            with self._lock:
                return getattr(self._store, operation)(*arguments)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            raise _gone(error) from error


def team_of(ranks: Sequence[int] | None) -> Team | None:
    """The team of `ranks`, all of the job by default; None for a process that works alone.

    Raises:
        Refused: this process is not among them.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if ranks is not None and list(ranks) != [0]:
            raise Refused(f"ranks={list(ranks)}: torch.distributed is not initialised, so that this process is rank 0 of one")
        return None
    rank, world = int(distributed.get_rank()), int(distributed.get_world_size())
    members = tuple(range(world)) if ranks is None else tuple(sorted({int(r) for r in ranks}))
    if rank not in members or members[0] < 0 or members[-1] >= world:
        raise Refused(f"ranks={list(members)}: this is rank {rank} of {world}; only the ranks named may make this call")
    if len(members) == 1:
        return None
    store = distributed.distributed_c10d._get_default_store()
    known = _teams.setdefault(store, {})
    if members not in known:
        where = f"holdfast/{members[0]}-{members[-1]}-{len(members)}"
        generation = store.add(f"{where}/{rank}", 1)  # what an earlier job of this store has left is not ours
        known[members] = Team(members, rank, TorchBoard(store, f"{where}/{generation}/", len(members)), _node())
    elif known[members].node != _node():  # it was given another name since
        known[members] = replace(known[members], node=_node())
    return known[members]


def _node() -> str:
    """Equal for processes that can open each other's memory. HOLDFAST_NODE says otherwise, where containers hide it."""
    process = this_process()
    return os.environ.get("HOLDFAST_NODE") or f"{process.host}|{process.boot}|{os.getuid()}"


def _gone(error: RuntimeError) -> Unavailable:
    return BoardGone(f"the key-value store of torch.distributed does not answer: {error}")
