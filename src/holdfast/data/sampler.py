"""The sampler: which samples this rank reads, kept as one global position that any other number of ranks can go on from.

A DataLoader takes it as `batch_sampler`. What its workers fetch ahead does not move the position: only what was handed to
the trainer does, counted by `Loader` or told by `advance()`. The state is plain, small, and equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from ..errors import Mismatch, Refused
from .deal import Deal, Span, merged
from .order import KIND, MAX_LENGTH, Order
from .place import place


class Sampler:
    """Batches of sample numbers for one rank; `iter()` gives those that are left of the current epoch.

    Each epoch is a permutation of all samples that depends on length, seed and epoch only. The job takes `batch_size * world`
    samples of it at a time, and each rank its consecutive part of them. Where fewer are left at the end of an epoch, they are
    dealt as evenly as they go: every sample is seen exactly once, all ranks see equally many batches, and where fewer samples
    than ranks are left some batches are empty lists. `drop_last` leaves such a remainder out instead.

    Args:
        data: the dataset, or its length.
        batch_size: samples of a batch of this rank. It may be set later, and holds from the next `iter()` on.
        rank, world: of the data-parallel group: processes that must read the same data have the same. They default to
            torch.distributed's, or to 0 of 1.
        skip: half-open ranges of global sample positions to leave out, such as `Checkpointer.resume(skip_samples=)` records.
            It may be set later, and holds from the next `iter()` on.
        allow_change: load the state of another length, seed or order: the epoch that was begun cannot be finished in another
            order, so the next one begins.
    Raises:
        ValueError: an argument that cannot be.
        Refused: the launcher started several ranks, and the process group is not initialised.
    """

    def __init__(
        self,
        data: int | Sized,
        *,
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        skip: Iterable[Sequence[int]] = (),
        allow_change: bool = False,
    ) -> None:
        self._length = data if isinstance(data, int) else len(data)
        if not 0 < self._length <= MAX_LENGTH:
            raise ValueError(f"there are {self._length} samples; an epoch needs between 1 and {MAX_LENGTH}")
        self.rank, self.world = place(rank, world)
        self._shuffle, self._seed, self._allow_change = bool(shuffle), int(seed), allow_change
        self._at = 0
        self._planned = self._checked(Deal(self._length, batch_size, self.world, drop_last, merged(skip)))
        self._active: Deal | None = None  # the rules by which the batches now on their way were dealt
        self._order: tuple[int, Order] | None = None
        self._uncounted = False  # an epoch was dealt to its end, and nothing was counted since it began
        self.is_counted_by_a_loader = False

    @property
    def seed(self) -> int:
        return self._seed

    @staticmethod
    def _checked(deal: Deal) -> Deal:
        if deal.batch_size < 1:
            raise ValueError(f"a batch cannot have {deal.batch_size} samples")
        if deal.drop_last and deal.global_batch > deal.length:
            raise ValueError(f"drop_last leaves nothing: a global batch has {deal.global_batch} samples, an epoch {deal.length}")
        return deal

    def _replan(self, batch_size: int, skip: tuple[Span, ...]) -> None:
        old = self._planned
        self._planned = self._checked(Deal(old.length, batch_size, old.world, old.drop_last, skip))

    # --- the position -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The global sample position, counted over all epochs: epoch * length + position in the epoch."""
        return (self._active or self._planned).settle(self._at)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.position // self._length

    @property
    def batch_size(self) -> int:
        return self._planned.batch_size

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        self._replan(value, self._planned.skip)

    @property
    def skip(self) -> tuple[Span, ...]:
        """Half-open ranges of global sample positions that are left out: sorted and joined."""
        return self._planned.skip

    @skip.setter
    def skip(self, spans: Iterable[Sequence[int]]) -> None:
        self._replan(self._planned.batch_size, merged(spans))

    def skip_samples(self, spans: Iterable[Sequence[int]]) -> None:
        """Leave out these ranges too, from the next `iter()` on."""
        self.skip = [*self.skip, *spans]

    def advance(self, batches: int = 1) -> None:
        """Count batches as consumed; every rank does so for every batch, an empty one included.

        For a plain DataLoader without `holdfast.data.Loader`, which counts by itself.

        Raises:
            Refused: a Loader counts already.
        """
        if self.is_counted_by_a_loader:
            raise Refused("holdfast.data.Loader counts what it hands out; advance() would count it twice")
        self.count(batches)

    def count(self, batches: int = 1) -> None:
        """`advance` for the wrapper that counts."""
        deal = self._active or self._planned
        for _ in range(batches):
            self._at = deal.settle(deal.take(deal.settle(self._at))[1])
        self._uncounted = False

    # --- dealing ------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Batches:
        """The rest of the current epoch, from what was consumed.

        Raises:
            Refused: an epoch was dealt to its end and nothing of it was counted; it would come again and again.
        """
        if self._uncounted and not self.is_counted_by_a_loader:
            raise Refused(
                "an epoch was read, but none of it was counted as consumed: iterate holdfast.data.Loader(loader), "
                "or call sampler.advance() after each batch"
            )
        self._active = self._planned
        return Batches(self, self._planned, self.position)

    def __len__(self) -> int:
        """Batches that `iter()` gives now: those left of the current epoch."""
        return self._planned.batches_left(self._planned.settle(self._at))

    def samples(self, spans: Iterable[Span]) -> list[int]:
        """The sample numbers at spans of global positions of one epoch."""
        found: list[int] = []
        for start, stop in spans:
            epoch, first = divmod(start, self._length)
            if self._order is None or self._order[0] != epoch:
                self._order = epoch, Order(self._length, self._seed, epoch, self._shuffle)
            found += self._order[1].at(np.arange(first, first + stop - start, dtype=np.int64))
        return found

    def has_dealt_all(self, begun_at: int) -> None:
        """Told by an iterator at its end."""
        self._uncounted = self._at <= begun_at

    def moved_to(self, at: int) -> None:
        """Told by an iterator whose state torchdata restored."""
        self._at = at

    # --- the state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain values, equal on all ranks whatever their number."""
        at = self.position
        return {
            "epoch": at // self._length,
            "position": at % self._length,
            "length": self._length,
            "seed": self._seed,
            "order": self._kind,
            "skip": [list(span) for span in self.skip if span[1] > at],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler was: of any number of ranks, with any batch size. Its `skip` is added to ours.

        Raises:
            Mismatch: it dealt another dataset or order, and `allow_change` was not given. Nothing was changed.
        """
        ours = {"length": self._length, "seed": self._seed, "order": self._kind}
        differences = tuple(
            f"{key}: {state.get(key)!r} was saved, {now!r} is here" for key, now in ours.items() if state.get(key) != now
        )
        if differences and not self._allow_change:
            raise Mismatch(
                f"the data position is of another order of samples ({'; '.join(differences)}): give the sampler what it had, or "
                "allow_change=True to begin the next epoch in the new order",
                differences,
            )
        if differences:  # positions of the old order mean nothing here, those of its skip included
            self._at = (int(state["epoch"]) + (int(state["position"]) > 0)) * self._length
        else:
            self._replan(self._planned.batch_size, merged([*self.skip, *state.get("skip", ())]))
            self._at = int(state["epoch"]) * self._length + int(state["position"])
        self._active, self._uncounted = None, False

    @property
    def _kind(self) -> str:
        return KIND if self._shuffle else "sequential"


class Batches(Iterator[list[int]]):
    """One pass of a sampler over the rest of an epoch: runs ahead of what is consumed.

    It has a state of its own for a StatefulDataLoader that is not wrapped: torchdata keeps it with each batch that it sends to
    its workers, and without one would begin the epoch again.
    """

    def __init__(self, sampler: Sampler, deal: Deal, at: int) -> None:
        self._sampler, self._deal = sampler, deal
        self._begun, self._at, self._end = at, at, deal.end(at)

    def __next__(self) -> list[int]:
        if self._at >= self._end:
            self._sampler.has_dealt_all(self._begun)
            raise StopIteration
        spans, after = self._deal.take(self._at)
        self._at = self._deal.settle(after)
        return self._sampler.samples(self._deal.share(spans, self._sampler.rank))

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at, "end": self._end}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at, self._end = state["at"], state["end"]
        self._sampler.moved_to(self._at)
