"""What a job's state is: roles, taken apart into named tensors and values, and written as the contents of a step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .errors import Refused
from .format import values
from .format.digest import Running, digest
from .format.names import dotted, stored_path
from .layout.factors import layout_of, parse
from .layout.layouts import Layout, Whole
from .live import Live, LiveTensor
from .loading.checkpoint import NODE
from .parts import Owners, add_part, add_per_rank
from .patterns import matches_any
from .per_rank import PerRank
from .random_state import MODES, add_random_generators
from .run.contents import Contents, TensorItem
from .sharding.local import Sharded
from .tensors import TensorSource, dtype_name, logical_digest
from .tree import Path

_LASTING = (torch.nn.Module, torch.optim.Optimizer)
_touched: MutableMapping[Any, str | None] = weakref.WeakKeyDictionary()
"""Parts that a failed load has left half filled, and why: they may come back in another State."""


class State:
    """The state of a training job, by roles.

    A role is a torch module, an optimizer, anything with `state_dict` and `load_state_dict`, a tensor, a `torch.Generator`, a
    dict that is filled in place, a list of such parts whose names are united, or None: not held here.

    Args:
        rng: whether and how Python's, numpy's, torch's and CUDA's global generators belong to the state. True: of this process,
            or of each rank where several save together; False; "replicated": equal on all ranks; "data": a stream for each
            data-parallel rank of `mesh`; "rank": for each rank; "reseed": for each rank, and another number of ranks derives
            new streams from the stored ones.
        mesh: a DeviceMesh with names: for `rng="data"` and `layout`.
        layout: how hand-sharded plain tensors lie: pattern of names to an expression such as "(@tp * out, in)"; see
            docs/howto/layouts.md. A rule for a parameter holds for its optimizer state, too.
        roles: parts by name, such as `model=`, `optimizer=`, `scheduler=`, `data=`, `progress=`.
    Raises:
        Unsupported: a role that has no state.  Refused: two parts of a role give one name.
    """

    def __init__(
        self, *, rng: bool | str = True, mesh: Any = None, layout: Mapping[str, str] | None = None, **roles: Any
    ) -> None:
        if rng not in MODES:
            raise Refused(f"rng={rng!r}: give one of {', '.join(map(repr, MODES))}")
        if layout and mesh is None:
            raise Refused("layout= needs mesh=, the DeviceMesh whose axes it names")
        self._roles = roles
        self._rng, self._mesh, self._layout = rng, mesh, dict(layout or {})
        self._values_in_place = False
        self._touched: str | None = None

    @classmethod
    def of(cls, state: State | dict[str, Any]) -> State:
        """A state from a dict whose keys are roles; a State as it is. Plain values of the dict are filled in place."""
        if isinstance(state, State):
            return state
        if not isinstance(state, dict):
            raise Refused(f"a state is a holdfast.State or a dict, not a {type(state).__qualname__}")
        if strange := [role for role in state if not isinstance(role, str) or not role]:
            raise Refused(f"{strange[0]!r} cannot name a role; give a string")
        made = cls(rng=False)
        made._roles = state
        made._values_in_place = True
        return made

    @property
    def parts(self) -> list[tuple[str, Any]]:
        """(role, part) pairs; parts that are held elsewhere are left out."""
        pairs = []
        for role, value in self._roles.items():
            pairs += [(role, part) for part in (value if self._is_united(value) else [value]) if part is not None]
        return pairs

    def _is_united(self, value: Any) -> bool:
        """Whether a role's list is a list of parts, rather than plain data."""
        if not isinstance(value, (list, tuple)) or not value:
            return False
        return any(map(_is_part, value)) or (not self._values_in_place and all(isinstance(v, dict) for v in value))

    def live(self, *, to_fill: bool = False, ranks: tuple[int, ...] = ()) -> Live:
        """The state as it is now: live tensors, not copies.

        Args:
            to_fill: it is about to be loaded: objects are not asked for their state.
            ranks: global ranks that save or load together; empty for a process that works alone.
        """
        live = Live(to_fill, ranks=ranks, rules=self._by_rule if self._layout else None)
        owners = Owners()
        for role, part in self.parts:
            if isinstance(part, torch.nn.Module):
                owners.add(role, part)
        groups: dict[str, int] = {}
        for role, part in self.parts:
            is_whole = self._values_in_place and not self._is_united(self._roles[role])
            put = partial(self._roles.__setitem__, role) if is_whole else None
            taken = groups.get(role, 0)
            groups[role] = taken + add_part(live, role, part, put, taken, owners)
        if self._rng and "rng" not in self._roles:
            self._add_random_generators(live)
            live.again.append(self._add_random_generators)
        return live

    def _add_random_generators(self, live: Live) -> None:
        streams = add_random_generators(live, self._rng, self._mesh)
        if streams is not None:
            add_per_rank(live, "rng", streams)

    def _by_rule(self, name: str, tensor: Any) -> Sharded | None:
        """What this rank has of a hand-sharded tensor, by the first rule for its name."""
        expression = next((e for pattern, e in self._layout.items() if matches_any(name, pattern)), None)
        if expression is None or (not tensor.ndim and len(parse(expression))):  # a step counter is no shard of its parameter
            return None
        try:
            shape, layout = layout_of(expression, tuple(tensor.shape), self._mesh.mesh_dim_names or (), self._mesh.mesh)
        except Refused as error:
            raise Refused(f"{name}: {error}") from None
        return Sharded(shape, layout, tensor)

    @property
    def touched(self) -> str | None:
        """Why the live state must not be used: a load failed while it was filling; None otherwise."""
        known = (_touched.get(part) for _, part in self.parts if isinstance(part, _LASTING))
        return self._touched or next((why for why in known if why), None)

    @touched.setter
    def touched(self, why: str | None) -> None:
        self._touched = why
        for _, part in self.parts:
            if isinstance(part, _LASTING):
                _touched[part] = why

    def names(self) -> list[str]:
        """The logical names of all tensors and values, sorted."""
        live = self.live()
        return sorted([*live.tensors, *live.values])

    def digest(self) -> str:
        """Identity of the live state, 32 hex digits: equal for equal names, dtypes, shapes, aliases, bits and values.

        Of what this process holds: of a sharded tensor its own boxes.
        """
        live = self.live()
        running = Running()
        for name in sorted(live.tensors):
            item = live.tensors[name]
            running.update(f"{name}={item.alias or _digest_of(item, live.rank)};".encode())
        for name in sorted(live.values):
            running.update(f"{name}={digest(repr(values.encode(live.values[name].value, name)).encode()).hex()};".encode())
        return running.hex()


def _digest_of(item: LiveTensor, rank: int) -> str:
    if isinstance(item.layout, Whole):
        return logical_digest(item.tensor)
    return f"{item.shape}" + "".join(f"{box}{logical_digest(view)}" for box, view in item.sharded.pieces(rank))


def contents_of(live: Live, select: str | Sequence[str] | None = None) -> Contents:
    """The contents of a step: sources that read the live tensors when asked, values encoded now.

    Raises:
        Unsupported: a value has no stored form.
    """
    chosen = {name for name in (*live.tensors, *live.values) if select is None or matches_any(name, select)}
    canonical: dict[str, str] = {}
    items: list[TensorItem] = []
    layouts: dict[str, Layout] = {name: item.layout for name, item in live.tensors.items() if not isinstance(item.layout, Whole)}
    for name, item in live.tensors.items():
        if name not in chosen:
            continue
        alias = canonical.setdefault(item.alias or name, name)
        known = TensorItem(name, item.path, dtype_name(item.tensor), item.shape, item.role, None, item.owner)
        if alias != name:
            items.append(replace(known, alias=alias))
            continue
        pieces = item.sharded.pieces(live.rank)
        items += [replace(known, source=TensorSource(view), box=box) for box, view in pieces] or [known]
    pairs: list[Any] = [[stored_path(v.path), values.encode(v.value, n)] for n, v in live.values.items() if n in chosen]
    pairs += [[stored_path(path), {NODE: kind}] for path, kind in live.nodes if _is_above(path, chosen)]
    streams = {role: stream.ranks for role, stream in live.streams.items()} if live.ranks else {}
    roles = {i.role for i in items} | {live.values[n].role for n in chosen if n in live.values}
    return Contents(items, pairs, {}, {role: kind for role, kind in live.roles.items() if role in roles}, layouts, streams)


def _is_above(path: Path, chosen: set[str]) -> bool:
    prefix = dotted(path)
    return any(name == prefix or name.startswith(f"{prefix}.") for name in chosen)


def _is_part(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.Generator, PerRank)) or hasattr(value, "load_state_dict")
