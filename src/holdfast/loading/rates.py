"""Keeping live learning rates across a load: `live=("lr",)`.

The schedule's progress is the stored one; the rates it starts from are the live ones. A stored rate that a schedule has moved
away from its initial value is moved by the same ratio from the live initial value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .match import Match


def keep_live_rates(state: Any, matched: Match) -> Callable[[], None]:
    """Remember the live rates now; what is returned is called after the load and puts them back."""
    kept = {name for name in matched.ledger.live if name.endswith(".lr")}
    if not kept:
        return lambda: None
    rates = [(name, group, float(group.get("initial_lr", group["lr"]))) for name, group in _groups(state) if f"{name}.lr" in kept]
    chosen = {id(group) for _, group, _ in rates}
    schedules = [(s, list(getattr(s, "base_lrs", []))) for s in _schedules(part for _, part in state.parts)]

    def put_back() -> None:
        for name, group, rate in rates:
            stored, initial = matched.kept.get(f"{name}.lr"), matched.values.get(f"{name}.initial_lr", ((), None))[1]
            if "initial_lr" in group:
                group["initial_lr"] = rate
            if isinstance(stored, (int, float)) and isinstance(initial, (int, float)) and initial:
                _set(group, rate * stored / initial)
            else:
                _set(group, rate)
        for schedule, bases in schedules:
            groups = schedule.optimizer.param_groups
            if bases and all(id(group) in chosen for group in groups):
                schedule.base_lrs = bases
            if hasattr(schedule, "_last_lr"):
                schedule._last_lr = [float(group["lr"]) for group in groups]

    return put_back


def tensor_hyper_parameters(matched: Match) -> Callable[[], None]:
    """Remember hyper-parameters that are tensors; what is returned lists, after the load, those that differed."""
    before = [(f, float(f.live.tensor)) for f in matched.fills if f.live and f.live.is_hyper and f.live.tensor.numel() == 1]

    def list_changes() -> None:
        for fill, ours in before:
            stored = float(fill.target)
            if stored != ours:
                matched.ledger.hyper[fill.name] = (stored, ours)

    return list_changes


def _groups(state: Any) -> list[tuple[str, dict[str, Any]]]:
    """Logical name and parameter group of every optimizer; groups are numbered through the parts of a role."""
    found: dict[str, list[dict[str, Any]]] = {}
    for role, part in state.parts:
        if isinstance(part, torch.optim.Optimizer):
            found.setdefault(role, []).extend(part.param_groups)
    return [(f"{role}.param_groups.{number}", group) for role, groups in found.items() for number, group in enumerate(groups)]


def _schedules(parts: Iterable[Any]) -> list[Any]:
    """The schedules among the parts, and those that they are made of."""
    found = []
    for part in parts:
        if isinstance(part, LRScheduler):
            found += [part, *_schedules(getattr(part, "_schedulers", []))]
    return found


def _set(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
