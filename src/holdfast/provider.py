"""State that is more than what a module, an optimizer or a `state_dict` gives: users say what it is and when it may be copied."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

VALUE, VOLATILE, STABLE = KINDS = ("value", "volatile", "stable")


class Provider(abc.ABC):
    """A part of a state, to be derived from: `State(cache=MyProvider(...))`.

    Attributes:
        kind: of its tensors. `value`, `volatile`: copied before `step` returns, as something may change them at any time.
            `stable`: nothing changes them before an optimizer steps, so that they may be copied in the background; this is
            checked as for parameters, and what is seen to move is copied at once all the same.
    """

    kind: ClassVar[str] = VOLATILE

    @abc.abstractmethod
    def capture(self) -> Any:
        """The state now: a tree of dicts, lists and tuples with tensors and plain values as leaves. Live tensors, not copies."""

    @abc.abstractmethod
    def restore(self, state: Any) -> None:
        """Take a tree as `capture` gives it."""

    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return _bytes_of(self.capture())

    def state_dict(self) -> Any:
        """What `capture` gives."""
        return self.capture()

    def load_state_dict(self, state: Any) -> None:
        """As `restore`."""
        self.restore(state)


def _bytes_of(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(_bytes_of, tree.values()))
    return sum(map(_bytes_of, tree)) if isinstance(tree, (list, tuple)) else 0
