"""Resharding of data that workers hold: what a dataset must know, and where torchdata keeps the state of a worker.

A shard is what one worker of one rank reads; shard numbers are rank * workers + worker, and a loader without workers is one
shard. Only this module knows the form of StatefulDataLoader's state dict.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from ..errors import Unsupported


@runtime_checkable
class Reshardable(Protocol):
    """A dataset (or its iterator) whose shards can be united and cut anew: nothing may be lost, nothing come twice."""

    def merge(self, states: list[Any]) -> Any:
        """The state of the whole from those of all shards, in the order of their numbers."""

    def split(self, whole: Any, shard: int, count: int) -> Any:
        """The state of one shard of `count`. It is called on each rank, and must give the same for the same arguments."""


def shards_of(inner: dict[str, Any]) -> list[Any]:
    """The states of the dataset in a StatefulDataLoader's state dict, by worker; one if it has no workers.

    Where the dataset and its iterator both have a state, a shard's is `{"dataset": ..., "iterator": ...}`.

    Raises:
        Unsupported: neither has one, or batches would have to be read again to know it.
    """
    if inner.get("_steps_since_snapshot"):
        raise Unsupported(
            "the loader's last snapshot is older than its position: build StatefulDataLoader with snapshot_every_n_steps=1"
        )
    found = [_state_of(worker) for worker in _workers(inner)]
    if any(state is None for state in found):
        raise Unsupported("neither the dataset nor its iterator has a state_dict, so torchdata only counts batches")
    return found


def is_finished(inner: dict[str, Any]) -> bool:
    """Whether the loader's iterator had come to its end."""
    return bool(inner["_iterator_finished"])


def with_shards(template: dict[str, Any], shards: list[Any], finished: bool) -> dict[str, Any]:
    """A state dict of a loader that has just begun, with other states in its workers."""
    workers = _workers(template)
    if len(workers) != len(shards):
        raise ValueError(f"{len(shards)} shards for {len(workers)} workers")
    filled = [_with_state(worker, state) for worker, state in zip(workers, shards, strict=True)]
    if "_snapshot" not in template:
        return {**template, **filled[0], "_iterator_finished": finished}
    by_name = {f"worker_{number}": worker for number, worker in enumerate(filled)}
    snapshot = {**template["_snapshot"], "_worker_snapshots": by_name}
    return {**template, "_snapshot": snapshot, "_iterator_finished": finished}


def are_equal(a: Any, b: Any) -> bool:
    """Whether two states are equal, arrays and tensors among their values included."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(are_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(are_equal, a, b))
    if hasattr(a, "shape") or hasattr(b, "shape"):
        return getattr(a, "shape", None) == getattr(b, "shape", None) and bool((a == b).all())
    return bool(a == b)


def _workers(inner: dict[str, Any]) -> list[dict[str, Any]]:
    """What torchdata keeps for each worker, under `dataset_state` and `fetcher_state`."""
    if "_snapshot" in inner:
        by_name = inner["_snapshot"]["_worker_snapshots"]
        return [by_name[f"worker_{number}"] for number in range(len(by_name))]
    if "fetcher_state" in inner:
        return [inner]
    raise Unsupported(f"this is no state of torchdata's StatefulDataLoader as we know it: it has {sorted(inner)}")


def _state_of(worker: dict[str, Any]) -> Any:
    dataset, iterator = worker["dataset_state"], (worker["fetcher_state"] or {}).get("dataset_iter_state")
    if dataset is not None and iterator is not None:
        return {"dataset": dataset, "iterator": iterator}
    return dataset if iterator is None else iterator


def _with_state(worker: dict[str, Any], state: Any) -> dict[str, Any]:
    """The same worker, not at its end, with another state where it keeps it."""
    fetcher = worker["fetcher_state"] or {}
    has_dataset, has_iterator = worker["dataset_state"] is not None, fetcher.get("dataset_iter_state") is not None
    if not has_dataset and not has_iterator:
        raise Unsupported("neither the dataset nor its iterator has a state_dict, so nothing can be restored into them")
    dataset = state["dataset"] if has_dataset and has_iterator else state
    iterator = state["iterator"] if has_dataset and has_iterator else state
    return {
        **worker,
        "dataset_state": dataset if has_dataset else None,
        "fetcher_state": {**fetcher, "dataset_iter_state": iterator if has_iterator else None, "fetcher_ended": False},
    }
