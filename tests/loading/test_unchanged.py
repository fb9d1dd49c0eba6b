"""What has not changed since the step before is not written again; each step is whole all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import holdfast

EqualStates = Callable[[Any, Any], bool]
HEADER_BYTES = 64 << 10
"""More than headers and padding take here."""


def frozen_base() -> dict[str, Any]:
    """A frozen layer of 4 MB, an adapter of 8 kB, and the adapter's Adam."""
    model = nn.ModuleDict({"base": nn.Linear(1000, 1000), "adapter": nn.Linear(1000, 1)})
    model["base"].requires_grad_(False)
    return {"model": model, "optimizer": optim.Adam(model["adapter"].parameters())}


def train(parts: dict[str, Any]) -> None:
    model = parts["model"]
    model["adapter"](model["base"](torch.ones(1, 1000))).sum().backward()
    parts["optimizer"].step()


def written(run: Path) -> list[int]:
    """The bytes of data files that each step wrote."""
    return [step.commit.new_bytes for step in holdfast.Run(run).steps()]


def on_disk(run: Path) -> list[int]:
    """The bytes of the data files in each step's own directory."""
    return [sum(f.stat().st_size for f in step.glob("n*.safetensors")) for step in sorted((run / "steps").iterdir())]


def test_frozen_weights_are_written_once_and_each_step_has_them(tmp_path: Path, equal_states: EqualStates) -> None:
    parts = frozen_base()
    for step in range(1, 4):
        train(parts)
        holdfast.save(tmp_path, parts, step)
    first, second, third = written(tmp_path)
    assert first > 4_000_000
    assert 8_000 < second < 40_000 + HEADER_BYTES
    assert third < 40_000 + HEADER_BYTES
    assert [abs(a - b) < HEADER_BYTES for a, b in zip(on_disk(tmp_path), written(tmp_path), strict=True)] == [True] * 3
    sizes = {step.nbytes for step in holdfast.Run(tmp_path).steps()}
    assert len(sizes) == 1, "each step has all the bytes, wherever they are"

    fresh = frozen_base()
    holdfast.restore(tmp_path, fresh, step=3)
    assert equal_states(parts["model"], fresh["model"])


def test_a_new_process_refers_to_what_the_last_one_wrote(tmp_path: Path) -> None:
    parts = frozen_base()
    with holdfast.Checkpointer(tmp_path, parts, save=holdfast.Every(steps=1)) as ckpt:
        ckpt.resume()
        ckpt.step(1)
    with holdfast.Checkpointer(tmp_path, parts, save=holdfast.Every(steps=1)) as ckpt:
        ckpt.resume()
        ckpt.step(2)
    assert written(tmp_path)[1] < HEADER_BYTES


def test_a_tensor_is_written_again_as_a_whole_when_its_last_element_changed(tmp_path: Path) -> None:
    parts = {"changing": torch.zeros(2 << 20), "constant": torch.zeros(3 << 20)}
    holdfast.save(tmp_path, parts, 1)
    parts["changing"][-1] = 1
    holdfast.save(tmp_path, parts, 2)
    first, second = written(tmp_path)
    assert first >= 20 << 20
    assert 8 << 20 <= second <= (8 << 20) + HEADER_BYTES
    assert torch.equal(holdfast.load(tmp_path, step=2)["changing"], parts["changing"])
    assert holdfast.load(tmp_path, step=1)["changing"].sum() == 0


def test_a_tensor_that_changes_back_is_right_in_every_step(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    for step, value in enumerate([1.0, 2.0, 1.0, 2.0, 2.0], 1):
        weight.fill_(value)
        holdfast.save(tmp_path, {"weight": weight, "other": torch.full((10,), step)}, step)
    values = [float(holdfast.load(tmp_path, step=step)["weight"][0]) for step in range(1, 6)]
    assert values == [1, 2, 1, 2, 2]


def test_minus_zero_is_a_change(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    holdfast.save(tmp_path, {"weight": weight}, 1)
    weight.neg_()
    holdfast.save(tmp_path, {"weight": weight}, 2)
    assert torch.signbit(holdfast.load(tmp_path)["weight"]).all()


def test_another_shape_dtype_or_name_of_the_same_bytes_is_not_mixed_up(tmp_path: Path) -> None:
    states = [
        {"a": torch.zeros(4, 6)},
        {"a": torch.zeros(6, 4)},
        {"a": torch.zeros(6, 4, dtype=torch.int32)},
        {"b": torch.zeros(6, 4, dtype=torch.int32)},
    ]
    for step, state in enumerate(states, 1):
        holdfast.save(tmp_path, state, step)
    for step, state in enumerate(states, 1):
        ((name, tensor),) = holdfast.load(tmp_path, step=step).items()
        assert {name: (tensor.shape, tensor.dtype)} == {n: (t.shape, t.dtype) for n, t in state.items()}


def test_a_pinned_step_is_self_contained(tmp_path: Path) -> None:
    parts = frozen_base()
    holdfast.save(tmp_path, parts, 1)
    holdfast.save(tmp_path, parts, 2, pin="release")
    assert written(tmp_path)[1] > 4_000_000


def test_what_a_kept_step_refers_to_survives_the_pruning_of_its_owner(tmp_path: Path, equal_states: EqualStates) -> None:
    parts = frozen_base()
    for step in range(1, 6):
        train(parts)
        holdfast.save(tmp_path, parts, step)
        holdfast.Run(tmp_path).prune(holdfast.Keep(last=1))
    assert [step.step for step in holdfast.Run(tmp_path).steps()] == [5]
    fresh = frozen_base()
    holdfast.restore(tmp_path, fresh)
    assert equal_states(parts["model"], fresh["model"])
    assert holdfast.open(tmp_path).verify() == []
