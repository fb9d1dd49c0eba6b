"""The counting loader: a DataLoader whose sampler is told of each batch that the trainer gets.

The count moves when a batch is handed out, so that a checkpoint taken after the step that used it has it behind itself, and
what the workers have fetched beyond it is fetched again after a resume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..errors import Refused
from .deal import Span
from .sampler import Sampler


class Loader:
    """Iterates a DataLoader that has a `holdfast.data.Sampler` as its batch_sampler, and counts what the trainer consumes.

    Use it as the `data=` role of a State. Each `iter()` goes on with what is left of the current epoch, also after a `break`.
    With more than one rank the loader's collate function is wrapped in `Collate`, so that an empty batch, at the end of an
    epoch with fewer samples than ranks left, comes out as None: take part in the step's collectives with a loss of zero.
    A loader without a generator gets one, seeded from the position at each `iter()`.

    Raises:
        Refused: the loader has no such sampler, or gives batches in any order.
    """

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, Sampler):
            raise Refused(
                f"the batch_sampler of this {type(loader).__name__} is a {type(sampler).__name__} and knows no global position; "
                "build it with DataLoader(dataset, batch_sampler=holdfast.data.Sampler(dataset, batch_size=...))"
            )
        check_order(loader)
        self.loader = loader
        self.sampler = sampler
        self._turn = 0
        self._generator = own_generator(loader)
        sampler.is_counted_by_a_loader = True
        if sampler.world > 1 and not isinstance(loader.collate_fn, Collate):
            loader.collate_fn = Collate(loader.collate_fn)

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        return self._batches(self._turn)

    def _batches(self, turn: int) -> Iterator[Any]:
        self._check(turn)
        if self._generator is not None:
            text = f"rank {self.sampler.rank} at {self.sampler.position} with seed {self.sampler.seed}"
            self._generator.manual_seed(seed_of(text))
        for batch in self.loader:
            self._check(turn)
            self.sampler.count()
            yield batch

    def _check(self, turn: int) -> None:
        """What an older iterator has fetched ahead is not what comes next any more."""
        if turn != self._turn:
            raise Refused(
                "this iterator is outdated: a state was loaded, or another iter() begun, since; call iter(loader) again"
            )

    def __len__(self) -> int:
        """Batches that are left of the current epoch."""
        return len(self.sampler)

    @property
    def epoch(self) -> int:
        return self.sampler.epoch

    @property
    def position(self) -> int:
        """The global sample position, counted over all epochs."""
        return self.sampler.position

    @property
    def skip(self) -> tuple[Span, ...]:
        """Ranges of global sample positions that are left out; when set, from the next `iter()` on."""
        return self.sampler.skip

    @skip.setter
    def skip(self, spans: Iterable[Sequence[int]]) -> None:
        self.sampler.skip = spans

    def skip_samples(self, spans: Iterable[Sequence[int]]) -> None:
        """Leave out these ranges too, from the next `iter()` on."""
        self.sampler.skip_samples(spans)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's: plain values, equal on all ranks."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a position; iterators from before are refused.

        Raises:
            Mismatch: it is of another dataset or order.
        """
        self.sampler.load_state_dict(state)
        self._turn += 1


def check_order(loader: Any) -> None:
    """Refuse a loader whose batches overtake each other: their number does not tell which ones came.

    Raises:
        Refused: it has `in_order=False` and several workers.
    """
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        raise Refused("with in_order=False nobody knows which batches were consumed; build the DataLoader with in_order=True")


def own_generator(loader: Any) -> Any:
    """Give a loader without a generator one, and return it; None if it has one.

    Each `iter()` of a DataLoader draws a seed for its workers, by default from torch's global generator: a resume in the middle
    of an epoch, which has one `iter()` more, would shift all random numbers of the training.
    """
    if getattr(loader, "generator", None) is not None:
        return None
    import torch

    loader.generator = torch.Generator()
    return loader.generator


def seed_of(text: str) -> int:
    """A seed for a torch.Generator."""
    return int.from_bytes(hashlib.sha256(f"holdfast workers of {text}".encode()).digest()[:7], "little")


class Collate:
    """A collate function that makes None of an empty batch, where torch's own would fail."""

    def __init__(self, collate: Callable[[Any], Any] | None = None) -> None:
        if collate is None:
            from torch.utils.data import default_collate

            collate = default_collate
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        return self._collate(samples) if len(samples) else None
