"""Damage found while filling: the state is touched, and cannot be saved until a load into it succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast

WEIGHTS = 600
"""Rows and columns of each of the layers: more than one read of the file."""


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleDict({f"layer{i}": nn.Linear(WEIGHTS, WEIGHTS) for i in range(8)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps, the second damaged near the end of its data."""
    for step in (1, 2):
        holdfast.save(tmp_path, {"model": build(step)}, step)
    damage(tmp_path, 2)
    return tmp_path


def damage(run: Path, step: int) -> None:
    (data,) = (run / "steps").glob(f"{step:010d}-*/n0000-00.safetensors")
    with data.open("r+b") as file:
        file.seek(data.stat().st_size - 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_one_flipped_bit_is_found_and_its_tensor_and_file_are_named(run: Path) -> None:
    with pytest.raises(holdfast.Corrupt, match="differ from their digest") as raised:
        holdfast.restore(run, {"model": build(9)})
    assert raised.value.tensor.startswith("model.layer")
    assert raised.value.file.endswith("n0000-00.safetensors")
    assert raised.value.exit_code == 4
    with pytest.raises(holdfast.Corrupt):
        holdfast.load(run)
    with holdfast.open(run) as checkpoint:
        assert [d.tensor for d in checkpoint.verify()] == [raised.value.tensor]


def test_a_state_that_was_touched_is_not_saved_until_a_load_succeeds(run: Path) -> None:
    state = holdfast.State(rng=False, model=build(9))
    assert state.touched is None
    with pytest.raises(holdfast.Corrupt):
        holdfast.restore(run, state)
    assert "step 2" in state.touched
    with pytest.raises(holdfast.Refused, match=r"not to be saved: loading step 2 .*Load a checkpoint into it first"):
        holdfast.save(run, state, 3)
    assert holdfast.Run(run).latest().step == 2
    holdfast.restore(run, state, step=1)
    assert state.touched is None
    holdfast.save(run, state, 3)


def test_the_parts_of_a_state_that_was_touched_are_not_saved_in_a_dict_either(run: Path) -> None:
    parts = {"model": build(9)}
    with pytest.raises(holdfast.Corrupt):
        holdfast.restore(run, parts)
    with pytest.raises(holdfast.Refused, match="not to be saved"):
        holdfast.save(run, parts, 3)


def test_a_load_that_is_refused_does_not_untouch(run: Path) -> None:
    state = holdfast.State(rng=False, model=build(9))
    with pytest.raises(holdfast.Corrupt):
        holdfast.restore(run, state)
    with pytest.raises(holdfast.NoCheckpoint):
        holdfast.restore(run, state, step=77)
    with pytest.raises(holdfast.Refused):
        holdfast.save(run, state, 3)


def test_a_staged_load_checks_every_byte_first_and_leaves_the_state_alone(run: Path) -> None:
    state = holdfast.State(rng=False, model=build(9))
    before = state.digest()
    with pytest.raises(holdfast.Corrupt, match="differ from their digest"):
        holdfast.restore(run, state, stage=True)
    assert state.digest() == before
    assert state.touched is None
    holdfast.save(run, state, 3)


def test_a_staged_load_of_what_is_intact_loads(run: Path) -> None:
    state = holdfast.State(rng=False, model=build(9))
    holdfast.restore(run, state, step=1, stage=True)
    assert state.digest() == holdfast.State(rng=False, model=build(1)).digest()


def test_damage_in_what_is_not_asked_for_does_not_matter(run: Path) -> None:
    with holdfast.open(run) as checkpoint:
        (damaged,) = {d.tensor for d in checkpoint.verify()}
    state = holdfast.State(rng=False, model=build(9))
    holdfast.restore(run, state, exclude=damaged)
    assert state.touched is None


class Broken:
    """An object whose loader fails halfway."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("cannot take it")


def test_an_object_that_fails_to_take_its_state_leaves_the_state_touched(tmp_path: Path) -> None:
    state = holdfast.State(rng=False, model=nn.Linear(2, 2), data=Broken())
    holdfast.save(tmp_path, state, 1)
    with pytest.raises(RuntimeError, match="cannot take it"):
        holdfast.restore(tmp_path, state)
    with pytest.raises(holdfast.Refused, match="did not finish"):
        holdfast.save(tmp_path, state, 2)


def test_a_resume_over_a_damaged_step_takes_the_one_before_and_says_so(run: Path) -> None:
    state = holdfast.State(rng=False, model=build(9))
    with holdfast.Checkpointer(run, state) as ckpt:
        assert ckpt.resume() == 1
        assert "step 2" in " ".join(ckpt.ledger.fallbacks) or "0000000002" in " ".join(ckpt.ledger.fallbacks)
    assert state.touched is None
    assert state.digest() == holdfast.State(rng=False, model=build(1)).digest()


def test_a_resume_at_a_damaged_step_does_not_take_another(run: Path) -> None:
    with holdfast.Checkpointer(run, {"model": build(9)}) as ckpt, pytest.raises(holdfast.Corrupt):
        ckpt.resume(at=2)


def test_a_resume_where_every_step_is_damaged_is_refused(run: Path) -> None:
    damage(run, 1)
    state = holdfast.State(rng=False, model=build(9))
    with pytest.raises(holdfast.Corrupt), holdfast.Checkpointer(run, state) as ckpt:
        ckpt.resume()
    assert state.touched is not None
