"""What the caller of a load asked for: which names, under which names, what may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..patterns import as_list, matches_any


@dataclass(frozen=True)
class Wishes:
    """What the caller asked of a load."""

    select: Sequence[str] = ()
    """Empty: everything."""
    exclude: Sequence[str] = ()
    waive: Sequence[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    cast: Mapping[str, Any] = field(default_factory=dict)
    """Pattern to the dtype that stored tensors are cast to; the live one must be that."""
    live: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        select: Any = None,
        exclude: Any = (),
        waive: Any = (),
        rename: Any = None,
        cast: Any = None,
        live: Any = (),
    ) -> Wishes:
        return cls(as_list(select), as_list(exclude), as_list(waive), dict(rename or {}), dict(cast or {}), as_list(live))

    def wants(self, name: str) -> bool:
        return (not self.select or matches_any(name, self.select)) and not matches_any(name, self.exclude)

    def keeps_live(self, name: str) -> bool:
        """Whether the live hyper-parameter stays; patterns match the whole name or its last part."""
        return matches_any(name, self.live) or matches_any(name.rpartition(".")[2], self.live)
