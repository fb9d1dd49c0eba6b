"""Keeping live learning rates across a load: `live=("lr",)`.

The schedule's progress is the stored one; the rates it starts from are the live ones. A stored rate that a scheduler has moved
away from its initial value is moved by the same ratio from the live initial value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .match import Wishes


def keep_live_rates(state: Any, wishes: Wishes) -> Callable[[], None]:
    """Remember the live rates now; what is returned is called after the load and puts them back."""
    if not wishes.keeps_live("lr"):
        return lambda: None
    optimizers = [p for _, p in state.parts if isinstance(p, torch.optim.Optimizer)]
    schedulers = [p for _, p in state.parts if isinstance(p, LRScheduler)]
    initial = [(g, float(g.get("initial_lr", g["lr"]))) for o in optimizers for g in o.param_groups]
    bases = [(s, list(getattr(s, "base_lrs", []))) for s in schedulers]

    def put_back() -> None:
        ratios = {
            id(group): float(last) / float(base)
            for scheduler, _ in bases
            for group, last, base in zip(
                scheduler.optimizer.param_groups, scheduler.get_last_lr(), scheduler.base_lrs, strict=False
            )
            if base
        }
        for group, rate in initial:
            if "initial_lr" in group:
                group["initial_lr"] = rate
            _set(group, rate * ratios.get(id(group), 1.0))
        for scheduler, rates in bases:
            if rates:
                scheduler.base_lrs = rates
                scheduler._last_lr = [float(g["lr"]) for g in scheduler.optimizer.param_groups]

    return put_back


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
