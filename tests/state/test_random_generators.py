"""Random numbers: after a load every generator of the state draws what it would have drawn."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast


def draws() -> list[Any]:
    """Numbers of every global generator, and one normal of each kind: those keep the second of a pair for later."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(3).tolist(),
        torch.randn(2).tolist(),
    ]


def test_the_global_generators_of_python_numpy_and_torch_go_on(tmp_path: Path) -> None:
    state = holdfast.State()
    draws()
    holdfast.save(tmp_path, state, 1)
    expected = [draws(), draws()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    holdfast.restore(tmp_path, state)
    assert [draws(), draws()] == expected


def test_saving_draws_nothing(tmp_path: Path) -> None:
    torch.manual_seed(3)
    first = torch.rand(2).tolist()
    torch.manual_seed(3)
    holdfast.save(tmp_path, holdfast.State(model=torch.nn.Linear(2, 2)), 1)
    torch.manual_seed(3)
    holdfast.save(tmp_path, holdfast.State(), 2)
    assert torch.rand(2).tolist() == first


def test_with_rng_false_the_global_generators_are_neither_stored_nor_set(tmp_path: Path) -> None:
    state = holdfast.State(rng=False, progress={"epoch": 1})
    holdfast.save(tmp_path, state, 1)
    assert list(holdfast.load(tmp_path)) == ["progress"]
    random.seed(5)
    first = random.random()
    random.seed(5)
    holdfast.restore(tmp_path, state)
    assert random.random() == first


def test_a_generator_of_torch_goes_on_as_a_role_in_a_dict_and_in_a_list(tmp_path: Path) -> None:
    alone, inside, listed = (torch.Generator().manual_seed(n) for n in range(3))
    state = holdfast.State(rng=False, sampler=alone, data={"shuffle": inside, "workers": [listed, 7]})
    holdfast.save(tmp_path, state, 1)
    expected = [torch.rand(2, generator=g).tolist() for g in (alone, inside, listed)]
    for generator in (alone, inside, listed):
        generator.manual_seed(99)
    holdfast.restore(tmp_path, state)
    assert [torch.rand(2, generator=g).tolist() for g in (alone, inside, listed)] == expected


def test_a_generator_of_torch_in_a_tuple_goes_on(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    state = holdfast.State(rng=False, data={"pair": (generator, torch.zeros(1))})
    holdfast.save(tmp_path, state, 1)
    expected = torch.rand(2, generator=generator)
    holdfast.restore(tmp_path, state)
    assert torch.equal(torch.rand(2, generator=generator), expected)


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_a_generator_of_numpy_goes_on_for_all_who_share_it(tmp_path: Path, bits: Any) -> None:
    generator = np.random.Generator(bits(3))
    sampler, data = generator, {"generator": generator, "epoch": 1}
    state = holdfast.State(rng=False, data=data)
    generator.integers(0, 10, 3, dtype=np.int32)
    holdfast.save(tmp_path, state, 1)
    expected = generator.random(3).tolist(), generator.integers(0, 10, 3, dtype=np.int32).tolist()
    holdfast.restore(tmp_path, state)
    assert (sampler.random(3).tolist(), sampler.integers(0, 10, 3, dtype=np.int32).tolist()) == expected
    assert data["generator"] is generator


def test_load_gives_generators_that_draw_the_same(tmp_path: Path) -> None:
    parts = {"torch": torch.Generator().manual_seed(1), "numpy": np.random.default_rng(1)}
    holdfast.save(tmp_path, {"data": parts}, 1)
    loaded = holdfast.load(tmp_path)["data"]
    assert torch.equal(torch.rand(2, generator=loaded["torch"]), torch.rand(2, generator=parts["torch"]))
    assert loaded["numpy"].random() == parts["numpy"].random()


def test_a_generator_at_the_top_of_a_dict_state_goes_on(tmp_path: Path) -> None:
    state = {"shuffle": np.random.default_rng(4), "sampler": torch.Generator().manual_seed(4)}
    shared = state["shuffle"]
    holdfast.save(tmp_path, state, 1)
    expected = shared.random(), torch.rand(1, generator=state["sampler"])
    holdfast.restore(tmp_path, state)
    assert (shared.random(), torch.rand(1, generator=state["sampler"])) == expected
    assert state["shuffle"] is shared


@pytest.mark.parametrize("generator", [random.Random(1), np.random.RandomState(1)], ids=["random.Random", "RandomState"])
def test_a_generator_without_a_stored_form_is_refused_by_name(tmp_path: Path, generator: Any) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"data\.shuffle is a .*holdfast\.register"):
        holdfast.save(tmp_path, {"data": {"shuffle": generator}}, 1)
    assert holdfast.Run(tmp_path).latest() is None


def test_a_refused_load_leaves_the_generators_alone(tmp_path: Path) -> None:
    holdfast.save(tmp_path, holdfast.State(model=torch.nn.Linear(2, 2)), 1)
    torch.manual_seed(6)
    state = holdfast.State(model=torch.nn.Linear(2, 3))
    before = state.digest()
    with pytest.raises(holdfast.Mismatch):
        holdfast.restore(tmp_path, state)
    assert state.digest() == before
