"""The adapter for torchdata's StatefulDataLoader: exact where nothing changed, resharded where a rule says how, else refused.

With our Sampler the state is the global position, equal on all ranks. Else each rank has its own: torchdata's, with what its
workers hold. For another number of ranks or workers the shards of all old ranks are merged and split by the dataset's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import Mismatch, Refused
from .loader import Loader, check_order, own_generator, seed_of
from .place import place
from .reshard import Reshardable, are_equal, is_finished, shards_of, with_shards
from .sampler import Sampler
from .stream import ShardedStream

Merge = Callable[[list[Any]], Any]
Split = Callable[[Any, int, int], Any]


class StatefulLoader:
    """Iterates a StatefulDataLoader, and has a state that can go on elsewhere.

    As a role: `data=PerRank(loader, reshape=loader.reshape)`; with our Sampler inside, `data=loader` is enough. All ranks have
    the same number of workers.

    Args:
        loader: a torchdata StatefulDataLoader.
        merge, split: the rule for another number of ranks or workers, as in `Reshardable`; by default the dataset's own.
        rank, world: default to those of the Sampler or ShardedStream inside, else to torch.distributed's, or to 0 of 1.
    Raises:
        Refused: the loader cannot be resharded as it is built, or gives batches in any order.
    """

    def __init__(
        self,
        loader: Any,
        *,
        merge: Merge | None = None,
        split: Split | None = None,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        if (merge is None) != (split is None):
            raise ValueError("give both merge= and split=, or neither")
        check_order(loader)
        self.loader = loader
        self._counted = _counted(loader)
        self._place = place(*_known(loader, self._counted)) if rank is None and world is None else place(rank, world)
        if merge is None and isinstance(loader.dataset, Reshardable):
            merge, split = loader.dataset.merge, loader.dataset.split
        self._merge, self._split = merge, split
        self._loaded: dict[str, Any] | None = None  # a state that no iterator has taken up yet
        if self._counted is None:
            self._seed_workers()
            if merge is not None and loader.snapshot_every_n_steps != 1:
                raise Refused("what workers hold is exact only with snapshot_every_n_steps=1; build StatefulDataLoader with it")

    def _seed_workers(self) -> None:
        import torch

        if (generator := own_generator(self.loader)) is not None:
            generator.manual_seed(seed_of(f"rank {self._place[0]} with seed {torch.initial_seed()}"))

    @property
    def sampler(self) -> Sampler | None:
        """The Sampler inside, if the position is kept by one."""
        return None if self._counted is None else self._counted.sampler

    def __iter__(self) -> Iterator[Any]:
        if self._counted is not None:
            return iter(self._counted)
        if self._loaded is not None and "shards" in self._loaded:
            self._fill(self._loaded["shards"], self._loaded["finished"])
        self._loaded = None
        batches: Iterator[Any] = iter(self.loader)
        return batches

    def __len__(self) -> int:
        return len(self.loader)

    def skip_samples(self, spans: Iterable[Sequence[int]]) -> None:
        """Leave out these ranges of global sample positions too, from the next `iter()` on.

        Raises:
            Refused: no Sampler is inside, so there are no such positions.
        """
        if self._counted is None:
            raise Refused(
                "a stream has no global sample positions to skip; a dataset with a length has, with holdfast.data.Sampler"
            )
        self._counted.skip_samples(spans)

    def _fill(self, shards: list[Any], finished: bool) -> None:
        """Put other states into the workers of a loader that has just begun: it knows the form of its own state best."""
        self.loader.load_state_dict({})
        self.loader.load_state_dict(with_shards(self.loader.state_dict(), shards, finished))

    # --- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank consumed up to here, and what its workers hold. Before the first batch it starts the workers."""
        if self._counted is not None:
            return self._counted.state_dict()
        if self._loaded is not None:
            return self._loaded
        rank, world = self._place
        return {"rank": rank, "world": world, "workers": self.loader.num_workers, "inner": self.loader.state_dict()}

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether `load_state_dict` can take this rank's own old state; else `reshape` is needed, with those of all ranks."""
        if self._counted is not None:
            return "position" in state
        rank, world = self._place
        is_ours = (state.get("rank"), state.get("world")) == (rank, world)
        return is_ours and (world == 1 or _shard_count(state["workers"]) == self._shards)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was; call it before `iter()`.

        Raises:
            Mismatch: it is of another rank or number of ranks, or of another kind of loader. Nothing was changed.
            Refused: the number of workers changed, and with it the shards of all ranks.
        """
        if self._counted is not None:
            if "inner" in state or "shards" in state:
                raise Mismatch("the state is of a loader without holdfast's Sampler, which has no global position")
            self._counted.load_state_dict(state)
            return
        self._check(state)
        if "inner" in state and state["workers"] == self.loader.num_workers:
            self.loader.load_state_dict(state["inner"])
            self._loaded = state
        elif _shard_count(state["workers"]) == self._shards:
            self._loaded = self._with(_shards(state), _has_finished(state))
        else:
            self._loaded = self.reshape([state])

    def reshape(self, states: Sequence[dict[str, Any]], rank: int | None = None, world: int | None = None) -> dict[str, Any]:
        """The state of this loader from those of all old processes of the job; pure.

        Where neither ranks nor workers changed it is the rank's own state, untouched. The rank and world that count are those
        that the loader was built with, then and now: processes that read the same data have the same, and equal states.
        `rank` and `world`, of the process in the job, are there for `PerRank`.

        Raises:
            Refused: there is no rule to merge and split what the workers hold.
            Mismatch: `states` are not those of all ranks of one job.
        """
        if self._counted is not None:
            if any(state != states[0] for state in states):
                raise Mismatch("the old ranks do not agree on the global position of the data")
            return states[0]
        readers = _readers(states)
        mine, count = self._place
        if len(readers) == count and _shard_count(readers[mine]["workers"]) == self._shards:
            return readers[mine]
        if self._merge is None or self._split is None:
            raise Refused(self._no_rule(readers))
        whole = self._merge([shard for state in readers for shard in _shards(state)])
        shards = [self._split(whole, mine * self._shards + n, count * self._shards) for n in range(self._shards)]
        return self._with(shards, all(map(_has_finished, readers)))

    @property
    def _shards(self) -> int:
        return _shard_count(self.loader.num_workers)

    def _with(self, shards: list[Any], finished: bool) -> dict[str, Any]:
        rank, world = self._place
        return {"rank": rank, "world": world, "workers": self.loader.num_workers, "shards": shards, "finished": finished}

    def _check(self, state: dict[str, Any]) -> None:
        rank, world = self._place
        if "rank" not in state or (state["rank"], state["world"]) != (rank, world):
            raise Mismatch(
                f"this is rank {rank} of {world}, and the data state is {_whose(state)}: hold the loader as "
                "PerRank(loader, reshape=loader.reshape)"
            )
        if not self.fits(state):
            raise Refused(
                f"the data was read by {state['workers']} workers of each of {world} ranks, and here are "
                f"{self.loader.num_workers}: what they hold is dealt anew by reshape(), from the states of all ranks"
            )

    def _no_rule(self, states: list[dict[str, Any]]) -> str:
        kind, (_, world) = type(self.loader.dataset).__name__, self._place
        return (
            f"the data was read by {len(states)} ranks with {states[0]['workers']} workers each, and here are {world} with "
            f"{self.loader.num_workers}; nothing says how to merge and split the state of {kind}: give StatefulLoader merge= and "
            f"split=, or give {kind} these methods (holdfast.data.ShardedStream has them); a dataset with a length is best read "
            "by holdfast.data.Sampler"
        )


def _counted(loader: Any) -> Loader | None:
    """The counting loader, if the position is kept by our Sampler.

    Raises:
        Refused: the dataset has a state beside the position, which would be left out.
    """
    if not isinstance(getattr(loader, "batch_sampler", None), Sampler):
        return None
    if hasattr(loader.dataset, "state_dict"):
        raise Refused(
            f"{type(loader.dataset).__name__} is read by sample number and has a state of its own in each worker, which no "
            "position holds: let what it does depend on the sample number, and take state_dict away"
        )
    return Loader(loader)


def _known(loader: Any, counted: Loader | None) -> tuple[int | None, int | None]:
    """The rank and world that what is inside was built with."""
    if counted is not None:
        return counted.sampler.rank, counted.sampler.world
    return loader.dataset.place if isinstance(loader.dataset, ShardedStream) else (None, None)


def _readers(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One state for each rank that read data, in their order.

    Raises:
        Mismatch: one is missing, or two of one rank disagree.
    """
    found: dict[int, dict[str, Any]] = {}
    for state in states:
        if "rank" not in state or state["world"] != states[0]["world"]:
            raise Mismatch(f"among the data states of rank 0 of {states[0].get('world')} and others is {_whose(state)}")
        first = found.setdefault(state["rank"], state)
        if first is not state and not are_equal(_shards(first), _shards(state)):
            raise Mismatch(f"two processes read the data of rank {state['rank']} of {state['world']}, but are not equally far")
    world = states[0]["world"] if states else 0
    if missing := [rank for rank in range(world) if rank not in found]:
        raise Mismatch(f"the data states of ranks {missing[:8]} of {world} are missing")
    return [found[rank] for rank in range(world)]


def _shard_count(workers: int) -> int:
    return max(1, workers)


def _shards(state: dict[str, Any]) -> list[Any]:
    return list(state["shards"]) if "shards" in state else shards_of(state["inner"])


def _has_finished(state: dict[str, Any]) -> bool:
    return bool(state["finished"]) if "shards" in state else is_finished(state["inner"])


def _whose(state: dict[str, Any]) -> str:
    return f"that of rank {state['rank']} of {state['world']}" if "rank" in state else "of no StatefulLoader of ranks"
