"""Loading onto a GPU: every bit arrives, in whatever layout and dtype, and behind what the device was doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import bit_differences, build_awkward_state

import holdfast

from .jobs import CUDA


def awkward(seed: int) -> dict[str, Any]:
    model, _, extras = build_awkward_state(seed=seed, large=True)
    model = model.to(CUDA)
    moved = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tensors = {name: tensor.to(CUDA) for name, tensor in extras["tensors"].items() if name != "expanded"}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    moved.step()
    return {"model": model, "optimizer": moved, "extras": extras | {"tensors": tensors}}


@pytest.mark.parametrize("coding", ["raw", "planes", "zstd"])
def test_all_bits_arrive(tmp_path: Path, coding: str) -> None:
    state, other = awkward(1), awkward(2)
    with holdfast.Checkpointer(tmp_path, state, save=holdfast.Every(steps=1), coding=coding) as ckpt:
        ckpt.resume()
        ckpt.step(1)
    for _ in range(5):
        holdfast.restore(tmp_path, other)
        assert bit_differences(state, other) == []
        other = awkward(3)


def test_what_the_device_was_doing_comes_first_and_what_it_does_next_comes_after(tmp_path: Path) -> None:
    values = torch.arange(30_000_000, dtype=torch.float32)
    holdfast.save(tmp_path, {"values": values}, 1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        target = {"values": torch.zeros(30_000_000, device=CUDA)}
        torch.cuda._sleep(1_000_000_000)
        target["values"].fill_(-1)
        holdfast.restore(tmp_path, target)
        target["values"].add_(1)
    torch.cuda.synchronize()
    assert torch.equal(target["values"].cpu(), values + 1)


def test_another_dtype_and_a_target_that_is_not_contiguous(tmp_path: Path) -> None:
    values = torch.randn(1000, 700)
    holdfast.save(tmp_path, {"values": values}, 1)
    target = {"values": torch.zeros(700, 1000, dtype=torch.bfloat16, device=CUDA).t()}
    holdfast.restore(tmp_path, target, cast={"*": torch.bfloat16})
    assert torch.equal(target["values"].cpu(), values.to(torch.bfloat16))
