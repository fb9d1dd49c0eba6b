"""The layouts that the training goes through: how many ranks, and what each of them holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in a grid: FSDP2 over one dimension, tensor parallelism over the other."""

    data: int
    """Ranks that read different samples, and that parameters are cut over."""
    tensor: int
    """Ranks that share the work on one sample."""

    @property
    def ranks(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        if self.tensor > 1:
            return f"{self.ranks} ranks (FSDP2 x TP, {self.data} x {self.tensor})"
        if self.data > 1:
            return f"{self.ranks} ranks (FSDP2)"
        return "1 rank (a plain process)"


ONE = Layout(1, 1)
LAYOUTS = (Layout(2, 2), Layout(2, 1), ONE, Layout(3, 1))
"""Three ranks come last: no dimension of the model is a multiple of three, so their pieces are of unequal size."""

BATCH = 12
"""Samples of a step, over all ranks: what each number of data-parallel ranks divides."""
SAMPLES = 480
"""In an epoch: 40 steps."""
CONTEXT = 64
"""Tokens of a sample."""
