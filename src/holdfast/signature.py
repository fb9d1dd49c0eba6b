"""Whether the state still consists of the same tensors, told by walking its containers without taking them apart.

Only plain modules and torch optimizers are told so; whatever else a state holds is taken apart at each save.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from .sharding import deepspeed, fsdp1

_PLAIN_STATE = torch.nn.Module.get_extra_state


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether a module's state is its parameters and persistent buffers, and nothing that is computed when asked for."""
    if fsdp1.contains(module) or deepspeed.contains(module):
        return False
    for part in module.modules():
        hooks = (part._state_dict_hooks, part._state_dict_pre_hooks)
        overrides = (type(part).get_extra_state is not _PLAIN_STATE, type(part).state_dict is not torch.nn.Module.state_dict)
        if any(hooks) or any(overrides) or type(part)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:
            return False
    return True


def is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is tensors and values by parameter, without containers."""
    values = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return not any(isinstance(value, (list, tuple, dict)) for value in values)


def signature(parts: Sequence[tuple[str, Any]], plain: Container[int]) -> list[int] | None:
    """What tells the tensors of the plain parts of a state: equal as long as they are the same, with the same memory.

    Args:
        plain: `id`s of the parts that are. The tensors must be kept alive, or another could get the `id` of one that is gone.
    Returns:
        None where a tensor has no memory yet.
    """
    found: list[int] = []
    try:
        for _, part in parts:
            if id(part) in plain:
                _add_module(found, part) if isinstance(part, torch.nn.Module) else _add_optimizer(found, part)
    except (RuntimeError, ValueError, NotImplementedError):  # of a lazy module, or of a tensor without storage
        return None
    return found


def _add_module(found: list[int], module: torch.nn.Module) -> None:
    stack = [module]
    while stack:
        part = stack.pop()
        found.append(id(part))
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                _add_tensor(found, tensor)
        if part._non_persistent_buffers_set:
            found.append(len(part._non_persistent_buffers_set))
        stack.extend(child for child in part._modules.values() if child is not None)


def _add_optimizer(found: list[int], optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state
    for group in optimizer.param_groups:
        found.append(len(group))
        for parameter in group["params"]:
            found.append(id(parameter))
            if parameter in state:
                for value in state[parameter].values():
                    if isinstance(value, torch.Tensor):
                        _add_tensor(found, value)
                    else:
                        found.append(id(type(value)))
    found.append(len(state))


def _add_tensor(found: list[int], tensor: torch.Tensor | None) -> None:
    found.append(id(tensor))
    if tensor is None:
        return
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        found.append(id(local))
        tensor = local
    found.append(tensor.data_ptr())
    found.append(tensor.numel())
