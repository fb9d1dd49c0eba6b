"""ZeRO: the model of `models.py` under DeepSpeed, trained in float32; whole tensors out of it and into it by its own means.

DeepSpeed lays what it trains into flat memory of one dtype, so it cannot take the bfloat16 adapters (nor as frozen parameters:
they are trained). They are held beside the engine: their blocks call them, but do not own them, a module that has nothing else
has them under their names, and another AdamW, whose one group has the settings of the engine's matrices, trains them. A state
is then `State(model=[engine, beside], optimizer=[engine.optimizer, beside's])`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .jobs import ROWS, Job, adamw, batch, loss_of
from .models import Model

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Slot:
    """A run of the elements of a tensor."""

    local: torch.Tensor
    """One-dimensional: the live memory, without what fills up a slot."""
    begin: int
    gather: Callable[[], torch.Tensor]

    def to_local(self) -> torch.Tensor:
        return self.local

    def full_tensor(self) -> torch.Tensor:
        """A collective."""
        return self.gather()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.flatten()[self.begin : self.begin + self.local.numel()]


def initialize(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, **config: Any) -> Any:
    """A DeepSpeed engine, on CPUs. Its parts are so small that there are several, and that most parameters are cut."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled when first used
    options = {"stage": stage, "reduce_bucket_size": 10_000}
    if stage == 3:
        options |= {"stage3_param_persistence_threshold": 20, "stage3_prefetch_bucket_size": 1000, "sub_group_size": 700}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "zero_optimization": options,
        "gradient_clipping": 0.0,  # DeepSpeed clips unless it is told not to, and AdamW alone does not
    } | config
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


class ZeroJob(Job):
    """A job under ZeRO of some stage, on this rank's part of the batch."""

    def __init__(self, stage: int, large: bool = False) -> None:
        self.stage = stage
        model = Model(large=large)
        self.beside = nn.Module()
        self.beside.blocks = _adapters_taken_out(model)
        self.base = adamw(model)
        self.engine = initialize(model, self.base, stage)
        self.beside_optimizer = adamw(self.beside)
        super().__init__([self.engine, self.beside], self._forward_backward)
        for group in self.beside_optimizer.param_groups:
            group["initial_lr"] = self.base.param_groups[0]["initial_lr"]

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.base

    @property
    def roles(self) -> dict[str, Any]:
        return super().roles | {"optimizer": [self.engine.optimizer, self.beside_optimizer]}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.base, self.beside_optimizer]

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        matrices, vectors = self.base.param_groups
        return [[matrices, *self.beside_optimizer.param_groups], [vectors]]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for inside, _ in self._flats() for p in inside] + list(self.beside.parameters())

    def _forward_backward(self, step: int) -> float:
        tokens, targets = batch(step, dist.get_rank(), dist.get_world_size())
        loss = loss_of(self.engine(tokens), targets)
        self.engine.backward(loss)
        for parameter in self.beside.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.item()

    def update(self) -> None:
        self.engine.step()
        self.beside_optimizer.step()
        self.beside_optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        for first, *others in self.groups:
            for group in others:
                group["lr"] = first["lr"]

    def live_tensors(self) -> dict[str, Any]:
        """Every tensor by logical name; what this rank has a run of as a `Slot`."""
        names = self._names()
        found = {f"model.{name}": self._weight(tensor) for name, tensor in _tensors(self.engine.module)}
        found |= {f"model.{name}": tensor for name, tensor in _tensors(self.beside)}
        self._link()
        for inside, flat in self._flats():
            for parameter in inside if flat in self.base.state else ():
                key = f"optimizer.{names[parameter]}"
                found[f"{key}.step"] = self.base.state[flat]["step"]
                found |= {f"{key}.{moment}": self._moment(parameter, moment) for moment in MOMENTS}
        for name, parameter in self.beside.named_parameters():
            for moment, tensor in self.beside_optimizer.state.get(parameter, {}).items():
                found[f"optimizer.model.{name}.{moment}"] = tensor
        return found

    def put_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take whole tensors, which are equal on all ranks."""
        import deepspeed

        for module in (self.engine.module, self.beside):
            for name, tensor in _tensors(module):
                with deepspeed.zero.GatheredParameters([tensor] if hasattr(tensor, "ds_id") else [], modifier_rank=0):
                    tensor.data.copy_(tensors[f"model.{name}"])
        names = self._names()
        for inside, flat in self._flats():
            moments = {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}
            self.base.state[flat] = {"step": tensors[f"optimizer.{names[inside[0]]}.step"].clone(), **moments}
        self._link()
        for parameter in [parameter for inside, _ in self._flats() for parameter in inside]:
            values = {moment: tensors[f"optimizer.{names[parameter]}.{moment}"] for moment in MOMENTS}
            for moment, whole in {None: tensors[names[parameter]], **values}.items():
                slot = self._moment(parameter, moment)
                slot.local.copy_(slot.part_of(whole))
        for name, parameter in self.beside.named_parameters():
            key = f"optimizer.model.{name}"
            self.beside_optimizer.state[parameter] = {k: tensors[f"{key}.{k}"].clone() for k in ("step", *MOMENTS)}

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: f"model.{name}" for name, parameter in self.engine.module.named_parameters()}

    def _flats(self) -> Iterator[tuple[list[nn.Parameter], torch.Tensor]]:
        """What DeepSpeed gives the base optimizer as parameters, and the model's that are in each."""
        zero = self.engine.optimizer
        if self.stage == 3:
            return zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        return zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True)

    def _link(self) -> None:
        """Have stages 1 and 2 look for their states again: DeepSpeed 0.19 does so once, when the first group has any."""
        if self.stage < 3 and all(flat in self.base.state for _, flat in self._flats()):
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _weight(self, tensor: Any) -> Any:
        if not hasattr(tensor, "ds_tensor"):
            return tensor
        return _slot(tensor, tensor.ds_tensor.data, lambda: _gathered(tensor))

    def _moment(self, parameter: Any, moment: str | None) -> Slot:
        """None: the master weights, which in float32 are copies of the weights."""
        from deepspeed.utils import safe_get_full_optimizer_state, safe_get_local_fp32_param, safe_get_local_optimizer_state

        def gather() -> torch.Tensor:
            return safe_get_full_optimizer_state(parameter, moment)

        if self.stage == 3:  # not `safe_set_full_...`, which fails for parameters that the ranks do not divide
            state = safe_get_local_optimizer_state(parameter, moment) if moment else safe_get_local_fp32_param(parameter)
            return _slot(parameter, state, gather)
        fragment = parameter._hp_mapping
        if fragment is None:
            return Slot(torch.empty(0), 0, gather)
        return Slot(fragment.get_hp_fragment(moment), fragment.lp_fragment_address.start, gather)


def _slot(parameter: Any, memory: torch.Tensor, gather: Callable[[], torch.Tensor]) -> Slot:
    """Stage 3 gives each rank as many elements, and the last ranks fewer that count."""
    begin = dist.get_rank() * parameter.ds_tensor.ds_numel
    return Slot(memory[: max(0, parameter.ds_numel - begin)], begin, gather)


def _gathered(parameter: Any) -> torch.Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tied ones under each name."""
    return iter(module.state_dict(keep_vars=True).items())


def _adapters_taken_out(model: Model) -> nn.ModuleDict:
    taken = nn.ModuleDict()
    for number, block in model.blocks.items():
        if hasattr(block, "adapter"):
            taken[number] = nn.ModuleDict({"adapter": block.adapter})
            del block.adapter
            block.__dict__["adapter"] = taken[number]["adapter"]
    return taken
