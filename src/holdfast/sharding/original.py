"""Original parameters inside live ones that hold several, or parts of them, in one flat memory: FSDP1, ZeRO.

An optimizer then keeps one state for many parameters. Elementwise state is taken apart by views; a scalar, such as a step
counter, stands for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Refused, Unsupported
from ..layout.layouts import Flat, Mesh
from .local import Sharded


@dataclass(frozen=True, slots=True)
class Original:
    """A parameter as the user's model has it, in the live parameter that an optimizer holds for it."""

    shape: tuple[int, ...]
    layout: Flat | Mesh
    stride: tuple[int, ...]
    """Of the whole parameter; of use where nothing is sharded."""
    whole: tuple[int, ...]
    """Shape of the live parameter between steps, and so of its elementwise state."""
    start: int
    """First element of this parameter in it."""
    numel: int
    """Elements of this parameter in it."""

    def of(self, tensor: torch.Tensor) -> Sharded | None:
        """This parameter's part of the live parameter or of a state tensor of it; None for a scalar, such as `step`.

        Raises:
            Unsupported: a state of another shape, of which nothing says what elements belong to this parameter.
        """
        if tuple(tensor.shape) != self.whole:
            if tensor.numel() == 1:
                return None
            raise Unsupported(
                f"optimizer state of shape {list(tensor.shape)} belongs to a parameter that is held as {list(self.whole)}: of "
                "flat parameters only elementwise state and scalars can be taken apart; wrap with fully_shard (FSDP2) instead"
            )
        if isinstance(self.layout, Flat):
            return Sharded(self.shape, self.layout, tensor.detach()[self.start : self.start + self.numel])
        if self.whole == self.shape:
            return Sharded(self.shape, self.layout, tensor)
        part = tensor.detach().as_strided(self.shape, self.stride, tensor.storage_offset() + self.start)
        return Sharded(self.shape, self.layout, part)


def one_for_all(state: dict[Any, Any], key: Any, name: str) -> Callable[[Any], None]:
    """A setter of the scalar `state[key]`, to be called with the value of each parameter that it stands for.

    Raises, when called:
        Refused: two parameters bring different values, which one scalar cannot hold.
    """
    given: list[Any] = []

    def put(value: Any) -> None:
        plain = value.item() if isinstance(value, torch.Tensor) else value
        if given and given[0] != plain:
            raise Refused(
                f"{name} is {plain} for one parameter and {given[0]} for another; this optimizer holds both in one flat memory "
                "and has one for both: load into an optimizer that keeps them apart"
            )
        given.append(plain)
        if isinstance(state.get(key), torch.Tensor):
            state[key].fill_(plain)
        else:
            state[key] = value

    return put
