"""What a damaged checkpoint must do to whoever asks for it: refuse, name the place, touch nothing; never give wrong bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences

import holdfast
from holdfast import HoldfastError, State

from .wreck import bounds, change, make_state


def live_state(big: int | None = None) -> State:
    """A live state of the same structure with other numbers."""
    made = make_state() if big is None else make_state(big)
    change(made, 3.25)
    return State(rng=False, **made)


def assert_same(found: Any, expected: Any) -> None:
    differences = bit_differences(found, expected)
    assert not differences, differences[:5]


def refused(address: Any, *places: str, touches: bool | None = False, big: int | None = None) -> HoldfastError:
    """Assert that load and restore refuse `address`, name one of `places`, and leave a live state alone.

    Args:
        touches: the damage is in the tensors' bytes: restore finds it while filling and marks the state, unless it stages.
            None: it may be found before or while filling; what is touched is marked.
    Returns:
        The error of load.
    """
    with bounds(), pytest.raises(HoldfastError) as caught:
        holdfast.load(address)
    assert any(place in str(caught.value) for place in places), f"{caught.value!r} names none of {places}"
    state = live_state(big)
    before = state.digest()
    with bounds(), pytest.raises(HoldfastError) as while_filling:
        holdfast.restore(address, state, stage=True)
    assert any(place in str(while_filling.value) for place in places), f"{while_filling.value!r} names none of {places}"
    assert state.digest() == before
    assert state.touched is None
    with bounds(), pytest.raises(HoldfastError):
        holdfast.restore(address, state)
    if touches:
        assert state.touched
        with pytest.raises(HoldfastError, match="not to be saved"):
            holdfast.save(str(address).rpartition("@")[0] or address, state, 99)
    elif touches is None:
        assert state.touched or state.digest() == before
    else:
        assert state.digest() == before
        assert state.touched is None
    return caught.value


def exact_or_refused(address: Any, expected: dict[str, Any], *places: str) -> bool:
    """Assert that `load` gives exactly `expected`, or refuses and names one of `places`; returns whether it gave it."""
    try:
        with bounds():
            found = holdfast.load(address)
    except HoldfastError as error:
        assert not places or any(place in str(error) for place in places), f"{error!r} names none of {places}"
        return False
    assert_same(found, expected)
    return True


def never_wrong(address: Any, expected: dict[str, Any]) -> None:
    """Assert that no way of reading gives a tensor other bits than it had, or an error of another kind."""
    flat: dict[str, torch.Tensor] = {}

    def flatten(tree: Any, path: str) -> None:
        for key, value in tree.items():
            name = f"{path}.{key}" if path else str(key)
            if isinstance(value, dict):
                flatten(value, name)
            elif isinstance(value, torch.Tensor):
                flat[name] = value

    flatten(expected, "")
    with bounds():
        try:
            with holdfast.open(address) as checkpoint:
                for name in checkpoint.names:
                    one_tensor(checkpoint, name, flat)
                checkpoint.verify()
        except HoldfastError:
            pass


def one_tensor(checkpoint: Any, name: str, flat: dict[str, torch.Tensor]) -> None:
    try:
        tensor = checkpoint[name][...]
        digest = checkpoint.digest(name)
    except HoldfastError:
        return
    assert name in flat, f"{name} was never saved"
    assert_same(tensor, flat[name])
    assert len(digest) == 32


def path_of(run: Path, step: int | str | None = None) -> str:
    return str(run) if step is None else f"{run}@{step}"
