"""The training loops beside which states are saved: real work on one thread, and a real optimizer that changes the state.

A loop alternates pieces of computing and updates. An update is a step of AdamW over a group of the parameters, the groups in
turn; gradients are fixed and random. What an update is made of does not matter here: that it is a real step through
`torch.optim`, changes what is being saved, and takes as long each time does.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.state import TrainingState

GROUPS = 10
SMALL_ELEMENTS = 600_000


@dataclass(frozen=True)
class Loop:
    """What a trainer does between two updates, and what an update is."""

    title: str
    is_launching: bool
    """A piece of work is many tiny operations, rather than three large products."""
    pieces: int
    """Of work between two updates."""
    groups: str
    """What one update changes: `all`, a `part` of the parameters, or a single `small` one of them."""
    kernel: str
    """Which of AdamW's: foreach or fused."""
    least_updates: int
    """In a window, however soon a save is durable."""


LOOPS = {
    "compute": Loop("computes 4 x 80 ms between updates of a tenth", False, 4, "part", "foreach", 3),
    "launch": Loop("launches tiny operations, an update each 2 ms", True, 1, "small", "foreach", 100),
    "interval": Loop("computes 0.5 s between updates of all", False, 6, "all", "fused", 2),
}
"""A fused update of the whole state takes 0.1 s; a foreach one 0.7 s, and varies by more than what is to be seen beside it."""


class Products:
    """The three products of a linear layer's forward and backward: 80 ms on one thread at full size."""

    def __init__(self, width: int) -> None:
        self._inputs, self._weight, self._gradient, self._result = (torch.randn(width, width) for _ in range(4))

    def __call__(self) -> None:
        torch.mm(self._inputs, self._weight, out=self._result)
        torch.mm(self._gradient, self._weight.T, out=self._result)
        torch.mm(self._inputs.T, self._gradient, out=self._result)


class Launches:
    """Forward and backward of a small network: some hundred operations of a few microseconds."""

    def __init__(self) -> None:
        layers = (nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(18))
        self._network = nn.Sequential(*layers)
        self._batch = torch.randn(16, 32)

    def __call__(self) -> None:
        self._network.zero_grad(set_to_none=True)
        self._network(self._batch).square().mean().backward()


@dataclass
class Update:
    """Seconds of one update: waiting until it may begin, and itself."""

    waited: float
    took: float


class Trainer:
    """Runs one loop over a state."""

    def __init__(self, state: TrainingState, loop: Loop) -> None:
        self._optimizer = state.optimizer
        self._groups = grouped(list(state.model.parameters()), loop.groups)
        self._pieces = loop.pieces
        self._work: Callable[[], None] = Launches() if loop.is_launching else Products(width=17 * state.size.positions // 16)
        largest = max(parameter.numel() for parameter in state.model.parameters())
        self._gradients = torch.randn(largest, generator=torch.Generator().manual_seed(7)) * 1e-3
        for group in self._optimizer.param_groups:
            group["foreach"], group["fused"] = loop.kernel == "foreach", loop.kernel == "fused"
        self._may_begin = 0.0
        self._mark = self._optimizer.register_step_pre_hook(self._marked)

    def _marked(self, *_: Any) -> None:
        """Runs after the hooks that are for all optimizers: what a library waits for in one of those has been waited for."""
        self._may_begin = time.perf_counter()

    def close(self) -> None:
        self._mark.remove()

    def compute(self, between: Callable[[], None]) -> None:
        """The work between two updates."""
        for _ in range(self._pieces):
            self._work()
            between()

    def update(self, number: int, guard: Callable[[], AbstractContextManager[Any]]) -> Update:
        group = self._groups[number % len(self._groups)]
        for parameter in group:
            parameter.grad = self._gradients[: parameter.numel()].view(parameter.shape)
        start = time.perf_counter()
        with guard():
            self._optimizer.step()
        end = time.perf_counter()
        for parameter in group:
            parameter.grad = None
        return Update(self._may_begin - start, end - self._may_begin)


def grouped(parameters: list[Tensor], groups: str) -> list[list[Tensor]]:
    """The parameters that are updated together, a group for each update, in order."""
    if groups == "all":
        return [parameters]
    if groups == "small":
        return [[parameter] for parameter in parameters if parameter.numel() <= SMALL_ELEMENTS]
    enough = sum(parameter.numel() for parameter in parameters) / GROUPS
    found: list[list[Tensor]] = [[]]
    for parameter in parameters:
        if sum(other.numel() for other in found[-1]) >= enough:
            found.append([])
        found[-1].append(parameter)
    return found
