"""The layout matrix: what was saved under any layout loads under any other and under the same, bit for bit.

Each layout is saved once, after two steps; each target restores all sources in one run of its ranks. Three things are compared:
what a checkpoint holds with what torch gathered before the save; the logical digests of a source's checkpoint with those of a
checkpoint saved under the target after the restore; and the next losses with those of a job that was given the gathered
tensors by hand.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RanksFailed, pool

import holdfast

from .hops import Hop, Source, hop_into, save_source
from .layouts import LAYOUTS
from .truth import Tensors, same_bits, unite

RUN_SECONDS = 300
NAMES = [name for name, layout in LAYOUTS.items() if layout.is_in_matrix]
PAIRS = [(source, target) for target in NAMES for source in NAMES]
LARGE_PAIRS = [("single", "fsdp2_tp2"), ("fsdp3", "ep2_tp2"), ("hsdp2x2", "single"), ("pp2_fsdp2", "fsdp3"), ("tp2", "ddp2")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_SECONDS)]


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, which is called once for the same arguments, even if it fails."""
    made: dict[tuple[Any, ...], tuple[Any, RanksFailed | None]] = {}

    def get(*key: Any) -> Any:
        if key not in made:
            try:
                made[key] = make(*key), None
            except RanksFailed as error:
                made[key] = None, error
        value, error = made[key]
        if error is not None:
            raise error
        return value

    return get


class Matrix:
    """Saves and hops, each made when it is first asked for, all that were selected of one target at once."""

    def __init__(self, directory: Path, pairs: set[tuple[str, str, bool]]) -> None:
        self._directory = directory
        self._pairs = pairs
        self.source = once(self._save)
        self.hops = once(self._hop)
        self.stored = once(stored_in)

    def _save(self, layout: str, large: bool) -> Source:
        place = self._directory / f"{layout}{'-large' if large else ''}"
        ranks = pool(LAYOUTS[layout].world).run(save_source, layout, str(place / "run"), large, timeout=RUN_SECONDS)
        torch.save((unite([tensors for tensors, _ in ranks]), ranks[0][1]), place / "truth.pt")
        return Source(layout, place / "run", place / "truth.pt")

    def _hop(self, target: str, large: bool) -> dict[str, tuple[Path, list[Hop | str]]]:
        """By source: the run that the target saved, and what each rank saw."""
        sources = []
        for source in sorted(source for source, into, size in self._pairs if (into, size) == (target, large)):
            with contextlib.suppress(RanksFailed):  # its own tests say so
                sources.append(self.source(source, large))
        again = self._directory / f"into-{target}{'-large' if large else ''}"
        ranks = pool(LAYOUTS[target].world).run(hop_into, target, sources, str(again), large, timeout=RUN_SECONDS)
        return {source.layout: (again / source.layout, [rank[at] for rank in ranks]) for at, source in enumerate(sources)}


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    pairs = {(p["source"], p["target"], p.get("large", False)) for p in parameters if {"source", "target"} <= p.keys()}
    return Matrix(tmp_path_factory.mktemp("matrix"), pairs)


def stored_in(run: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Logical digests and values of a checkpoint.

    Of parameter groups: the settings of each parameter. Their order and number are those of the stages and optimizers.
    """
    with holdfast.open(run) as checkpoint:
        values, groups = {}, defaultdict(dict)
        for name, value in checkpoint.values.items():
            if name.startswith("optimizer.param_groups."):
                number, _, setting = name.removeprefix("optimizer.param_groups.").partition(".")
                groups[number][setting] = value
            else:
                values[name] = value
        for group in groups.values():
            values |= {f"settings of {name}": group | {"params": ...} for name in group["params"]}
        return {name: checkpoint.digest(name) for name in checkpoint.names}, values


def loaded(run: Path) -> Tensors:
    tree = holdfast.load(run)
    found = {f"model.{name}": tensor for name, tensor in tree["model"].items()}
    for name, state in tree["optimizer"].items():
        if name != "param_groups":
            found |= {f"optimizer.{name}.{key}": tensor for key, tensor in state.items()}
    return found


def wanted(layout: str) -> str:
    if LAYOUTS[layout].build is None:
        pytest.skip(f"{layout} has no builder here")
    return layout


@pytest.mark.parametrize("layout", NAMES)
def test_a_checkpoint_holds_what_torch_gathers(layout: str, matrix: Matrix) -> None:
    source = matrix.source(wanted(layout), False)
    truth, _ = torch.load(source.truth)
    found = loaded(source.run)
    assert found.keys() == truth.keys()
    assert [name for name, tensor in truth.items() if not same_bits(found[name], tensor)] == []
    assert found["model.head.weight"].data_ptr() == found["model.embed.weight"].data_ptr()


@pytest.mark.parametrize("layout", NAMES)
def test_every_byte_of_a_checkpoint_is_verified(layout: str, matrix: Matrix) -> None:
    with holdfast.open(matrix.source(wanted(layout), False).run) as checkpoint:
        assert checkpoint.verify() == []


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_loads_under_any_layout(source: str, target: str, matrix: Matrix) -> None:
    check_hop(matrix, wanted(source), wanted(target), large=False)


@pytest.mark.parametrize("large", [True])
@pytest.mark.parametrize(("source", "target"), LARGE_PAIRS)
def test_a_tensor_above_64_mib_loads_under_any_layout(source: str, target: str, large: bool, matrix: Matrix) -> None:
    check_hop(matrix, source, target, large)


def check_hop(matrix: Matrix, source: str, target: str, large: bool) -> None:
    run = matrix.source(source, large).run
    again, hops = matrix.hops(target, large)[source]
    for rank, hop in enumerate(hops):
        assert isinstance(hop, Hop), f"rank {rank}:\n{hop}"
        assert hop.wrong == [], f"rank {rank} holds other bits than torch gathered"
        assert hop.is_tied, f"rank {rank} has untied its output layer"
        assert hop.keeps_its_tensors, f"rank {rank} has other tensor objects than before"
        assert hop.hyper == hop.expected_hyper
        assert hop.losses == hop.expected, f"rank {rank} trains otherwise than a job with the same tensors"
    (digests, values), (digests_again, values_again) = matrix.stored(run), stored_in(again)
    assert [name for name in digests.keys() | digests_again.keys() if digests.get(name) != digests_again.get(name)] == []
    assert values == values_again
