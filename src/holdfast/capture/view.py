"""The state as it is at one call, fast: what is known to consist of the same tensors is not taken apart again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..live import Live
from ..run.contents import Contents, TensorItem
from ..signature import signature
from ..state import State, contents_of


@dataclass(frozen=True)
class Look:
    """What one look gave.

    Attributes:
        contents: with sources that read the live tensors. fresh: by position in `contents.tensors`, those that were made for this
            look, so that only it knows them. is_new: the structure is not that of the look before. stable: roles whose tensors
            may be copied in the background, though they are fresh.
    """

    contents: Contents
    fresh: tuple[int, ...]
    is_new: bool
    stable: frozenset[str] = frozenset()


class View:
    """Looks at a state again and again.

    Args:
        ranks: global ranks that save together; empty for a process that works alone.
    """

    def __init__(self, state: State, ranks: tuple[int, ...]) -> None:
        self._state, self._ranks = state, ranks
        self._signature: list[int] | None = None
        self._live: Live | None = None
        self._known: Contents | None = None
        self._at: dict[str, int] = {}
        """Position among the known tensors, of those that are made anew at each look."""

    def look(self) -> Look:
        """The state now.

        Raises:
            Unsupported: something in it has no stored form.
        """
        parts = self._state.parts
        if (
            self._signature is not None
            and self._live is not None
            and self._known is not None
            and signature(parts, self._live.plain) == self._signature
        ):
            found = self._again(self._live, self._known)
            if found is not None:
                return Look(found, tuple(self._at.values()), False, frozenset(self._live.stable))
        live = self._state.live(ranks=self._ranks)
        known = contents_of(live)
        changing = Live(rank=live.rank, ranks=live.ranks, rules=live.rules)
        for add in live.again:
            add(changing)
        position = {item.name: at for at, item in enumerate(known.tensors)}
        self._at = {name: position[name] for name in changing.tensors}
        self._signature, self._live = signature(parts, live.plain), live
        self._known = known
        return Look(known, tuple(self._at.values()), True, frozenset(live.stable))

    def forget(self) -> None:
        """Take everything apart at the next look."""
        self._signature = None

    def _again(self, live: Live, known: Contents) -> Contents | None:
        """The known contents with what may have changed; None if its structure has."""
        changing = Live(rank=live.rank, ranks=live.ranks, rules=live.rules)
        for add in live.again:
            add(changing)
        new = contents_of(changing)
        if changing.tensors.keys() != self._at.keys() or len(new.tensors) != len(self._at):
            return None
        tensors = list(known.tensors)
        for item in new.tensors:
            at = self._at[item.name]
            if _shape_of(item) != _shape_of(tensors[at]):
                return None
            tensors[at] = item
        return replace(known, tensors=tensors, values=new.values, streams=new.streams)


def _shape_of(item: TensorItem) -> tuple[object, ...]:
    return item.name, item.dtype, item.shape, item.box, item.alias, item.path
