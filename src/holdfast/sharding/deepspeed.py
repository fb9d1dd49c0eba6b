"""DeepSpeed's ZeRO stages 1 to 3, live: what each rank has of the weights, masters and moments, without a collective.

Stages 1 and 2 (and BF16_Optimizer) hold all weights on every rank, and lay each parameter group into one flat buffer, of which
a rank keeps an equal slot as master weights and moments. Stage 3 cuts each parameter into a slot for each rank, and lays the
slots of a sub-group one after the other. After such memory was written to, `refresh` brings the copies of it up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from ..layout.layouts import Flat, Mesh, Replicate
from .local import Sharded, this_rank
from .original import Original

_MASTERS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
"""Where stage 3, stages 1 and 2, and BF16_Optimizer keep their master weights."""
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, slots=True)
class Partition:
    """A flat part of the master weights, which the base optimizer sees as one parameter and keeps one state for."""

    flat: torch.Tensor
    """The key of its state in the base optimizer."""
    group: int
    """Number of its parameter group."""
    inside: list[tuple[torch.nn.Parameter, Original]]
    """The model's parameters in it, each with where it lies; also those of which this rank has nothing."""

    @property
    def has_masters(self) -> bool:
        """Whether its values are more than the weights: the model trains in 16 bits."""
        return any(self.flat.dtype != parameter.dtype for parameter, _ in self.inside)

    def new_state(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for a moment of all its parameters, where the optimizer has not made it yet."""
        return torch.zeros_like(self.flat, dtype=dtype, requires_grad=False)


def contains(module: torch.nn.Module) -> bool:
    """Whether ZeRO holds parameters of the module: it is an engine, or the module in one."""
    return "deepspeed" in sys.modules and any(_is_held(parameter) for parameter in module.parameters())


def state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """What `module.state_dict(keep_vars=True)` has, with `Sharded` for the parameters that ZeRO holds.

    Tied parameters have one and the same `Sharded` object.

    Raises:
        Unsupported: weights that are swapped out or quantized.
    """
    values: dict[int, Sharded] = {}
    entries: dict[str, Any] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        is_held = isinstance(value, torch.nn.Parameter) and _is_held(value)
        if is_held and id(value) not in values:
            values[id(value)] = _weight(key, value)
        entries[key] = values[id(value)] if is_held else value
    return entries


def optimizers_of(module: torch.nn.Module) -> list[Any]:
    """The ZeRO optimizers that keep masters of a module's parameters, whether or not the state has them."""
    known = [getattr(p, "_z3_optimizer", None) or getattr(p, "_zero_optimizer", None) for p in module.parameters()]
    held = {id(o): o for o in [getattr(module, "optimizer", None), *known] if any(hasattr(o, name) for name in _MASTERS)}
    return list(held.values())


def is_zero(part: Any) -> bool:
    """Whether an object is a ZeRO optimizer: one around a torch optimizer, which it has as `optimizer`.

    Raises:
        Unsupported: another optimizer of DeepSpeed's, which keeps master weights in a way of its own.
    """
    if "deepspeed" not in sys.modules or isinstance(part, torch.optim.Optimizer):
        return False
    if not any(kind.__module__.startswith("deepspeed.runtime") and "ptimizer" in kind.__name__ for kind in type(part).__mro__):
        return False
    if any(hasattr(part, masters) for masters in _MASTERS) and type(part).__name__ != "MiCS_Optimizer":
        return True
    raise Unsupported(f"DeepSpeed's {type(part).__name__} is not supported; set zero_optimization.stage to 1, 2 or 3")


def partitions(optimizer: Any) -> list[Partition]:
    """The master weights of this rank, and the parameters in them, in the order of the parameter groups.

    Raises:
        Unsupported: states that are swapped out or offloaded for now; tensor parallelism.
    """
    _check(optimizer)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_of_stage3(optimizer))
    if hasattr(optimizer, "bf16_groups"):
        return list(
            _of_groups(optimizer, optimizer.bf16_groups, optimizer.bf16_groups_flat, optimizer.fp32_groups_flat_partition)
        )
    return list(
        _of_groups(optimizer, optimizer.bit16_groups, optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups)
    )


def refresh(optimizer: Any, *, masters_of: Callable[[torch.nn.Parameter], bool] | None = None) -> None:
    """Bring up to date what is a copy of the weights, after they were written to: no collective.

    Masters of the weights' own dtype are copies of them. The others are made from the weights, rounded as they are, for the
    parameters that `masters_of` says: those whose weights alone were loaded. All others keep their masters.
    """
    for partition in partitions(optimizer):
        for parameter, original in partition.inside:
            master = original.of(partition.flat)
            is_copy = partition.flat.dtype == parameter.dtype or (masters_of is not None and masters_of(parameter))
            if master is None or not is_copy:
                continue
            weight = _held_elements(parameter, original)
            if weight.data_ptr() != master.local.data_ptr():
                master.local.copy_(weight)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer._partition_all_parameters()  # stage 3 keeps small parameters gathered; the next forward gathers them again
        optimizer.invalidate_secondary_tensor()


def scaler_values(optimizer: Any) -> list[tuple[str, Any, Callable[[Any], None]]]:
    """(name, value, setter) of what scales the loss in fp16 training; nothing where nothing does."""
    found = []
    scaler = getattr(optimizer, "loss_scaler", None)
    if getattr(scaler, "dynamic", False):
        found += [(f"loss_scaler.{name}", getattr(scaler, name), _attribute_setter(scaler, name)) for name in _SCALER]
    if (scaler := getattr(optimizer, "torch_autocast_gradscaler", None)) is not None:
        found += [(f"grad_scaler.{name}", value, _key_setter(scaler, name)) for name, value in scaler.state_dict().items()]
    return found


class Counters:
    """An engine's counters of steps and samples, as a part of a state: `State(..., engine=Counters(engine))`."""

    _NAMES = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        return {name: int(getattr(self._engine, name)) for name in self._NAMES}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name in self._NAMES:
            setattr(self._engine, name, state[name])


def _is_held(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "ds_tensor", None) is not None or hasattr(parameter, "_hp_mapping")


def _weight(key: str, parameter: Any) -> Sharded:
    if not hasattr(parameter, "ds_tensor"):
        ranks = _ranks(parameter._dp_group)
        return Sharded(tuple(parameter.shape), Mesh(ranks, (len(ranks),), (Replicate(),)), parameter.data)
    slot = parameter.ds_tensor
    if slot.status.name != "AVAILABLE" or hasattr(slot, "ds_quant_scale"):
        raise Unsupported(f"{key} is swapped out or quantized by ZeRO; keep parameters in memory, as they are")
    shape, layout = tuple(parameter.ds_shape), _slots(parameter)
    low, high = layout.range(shape, this_rank())
    return Sharded(shape, layout, slot.data[: high - low])


def _slots(parameter: Any) -> Flat:
    """How stage 3 cuts a parameter."""
    return Flat(_ranks(parameter.ds_process_group), max(1, int(parameter.ds_tensor.ds_numel)))


def _of_stage3(optimizer: Any) -> Iterator[Partition]:
    for number, (parameters, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)):
        inside, at = [], 0
        for parameter in parameters:
            shape, layout = tuple(parameter.ds_shape), _slots(parameter)
            low, high = layout.range(shape, this_rank())
            inside.append((parameter, Original(shape, layout, (), tuple(flat.shape), at, high - low)))
            at += int(parameter.ds_tensor.ds_numel)
        if at != flat.numel():
            raise Unsupported("ZeRO has swapped out its optimizer state; offload it to the CPU, not to NVMe")
        yield Partition(flat, optimizer.sub_group_to_group_id[number], inside)


def _of_groups(optimizer: Any, groups: Any, buffers: Any, masters: Any) -> Iterator[Partition]:
    for number, (parameters, buffer, flat) in enumerate(zip(groups, buffers, masters, strict=True)):
        ranks, slot = _ranks(optimizer.real_dp_process_group[number]), flat.numel()
        inside = []
        for parameter in parameters:
            begin = _begin(optimizer, parameter, buffer)
            shape, layout = tuple(parameter.shape), Flat(ranks, slot, begin)
            low, high = layout.range(shape, this_rank())
            start = begin + low - ranks.index(this_rank()) * slot if low < high else 0
            inside.append((parameter, Original(shape, layout, (), tuple(flat.shape), start, high - low)))
        yield Partition(flat, number, inside)


def _begin(optimizer: Any, parameter: torch.Tensor, buffer: torch.Tensor) -> int:
    """Where a parameter lies in the buffer of its group. Its memory says so: ZeRO may reorder and align parameters."""
    if not parameter.numel():
        return 0
    begin, odd = divmod(parameter.data_ptr() - buffer.data_ptr(), buffer.element_size())
    if odd or begin < 0 or begin + parameter.numel() > buffer.numel() or not parameter.is_contiguous():
        name = getattr(optimizer, "param_names", {}).get(parameter, "a parameter")
        raise Unsupported(f"{name} no longer lies in ZeRO's flat buffer: its memory was replaced; write into it in place instead")
    return begin


def _held_elements(parameter: Any, original: Original) -> torch.Tensor:
    """The weight's elements of which this rank has the master."""
    if hasattr(parameter, "ds_tensor"):
        held: torch.Tensor = parameter.ds_tensor.data[: original.numel]
        return held
    assert isinstance(original.layout, Flat)
    low, high = original.layout.range(original.shape, this_rank())
    elements: torch.Tensor = parameter.data.view(-1)[low:high]
    return elements


def _check(optimizer: Any) -> None:
    if offloaded := getattr(optimizer, "offloaded_states", None):
        what = ", ".join(sorted(state.name for state in offloaded))
        raise Unsupported(f"ZeRO has offloaded {what} for now; call engine.reload_states() first")
    group = getattr(optimizer, "model_parallel_group", None)
    if group is not None and len(_ranks(group)) > 1:
        raise Unsupported("ZeRO over tensor parallelism: nothing says how the tensors are cut; use FSDP2 with a 2-d mesh")


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _attribute_setter(holder: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(holder, name, value)


def _key_setter(scaler: Any, name: str) -> Callable[[Any], None]:
    return lambda value: scaler.load_state_dict({**scaler.state_dict(), name: value})
