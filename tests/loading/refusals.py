"""A load that must be refused: what it says, and the proof that it touched nothing."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast


def refused(address: Any, state: Any, **wishes: Any) -> dict[str, str]:
    """The differences of the one Mismatch that the load raises, by name, after a look at the state: it is as it was."""
    state = state if isinstance(state, holdfast.State) else holdfast.State(rng=False, **state)
    before, names = state.digest(), state.names()
    with pytest.raises(holdfast.Mismatch) as raised:
        holdfast.restore(address, state, **wishes)
    assert state.digest() == before
    assert state.names() == names
    assert state.touched is None
    told = str(raised.value)
    assert sum(line in told for line in raised.value.differences) >= min(40, len(raised.value.differences))
    pairs = [line.partition(" ")[::2] for line in raised.value.differences]
    assert len(dict(pairs)) == len(pairs), "one line for each name"
    return dict(pairs)
