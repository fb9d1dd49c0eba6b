"""What belongs to each rank: stored for each of them, and loaded into as many, or through a rule for another number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import Mismatch, Unsupported

Reshape = Callable[[Sequence[Any], int, int], Any]


class PerRank:
    """A part of a state that is another one on each rank, such as the buffer of a data loader.

    Args:
        obj: anything with `state_dict` and `load_state_dict`, or a dict, which is filled in place.
        reshape: called as `reshape(states, rank, world)` where another number of ranks loads than has saved: the states of all
            old ranks, in their order, give that of the new `rank` of `world`. Without it such a load is refused. An object with
            a method `fits(state)` is asked whether a state of its own rank fits, else `reshape` is called, too.
    """

    axis = "rank"

    def __init__(self, obj: Any, reshape: Reshape | None = None) -> None:
        if not isinstance(obj, dict) and not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
            raise Unsupported(
                f"PerRank of a {type(obj).__qualname__}: give an object with state_dict and load_state_dict, or a dict"
            )
        self.obj = obj
        self.reshape = reshape

    def place(self, rank: int, position: int, world: int) -> tuple[int, int]:
        """Which of how many states a rank has, whose position among the ranks that save or load together is given."""
        return position, world

    def state(self) -> Any:
        """The state of this rank."""
        return self.obj if isinstance(self.obj, dict) else self.obj.state_dict()

    def load(self, state: Any) -> None:
        """Take a state of one rank."""
        if isinstance(self.obj, dict):
            self.obj.clear()
            self.obj.update(state)
        else:
            self.obj.load_state_dict(state)

    def take(self, tree: dict[Any, Any], number: int, count: int) -> None:
        """Take what is stored of all ranks, or only of this one.

        Raises:
            Mismatch: it is that of another number of ranks, and there is no rule.
        """
        stored = tree.get(self.axis)
        if isinstance(stored, dict) and number in stored and self._fits(stored[number], len(stored) == count):
            self.load(stored[number])
        elif self.reshape is not None:
            states = [stored[i] for i in sorted(stored)] if isinstance(stored, dict) else [tree]
            self.load(self.reshape(states, number, count))
        else:
            raise Mismatch("a part that belongs to each rank is stored for another number of ranks, and has no reshape=")

    def _fits(self, state: Any, is_same_world: bool) -> bool:
        """Whether a state of this rank can be taken as it is; an object may know better, such as of its number of workers."""
        if self.reshape is None:
            return True
        return is_same_world and (not hasattr(self.obj, "fits") or bool(self.obj.fits(state)))
