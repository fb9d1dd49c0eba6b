"""FullyShardedDataParallel (FSDP1): the original parameters inside its flat ones, by name, without a collective.

FSDP1 lays the parameters of a wrapped module one after the other, and gives each rank an equal slot of the result. Its own
`state_dict` gathers; here only what this rank holds is looked at: views of the flat shard, and of the optimizer's state of it.
After such views were written to, `refresh` makes the next forward see it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch

from ..errors import Unsupported
from ..layout.layouts import Flat, Mesh, Replicate
from .local import Sharded, this_rank
from .original import Original

_FLAT_PARAM = "_flat_param"
_WRAPPERS = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}


def contains(module: torch.nn.Module) -> bool:
    """Whether FSDP1 wraps the module or something in it.

    Raises:
        Unsupported: it is what FSDP1 wraps, without the wrapper, and so cannot tell how its parameters are sharded.
    """
    loaded = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if loaded is None:
        return False
    if any(isinstance(child, loaded.FullyShardedDataParallel) for child in module.modules()):
        return True
    if any(getattr(parameter, "_fsdp_flattened", False) for parameter in module.parameters()):
        raise Unsupported(f"a {type(module).__name__} is inside FullyShardedDataParallel; give the FSDP module that wraps it")
    return False


def state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """What `module.state_dict(keep_vars=True)` has, in the order of the unwrapped module, with `Sharded` for what is flat.

    Tied parameters have one and the same `Sharded` object. Keys may contain the names of wrappers.

    Raises:
        Unsupported: in the middle of a step or of `summon_full_params`; parameters whose elements FSDP1 keeps out of order.
    """
    entries: dict[str, Any] = {}
    values: dict[tuple[int, int], Sharded] = {}
    for key, unit, number in _walk(module):
        entries[key] = values.setdefault((id(unit), number), unit.values[number])
    known = {_bare(key) for key in entries}
    with _own_hooks_off(module):
        held = module.state_dict(keep_vars=True)
    entries |= {k: v for k, v in held.items() if _bare(k) not in known and k.rpartition(".")[2] != _FLAT_PARAM}
    order: dict[str, int] = {}
    for path, _ in module.named_modules(remove_duplicate=False):
        order.setdefault(_bare(path), len(order))
    return {key: entries[key] for key in sorted(entries, key=lambda key: order.get(_bare(key).rpartition(".")[0], len(order)))}


def originals(module: torch.nn.Module) -> dict[int, list[tuple[str, Original]]]:
    """For the `id` of each live parameter that an optimizer may hold: the original parameters in it, by key in `state_dict`.

    With `use_orig_params` that is one each; else all those of a flat parameter. Of tied ones, the first key.
    """
    found: dict[int, dict[int, tuple[str, Original]]] = {}
    for key, unit, number in _walk(module):
        live, original = unit.originals[number]
        found.setdefault(id(live), {}).setdefault(number, (key, original))
    return {live: list(inside.values()) for live, inside in found.items()}


def refresh(module: torch.nn.Module) -> None:
    """Forget gathered parameters, so that the next forward gathers what the shards now hold.

    After a forward without a backward, FSDP1 keeps some of them for the next one.
    """
    from torch.distributed.fsdp._common_utils import _no_dispatch_record_stream
    from torch.distributed.utils import _free_storage

    for handle in (wrapper._handle for wrapper in _wrappers(module) if wrapper._handle is not None):
        flat = handle.flat_param
        if not handle.uses_sharded_strategy or not hasattr(flat, "_local_shard"):
            continue
        handle._use_sharded_flat_param()
        handle._prefetched = False
        for gathered in (flat._full_param_padded, getattr(flat, "_full_prec_full_param_padded", None)):
            if gathered is not None and gathered.untyped_storage().size():
                _no_dispatch_record_stream(gathered, handle._device_handle.current_stream())
                _free_storage(gathered)


class _Unit:
    """One flat parameter, and the original ones in it."""

    def __init__(self, wrapper: Any) -> None:
        self.handle: Any = wrapper._handle
        self.flat: Any = self.handle.flat_param
        _check(self.handle)
        _adopt_replaced(self.handle)
        ranks, replicas = _groups(wrapper)
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data)
        slot = shard.numel()
        in_shard = [self._in_shard(*lies, slot, ranks, replicas) for lies in self._places()]
        self.values = [cast(Sharded, original.of(shard)) for original in in_shard]
        self.originals: list[tuple[Any, Original]] = [(self.flat, original) for original in in_shard]
        """Each with the live parameter that the optimizer holds for it."""
        if self.handle._use_orig_params:
            self.originals = list(zip(self.flat._params, map(_alone, in_shard), strict=True))

    def _places(self) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Where each original parameter begins in the whole flat one, its shape and its stride."""
        begins = accumulate(self.flat._numels_with_padding, initial=0)
        unpadded = [begin for begin, is_padding in zip(begins, self.flat._is_padding_mask, strict=False) if not is_padding]
        for begin, shape, stride in zip(unpadded, self.flat._shapes, self.flat._strides, strict=True):
            yield begin, tuple(shape), tuple(stride)

    def _in_shard(
        self,
        begin: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        slot: int,
        ranks: tuple[int, ...],
        replicas: tuple[tuple[int, ...], ...],
    ) -> Original:
        if not self.handle.uses_sharded_strategy:
            everywhere = Mesh(ranks, (len(ranks),), (Replicate(),))
            return Original(shape, everywhere, stride, (slot,), begin, math.prod(shape))
        layout = Flat(ranks, slot, begin, replicas)
        low, high = layout.range(shape, this_rank())
        start = begin + low - self.handle.rank * slot if low < high else 0
        return Original(shape, layout, stride, (slot,), start, high - low)


def _alone(original: Original) -> Original:
    """The same parameter in a live one of its own."""
    whole = (original.numel,) if isinstance(original.layout, Flat) else original.shape
    return replace(original, whole=whole, start=0)


def _walk(module: torch.nn.Module) -> Iterator[tuple[str, _Unit, int]]:
    """(key, unit, number in the unit) of every flattened parameter, in the order of the modules; tied ones again."""
    places: dict[tuple[int, str], tuple[_Unit, int]] = {}
    for unit in (_Unit(wrapper) for wrapper in _wrappers(module) if wrapper._handle is not None):
        for number, info in enumerate(unit.flat._param_infos):
            places[id(info.module), info.param_name] = unit, number
        for info in unit.flat._shared_param_infos:
            places[id(info.module), info.param_name] = places[id(info.prim_module), info.prim_param_name]
    by_module: dict[int, list[str]] = {}
    for owner, name in places:
        by_module.setdefault(owner, []).append(name)
    for path, child in module.named_modules(remove_duplicate=False):
        for name in by_module.get(id(child), ()):
            yield (f"{path}.{name}" if path else name), *places[id(child), name]


def _wrappers(module: torch.nn.Module) -> list[Any]:
    """The FSDP1 modules."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]


def _check(handle: Any) -> None:
    flat = handle.flat_param
    if handle._training_state.name != "IDLE":
        raise Unsupported(
            f"FSDP1 is in the state {handle._training_state.name} with {flat._fqns[0]}; save and load between steps and outside "
            "of summon_full_params"
        )
    if any(extension is not None for extension in flat._param_extensions):
        raise Unsupported(f"{flat._fqns[0]} is a DTensor inside FSDP1, over tensor parallelism; use fully_shard (FSDP2)")
    for name, is_contiguous in zip(flat._fqns, flat._contiguities, strict=True):
        if handle.uses_sharded_strategy and not is_contiguous:
            raise Unsupported(f"{name} was not contiguous when FSDP1 wrapped and cut it: make it contiguous before wrapping")


def _adopt_replaced(handle: Any) -> None:
    """Take parameters whose memory was replaced (`p.data = ...`) into the flat one, as the next forward would."""
    flat = handle.flat_param
    if not handle._use_orig_params or handle._skipped_use_sharded_views:
        return
    home = getattr(flat, "_local_shard", flat.data).untyped_storage().data_ptr()
    if any(p.numel() and p.untyped_storage().data_ptr() != home for p in flat._params):
        handle._writeback_orig_params()
        handle._use_sharded_views()


def _groups(wrapper: Any) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The ranks that share a flat parameter, and the further groups that hold the same: the same answer on all of them."""
    ours = tuple(torch.distributed.get_process_group_ranks(wrapper.process_group))
    copies = wrapper.__dict__.get("_inter_node_pg") if wrapper.sharding_strategy.name.lstrip("_").startswith("HYBRID") else None
    if copies is None:
        return ours, ()
    across = torch.distributed.get_process_group_ranks(copies)
    mesh = wrapper.__dict__.get("_device_mesh")
    if mesh is not None:
        groups = {tuple(sorted(row)) for row in mesh.mesh.tolist()}
    else:  # a group tells its own ranks only; the others follow if the ranks are a grid, as torch makes them
        groups = {tuple(rank + other - this_rank() for rank in ours) for other in across}
    if ours not in groups or len({rank for group in groups for rank in group}) != len(ours) * len(across):
        raise Unsupported(f"the process groups {list(ours)} and {across} of HYBRID_SHARD are no grid; give FSDP1 a device_mesh")
    first, *others = sorted(groups)
    return first, tuple(others)


@contextmanager
def _own_hooks_off(module: torch.nn.Module) -> Iterator[None]:
    """Without the hooks by which FSDP1's state dict gathers; those of others run."""
    holders = [holder for m in _wrappers(module) for holder in (m._state_dict_pre_hooks, m._state_dict_hooks)]
    before = [dict(holder) for holder in holders]
    try:
        for holder in holders:
            for key in [k for k, hook in holder.items() if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")]:
                del holder[key]
        yield
    finally:
        for holder, hooks in zip(holders, before, strict=True):
            holder.clear()
            holder.update(hooks)


def _bare(key: str) -> str:
    """A key without the names of wrappers."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)
