"""The barrier before the optimizer: one hook for all optimizers of the process, which waits for copies of what it will change.

It is torch's global step pre-hook, which fires for every `torch.optim.Optimizer`, also where a scheduler has wrapped `step`. An
optimizer that does not fire it is never relied upon. Whoever loads into a part of the state waits in the same way: see `Guard`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Held(Protocol):
    """Something that an optimizer may have to wait for."""

    def hold(self, optimizer: int | None) -> None:
        """Return when the optimizer (its `id`; None: anybody) may change its tensors."""
        ...


_lock = threading.Lock()
_held: list[weakref.ref[Any]] = []
_installed: list[Any] = []
_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_order: list[int] = []


def install() -> None:
    """Have the hook in place. Again is no harm."""
    with _lock:
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_before_step))


def watch(held: Held) -> None:
    """From now on, have optimizers wait for `held`, for as long as it lives."""
    install()
    with _lock:
        _held[:] = [ref for ref in _held if ref() is not None]
        _held.append(weakref.ref(held))


def unwatch(held: Held) -> None:
    """Have nobody wait for `held` any more."""
    with _lock:
        _held[:] = [ref for ref in _held if ref() not in (None, held)]


def has_fired(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer was seen to fire the hook."""
    return optimizer in _seen


def in_order(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Optimizers, those that stepped first the last time in front."""
    turn = {number: at for at, number in enumerate(_order)}
    return sorted(optimizers, key=lambda optimizer: turn.get(id(optimizer), len(turn)))


def hold_all() -> None:
    """Return when nothing is being copied any more: for whoever changes state other than by an optimizer's step."""
    for held in _alive():
        held.hold(None)


class Guard:
    """Has `load_state_dict` of modules and torch optimizers wait for what is being copied, until it is removed.

    Other kinds of loading are told by evidence only, as any change is.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def cover(self, parts: Sequence[Any]) -> None:
        """These parts from now on, and no others; of a module also the modules in it. Keeps none of them alive."""
        self.remove()
        for part in parts:
            if isinstance(part, torch.nn.Module):
                found = [module for module in part.modules() if not isinstance(module, torch.jit.ScriptModule)]
                self._handles += [module.register_load_state_dict_pre_hook(_wait) for module in found]  # type: ignore[no-untyped-call]
            elif isinstance(part, torch.optim.Optimizer) and hasattr(part, "_optimizer_load_state_dict_pre_hooks"):
                self._handles.append(part.register_load_state_dict_pre_hook(_wait))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Wait:
    """Waits when it is called; a copy of it, with the module that has it, does nothing, and needs no holdfast to be unpickled."""

    def __call__(self, *loading: Any) -> None:
        hold_all()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (partial, id)  # what takes any arguments and does nothing with them


_wait = _Wait()


def _alive() -> list[Held]:
    return [held for held in (ref() for ref in _held) if held is not None]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    is_recorded = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
    if is_recorded:  # into a graph, which runs later and without this
        return
    if optimizer not in _seen:
        _seen.add(optimizer)
    if not _order or _order[-1] != id(optimizer):
        if id(optimizer) in _order:
            _order.remove(id(optimizer))
        _order.append(id(optimizer))
        del _order[:-64]
    for held in _alive():
        held.hold(id(optimizer))
