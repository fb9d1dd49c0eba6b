"""Coded steps: every bit comes back, references go on, what is kept for ever stays readable, lossy is only what was asked for."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import bit_differences, build_awkward_state
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import holdfast
from holdfast import Checkpoint, Corrupt, Keep, NoSpace, Refused, Run, Unavailable
from holdfast.api import state_contents
from holdfast.cli.inspect import describe as inspected
from holdfast.cli.ls import look
from holdfast.cli.place import find_run
from holdfast.coding import coder_of
from holdfast.format.codec import FOR_EVER, RAW, ZSTD, Codec, planes
from holdfast.run import coded
from holdfast.run.coder import Coder
from holdfast.run.image import BUFFERS
from holdfast.run.session import Session
from holdfast.state import State
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing.faults import Fault, Faulty
from holdfast.version import libraries

MOMENTS = {"optimizer.*.exp_avg*": "int8"}


def save(session: Session, state: Any, step: int, coding: Coder | None, **options: Any) -> Any:
    contents, kind = state_contents(State.of(state), None)
    return session.save(contents, step, kind=kind, coding=coding, **options)


def session_on(store: Store) -> Session:
    return Session(store, libraries())


def codecs_of(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """The names of the codecs of each tensor's chunks."""
    chunks, index = checkpoint.index.all_chunks(), checkpoint.index
    found: dict[str, set[str]] = {}
    for tensor, codec in zip(chunks.tensor.tolist(), chunks.codec.tolist(), strict=True):
        found.setdefault(index.names[tensor], set()).add(index.codecs[codec].name)
    return found


def trained(width: int = 300, steps: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A model with its AdamW, whose matrices are large enough to be coded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3 * width)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        train(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    optimizer.zero_grad()
    model(torch.randn(8, weight.shape[1], dtype=weight.dtype)).square().mean().backward()
    optimizer.step()


def empty_like(state: dict[str, Any]) -> dict[str, Any]:
    other = trained(state["model"][0].in_features, steps=1, dtype=state["model"][0].weight.dtype)
    with torch.no_grad():
        for parameter in other["model"].parameters():
            parameter.zero_()
    return other


# --- every bit comes back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coding", ["zstd", "planes", "adaptive"])
def test_an_awkward_state_comes_back_bit_by_bit(coding: str, tmp_path: Path) -> None:
    model, optimizer, extras = build_awkward_state()
    extras["tensors"]["long"] = torch.arange((5 << 20) // 4 + 1, dtype=torch.int32)
    extras["tensors"]["large"] = torch.randn((17 << 20) // 4 + 1)
    extras["tensors"]["halves"] = torch.randn(40_001).to(torch.bfloat16)
    session, coder = session_on(LocalStore(tmp_path)), coder_of(coding)
    for step in (1, 2, 3):  # the first tells adaptive how fast the store is
        extras["tensors"]["large"][step] += 1
        save(session, {"model": model, "optimizer": optimizer, "extras": extras}, step, coder)
    other, others_optimizer, others_extras = build_awkward_state(seed=1)
    others_extras["tensors"] |= {
        "long": torch.zeros((5 << 20) // 4 + 1, dtype=torch.int32),
        "halves": torch.zeros(40_001).bfloat16(),
        "large": torch.zeros((17 << 20) // 4 + 1),
    }
    state = {"model": other, "optimizer": others_optimizer, "extras": others_extras}
    others_extras["tensors"]["expanded"] = torch.zeros(4, 3)
    holdfast.restore(tmp_path, state)
    assert bit_differences(model, other) == []
    assert bit_differences(optimizer, others_optimizer) == []
    assert bit_differences(extras, others_extras) == []
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.verify() == []
        if coding != "adaptive":
            assert coding in codecs_of(checkpoint)["extras.tensors.large"]
            assert codecs_of(checkpoint)["extras.tensors.long"] == {coding}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
def test_each_float_comes_back_and_is_shorter(dtype: torch.dtype, tmp_path: Path) -> None:
    state, other = trained(dtype=dtype), trained(steps=1, dtype=dtype)
    done = save(session_on(LocalStore(tmp_path)), state, 1, coder_of("planes"))
    holdfast.restore(tmp_path, other)
    assert bit_differences(state["model"], other["model"]) == []
    assert bit_differences(state["optimizer"], other["optimizer"]) == []
    assert done.commit.new_bytes < 0.97 * done.commit.raw_bytes
    assert done.commit.codecs == ["planes"]


def test_a_coded_step_is_the_same_state_as_a_raw_one(tmp_path: Path) -> None:
    state = trained()
    raw = save(session_on(MemoryStore("raw")), state, 1, None)
    for coding in ("zstd", "planes"):
        done = save(session_on(LocalStore(tmp_path / coding)), state, 1, coder_of(coding))
        assert done.commit.content_digest == raw.commit.content_digest


def test_slices_and_exports_of_coded_steps_are_exact(tmp_path: Path) -> None:
    state = trained()
    save(session_on(LocalStore(tmp_path / "run")), state, 1, coder_of("planes"))
    weight = state["model"][2].weight
    with holdfast.open(tmp_path / "run") as checkpoint:
        assert torch.equal(checkpoint["model.2.weight"][7:9, 5:100:3], weight[7:9, 5:100:3])
    holdfast.export(tmp_path / "run", tmp_path / "out", select="model.*")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert any(torch.equal(tensor, weight) for tensor in load_file(file).values())


# --- the files --------------------------------------------------------------------------------------------------------


def test_coded_entries_lie_in_valid_safetensors_of_their_own_and_raw_ones_stay_as_they_were(tmp_path: Path) -> None:
    state = trained()
    done = save(session_on(LocalStore(tmp_path)), state, 1, coder_of({"optimizer.*": "planes"}))
    plain, coded_file = (tmp_path / file.path for file in done.commit.files)
    assert torch.equal(load_file(plain)["model.2.weight"], state["model"][2].weight)
    with safe_open(coded_file, "np") as file:
        assert {str(file.get_slice(key).get_dtype()) for key in file.keys()} == {"U8"}  # noqa: SIM118
        assert "optimizer.model.2.weight.exp_avg" not in load_file(plain)
    assert coded_file.stat().st_size == done.commit.files[1].bytes


def test_without_a_coder_nothing_in_the_index_speaks_of_codecs() -> None:
    store = MemoryStore("plain")
    done = save(session_on(store), trained(), 1, None)
    with holdfast.open(store) as checkpoint:
        assert checkpoint.index.codecs == [RAW]
        assert "chunk.codec" not in checkpoint.index.columns
    assert done.commit.codecs == []


class Fixed:
    """Gives every item the same codec."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.works = codec, []

    def choose(self, items: Sequence[Any], roles: Any, is_for_ever: bool) -> list[Codec]:
        return [self.codec] * len(items)

    def learn(self, work: Any) -> None:
        self.works.append(work)

    def look(self, items: Sequence[Any]) -> None:
        pass


def test_entries_of_every_size_can_be_coded() -> None:
    store = MemoryStore("sizes")
    sizes = [0, 1, 2, 1023, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20]
    state = {f"t{n}": torch.randn(n) for n in sizes} | {"scalar": torch.tensor(2.5), "ones": torch.ones(3 << 20)}
    for step, codec in enumerate((planes(4), ZSTD), start=1):
        save(session_on(store), state, step, Fixed(codec), refer=False)
        assert bit_differences(holdfast.load(store), state) == []


def test_what_a_codec_does_not_make_smaller_stays_raw() -> None:
    store = MemoryStore("noise")
    noise = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int32)
    done = save(session_on(store), {"noise": noise, "zeros": torch.zeros(1 << 20)}, 1, Fixed(ZSTD))
    with holdfast.open(store) as checkpoint:
        assert codecs_of(checkpoint) == {"noise": {"raw"}, "zeros": {"zstd"}}
    assert done.commit.codecs == ["zstd"]
    assert done.commit.new_bytes < noise.nbytes + 10_000


def test_what_was_written_is_told(tmp_path: Path) -> None:
    coder = Fixed(planes(4))
    done = save(session_on(LocalStore(tmp_path)), trained(1000), 1, coder)
    (work,) = [work for work in coder.works if work.is_coded]
    assert work.raw_bytes == done.commit.raw_bytes
    assert work.stored_bytes == done.commit.new_bytes - done.commit.files[0].header_bytes
    assert 0 < work.writing_seconds <= work.seconds
    assert 0 < work.coding_seconds <= work.seconds


# --- references -------------------------------------------------------------------------------------------------------


def test_what_did_not_change_is_left_where_it_lies_coded_or_not(tmp_path: Path) -> None:
    state = trained() | {"frozen": {"table": torch.randn(4_000_000)}}
    session = session_on(LocalStore(tmp_path))
    for step, coding in enumerate(["planes", "zstd", "raw", "planes"], start=1):
        train(state["model"], state["optimizer"])
        done = save(session, state, step, coder_of(coding))
        with holdfast.open(tmp_path) as checkpoint:
            found = codecs_of(checkpoint)
            assert found["frozen.table"] == {"planes"}
            assert found["model.2.weight"] == {coding}
            assert checkpoint.verify() == []
            assert torch.equal(checkpoint["frozen.table"][:], state["frozen"]["table"])
        assert [ref.step for ref in done.commit.references] == ([] if step == 1 else [1])
    fresh = session_on(LocalStore(tmp_path))  # one that remembers nothing
    done = save(fresh, state, 5, None)
    assert done.commit.new_bytes == 0
    assert holdfast.open(tmp_path).verify() == []


def test_steps_that_are_kept_for_ever_are_raw_or_zstd(tmp_path: Path) -> None:
    state = trained()
    session = session_on(LocalStore(tmp_path))
    for step, coding in enumerate(["planes", "zstd", MOMENTS], start=1):
        done = save(session, state, step, coder_of(coding), refer=False)
        assert FOR_EVER.issuperset(done.commit.codecs)
        assert not done.commit.references
        with holdfast.open(tmp_path) as checkpoint:
            assert FOR_EVER.issuperset(codec.name for codec in checkpoint.index.codecs)
            assert torch.equal(
                checkpoint["optimizer.model.2.weight.exp_avg"][:], list(state["optimizer"].state.values())[2]["exp_avg"]
            )


def test_a_step_that_is_pinned_later_is_written_again_without_what_only_holdfast_reads(tmp_path: Path) -> None:
    state = trained()
    save(session_on(LocalStore(tmp_path)), state, 1, coder_of("planes"))
    run = Run(tmp_path)
    before = run.find(1)
    run.pin(1, "kept")
    after = run.find("kept")
    assert before.commit.codecs == ["planes"]
    assert after.commit.codecs == []
    assert after.commit.content_digest == before.commit.content_digest
    assert holdfast.open(tmp_path).verify() == []


def test_a_coded_step_can_be_copied_and_pruned(tmp_path: Path) -> None:
    state = trained()
    session = session_on(LocalStore(tmp_path / "run"))
    for step in (1, 2, 3):
        train(state["model"], state["optimizer"])
        save(session, state, step, coder_of("planes"))
    Run(tmp_path / "run").copy(3, tmp_path / "copy")
    Run(tmp_path / "run").prune(Keep(last=1))
    for place in ("run", "copy"):
        other = empty_like(state)
        holdfast.restore(tmp_path / place, other)
        assert bit_differences(state["model"], other["model"]) == []


# --- lossy ------------------------------------------------------------------------------------------------------------


def test_lossy_moments_load_as_what_was_stored_within_the_bound_and_all_else_is_exact(tmp_path: Path) -> None:
    state, other = trained(), trained(steps=1)
    done = save(session_on(LocalStore(tmp_path)), state, 1, coder_of(MOMENTS))
    holdfast.restore(tmp_path, other, stage=True)
    assert bit_differences(state["model"], other["model"]) == []
    assert holdfast.open(tmp_path).verify() == []
    assert done.commit.new_bytes < 0.6 * done.commit.raw_bytes
    for before, after in zip(state["optimizer"].state.values(), other["optimizer"].state.values(), strict=True):
        assert torch.equal(before["step"], after["step"])
        for moment in ("exp_avg", "exp_avg_sq"):
            one, two = (s[moment].flatten().double().numpy() for s in (before, after))
            if before[moment].nbytes < 16 << 10:
                assert np.array_equal(one, two)
                continue
            starts = np.arange(0, len(one), 256)
            largest = np.repeat(np.maximum.reduceat(np.abs(one), starts), 256)[: len(one)]
            assert np.abs(one - two).max() > 0
            assert (np.abs(one - two) <= largest * (1 / 254 + 1e-6)).all()


def test_lossy_is_shown(tmp_path: Path) -> None:
    state = trained()
    save(session_on(LocalStore(tmp_path)), state, 1, coder_of(MOMENTS))
    assert look(find_run(str(tmp_path)))["steps"][0]["lossy"] == ["int8"]
    Run(tmp_path).copy(1, tmp_path / "copy")
    Run(tmp_path / "copy").pin(1, "kept")
    (copy,) = look(find_run(str(tmp_path / "copy")))["steps"]
    assert (copy["codecs"], copy["lossy"]) == ([], ["int8"])  # what is lost does not come back
    with holdfast.open(tmp_path) as checkpoint:
        result = inspected(checkpoint, str(tmp_path))
    shown = {t["name"]: t for t in result["tensors"]}
    assert (result["codecs"], result["lossy"]) == (["int8"], ["int8"])
    assert shown["optimizer.model.2.weight.exp_avg"]["codecs"] == ["int8"]
    assert shown["optimizer.model.2.weight.exp_avg"]["is_lossy"]
    assert not shown["model.2.weight"]["is_lossy"]


@pytest.mark.parametrize(
    ("pattern", "name", "why"),
    [
        ("model.*", "model.0.weight", "is no optimizer moment"),
        ("optimizer.*", "optimizer.model.0.weight.step", "is a scalar"),
        ("table", "table", "is no optimizer moment"),
    ],
)
def test_what_is_no_moment_is_not_stored_lossy(pattern: str, name: str, why: str, tmp_path: Path) -> None:
    state = trained() | {"table": torch.randn(100_000)}
    with pytest.raises(Refused, match=rf"{re.escape(name)} {why}.*narrower"):
        save(session_on(LocalStore(tmp_path)), state, 1, coder_of({pattern: "int8"}))
    assert Run(tmp_path).steps() == []


def test_moments_in_double_precision_are_not_stored_lossy(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is float64, not one of float32, bfloat16, float16"):
        save(session_on(LocalStore(tmp_path)), trained(dtype=torch.float64), 1, coder_of(MOMENTS))


def test_a_moment_that_is_not_finite_is_stored_exactly(tmp_path: Path) -> None:
    state, other = trained(), trained(steps=1)
    moments = next(iter(state["optimizer"].state.values()))["exp_avg"]
    moments[3, 3] = float("nan")
    save(session_on(LocalStore(tmp_path)), state, 1, coder_of(MOMENTS))
    holdfast.restore(tmp_path, other)
    assert bit_differences(moments, next(iter(other["optimizer"].state.values()))["exp_avg"]) == []


@pytest.fixture
def demos_settings() -> Iterator[None]:
    """The demo's training sets what holds for the whole process; later tests have it as it was."""
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("demos_settings")
def test_training_through_lossy_moments_ends_where_exact_training_ends(tmp_path: Path) -> None:
    """500 steps of the demo, stopped and resumed four times."""
    from holdfast.demo.train import Training

    exact = Training(steps=500, seed=0)
    losses = [exact.step() for _ in range(500)]
    session, coder = session_on(LocalStore(tmp_path)), coder_of(MOMENTS)
    training, resumed = Training(steps=500, seed=0), []
    for step in range(1, 501):
        resumed.append(training.step())
        if step % 100 == 0 and step < 500:
            done = save(session, training.state, step, coder)
            assert done.commit.codecs == ["int8"]
            training = Training(steps=500, seed=1)
            holdfast.restore(tmp_path, training.state)
    assert resumed[:100] == losses[:100]
    assert resumed[100:110] != losses[100:110]
    ends = [float(np.mean(of[-50:])) for of in (losses, resumed)]
    assert ends[1] == pytest.approx(ends[0], rel=0.005), ends


# --- failure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [NoSpace, Unavailable])
@pytest.mark.parametrize("operation", ["write", "write_at", "finish"])
def test_a_store_that_fails_leaves_nothing_and_the_next_save_goes_through(
    operation: str, error: type[Exception], tmp_path: Path
) -> None:
    state = trained(1200)
    store = Faulty(LocalStore(tmp_path), Fault(operation, nth=3 if operation == "write_at" else 2, error=error))
    session = session_on(store)
    with pytest.raises(error, match="injected"):
        save(session, state, 1, coder_of({"optimizer.*": "planes"}))
    assert store.fired
    assert not list(tmp_path.glob("steps/*"))
    for step in range(2, 6):  # every buffer has come back
        train(state["model"], state["optimizer"])
        save(session, state, step, coder_of("planes"))
    assert holdfast.open(tmp_path).verify() == []


class Failing:
    """A source that cannot be read to its end."""

    nbytes = 40 << 20

    def copy_into(self, start: int, out: Any) -> None:
        if start >= 20 << 20:
            raise OSError("the memory is gone")
        out[:] = 1


def test_a_source_that_fails_gives_back_every_buffer(tmp_path: Path) -> None:
    def write() -> None:
        image = coded.CodedImage(LocalStore(tmp_path).write("file", 64 << 20), 4096)
        try:
            image.add(Failing(), ZSTD)
            image.settle()
        finally:
            image.abort()

    for _ in range(2 * (coded.CODERS + 2)):
        with pytest.raises(OSError, match="memory is gone"):
            write()
    assert list(tmp_path.iterdir()) == []
    taken = [BUFFERS.take() for _ in range(8)]
    for buffer in taken:
        BUFFERS.give(buffer)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.95])
@pytest.mark.parametrize("coding", ["planes", "zstd", MOMENTS], ids=str)
def test_damage_in_a_coded_file_is_found_and_named(coding: Any, part: float, tmp_path: Path) -> None:
    state = trained()
    done = save(session_on(LocalStore(tmp_path)), state, 1, coder_of(coding))
    path = tmp_path / done.commit.files[-1].path
    data = bytearray(path.read_bytes())
    data[int(len(data) * part)] ^= 16
    path.write_bytes(data)
    damages = holdfast.open(tmp_path).verify()
    assert [d.file for d in damages] == [done.commit.files[-1].path]
    with pytest.raises(Corrupt, match=re.escape(damages[0].tensor)):
        holdfast.restore(tmp_path, trained(steps=1), stage=True)


def test_no_thread_outlives_a_save(tmp_path: Path) -> None:
    save(session_on(LocalStore(tmp_path)), trained(1000), 1, coder_of("planes"))
    assert not [t for t in threading.enumerate() if t.name.startswith(("holdfast-code", "holdfast-write"))]
