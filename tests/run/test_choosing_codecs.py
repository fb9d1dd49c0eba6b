"""Which codec a class of tensors gets: never one that makes it durable later, by what is known; and the log says why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.coding import LEAST_BYTES, RENEW_SAVES, SMALLEST_BYTES, Coder, IdleCores, coder_of
from holdfast.format.codec import RAW, ZSTD, Codec, int8, planes
from holdfast.policy.coding import LEVELS, WORTH, Coding, Rates, Sample, Shown, another_level, choose
from holdfast.run.coder import Work
from holdfast.run.contents import Contents, TensorItem
from holdfast.run.image import ArraySource
from holdfast.run.session import Session
from holdfast.store.memory import MemoryStore
from holdfast.store.wrap import Limit

PLANES = Sample(ratio=0.84, rate=1.5e9)
ZSTD_SAMPLE = Sample(ratio=0.92, rate=0.9e9)
SAMPLES = {"planes": PLANES, "zstd": ZSTD_SAMPLE}
TABLES = {
    "planes": Sample(0.60, 0.9e9), "zstd:-5": Sample(0.70, 0.55e9), "zstd": Sample(0.48, 0.33e9),
    "zstd:3": Sample(0.44, 0.22e9), "zstd:6": Sample(0.40, 0.09e9),
}  # fmt: skip
"""As numbers are that were widened from a smaller type: the deeper the search, the more it finds."""
ROLES = {"model": "module", "optimizer": "optimizer"}


def rates(store: float | None, cores: float = 2.0) -> Rates:
    return Rates(2.0, () if store is None else (store,), cores)


# --- what the user asks for -------------------------------------------------------------------------------------------


def test_the_first_pattern_that_matches_counts_and_raw_is_the_rest() -> None:
    coding = Coding.of({"optimizer.*.exp_avg": "int8", "optimizer.*": "planes", "model.*": "adaptive"})
    names = ["optimizer.w.exp_avg", "optimizer.w.exp_avg_sq", "model.w", "data"]
    assert [coding.wanted(name) for name in names] == ["int8", "planes", "adaptive", "raw"]


@pytest.mark.parametrize("asked", [None, "raw", {}, {"model.*": "raw"}])
def test_raw_needs_no_coder(asked: Any) -> None:
    assert coder_of(asked) is None


def test_what_is_no_codec_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'model\.\*': 'lz4' is none of raw, zstd, planes, adaptive, int8"):
        Coding.of({"model.*": "lz4"})


@pytest.mark.parametrize("asked", ["int8", {"*": "int8"}])
def test_a_lossy_codec_is_never_for_all(asked: Any) -> None:
    with pytest.raises(ValueError, match="lossy: name the moments"):
        Coding.of(asked)


# --- the choice -------------------------------------------------------------------------------------------------------


def seconds(codec: str, known: Rates, samples: Mapping[str, Sample] = SAMPLES) -> float:
    assert known.store is not None
    sample = samples.get(codec, Sample(1.0, float("inf")))
    return max(1 / (sample.rate * known.cores), sample.ratio / known.store)


@given(
    st.sampled_from([SAMPLES, TABLES]), st.floats(1e6, 1e11), st.floats(0.0, 64.0), st.sampled_from(["raw", "planes", *LEVELS])
)
def test_a_choice_never_promises_to_be_later_than_raw(
    samples: Mapping[str, Sample], store: float, cores: float, current: str
) -> None:
    known = Rates(64.0, (store,), cores)
    chosen = choose(samples, known, current).codec
    of_chosen = seconds(chosen, known, samples)
    assert chosen == "raw" or of_chosen <= seconds("raw", known) * (1 if chosen == current else 1 - WORTH)
    assert all(of_chosen * (1 - WORTH) <= seconds(other, known, samples) * (1 + 1e-12) for other in samples)


@pytest.mark.parametrize(
    ("store", "cores", "level"),
    [(0.05e9, 2.0, "zstd:6"), (0.19e9, 2.0, "zstd:3"), (0.3e9, 2.0, "zstd"), (0.3e9, 1.0, "zstd:-5"), (5e9, 2.0, "raw")],
)
def test_a_level_is_low_where_the_processor_is_scarce_and_high_where_the_store_is_slow(
    store: float, cores: float, level: str
) -> None:
    levels = {name: sample for name, sample in TABLES.items() if name in LEVELS}
    assert choose(levels, rates(store, cores)).codec == level


def test_a_level_that_hardly_finds_more_is_not_worth_its_work() -> None:
    levels = {"zstd": Sample(0.780, 1.1e9), "zstd:3": Sample(0.779, 0.9e9), "zstd:6": Sample(0.77, 0.1e9)}
    assert choose(levels, rates(0.05e9)).codec == "zstd"


@pytest.mark.parametrize(
    ("known", "store", "cores", "level"),
    [
        (["zstd"], 0.1e9, 2.0, "zstd:3"),
        (["zstd", "zstd:3"], 0.1e9, 2.0, "zstd:6"),
        (["zstd", "zstd:3", "zstd:6"], 0.1e9, 2.0, None),
        (["zstd", "zstd:3"], 0.21e9, 2.0, None),
        (["zstd"], 2e9, 2.0, "zstd:-5"),
        (["zstd", "zstd:-5"], 2e9, 2.0, None),
        (["zstd"], None, 2.0, None),
        (["planes"], 0.1e9, 2.0, None),
    ],
)
def test_only_levels_that_could_pay_are_measured(known: list[str], store: float | None, cores: float, level: str | None) -> None:
    assert another_level({name: TABLES[name] for name in known}, rates(store, cores)) == level


def test_what_the_usual_level_finds_nothing_in_is_not_searched_deeper() -> None:
    assert another_level(SAMPLES, rates(0.01e9)) is None


@pytest.mark.parametrize(
    ("store", "cores", "codec", "why"),
    [
        (0.1e9, 2.0, "planes", "0.84 of its size"),
        (0.5e9, 2.0, "planes", "0.50 GB/s"),
        (0.1e9, 0.25, "planes", "0.2 cores are free"),
        (0.5e9, 0.25, "raw", "would hold the store up"),
        (5.0e9, 2.0, "raw", "would hold the store up"),
        (None, 2.0, "raw", "will be known after this save"),
    ],
)
def test_what_is_scarce_decides(store: float | None, cores: float, codec: str, why: str) -> None:
    choice = choose(SAMPLES, rates(store, cores))
    assert choice.codec == codec
    assert why in choice.reason


def test_what_hardly_shrinks_stays_raw() -> None:
    choice = choose({"zstd": Sample(0.97, 1e9)}, rates(0.1e9))
    assert choice.codec == "raw"
    assert "gains too little" in choice.reason
    assert choose({}, rates(0.1e9)).codec == "raw"


def test_a_choice_changes_only_for_something_clearly_better() -> None:
    near = {"planes": PLANES, "zstd": Sample(0.82, 1.5e9)}
    assert choose(near, rates(0.1e9), "planes").codec == "planes"
    assert choose(near, rates(0.1e9), "raw").codec == "zstd"
    assert choose({"zstd": ZSTD_SAMPLE}, rates(0.1e9), "planes").codec == "zstd"  # what the step may no longer have


# --- what a save shows ------------------------------------------------------------------------------------------------


def test_one_slow_save_does_not_change_the_rate_of_the_store() -> None:
    known = rates(None)
    for rate in (1e9, 1e9, 1e7, 1e9):
        known = known.after_raw(int(rate), 1.0, 2.0)
    assert known.store == 1e9


def test_coding_that_made_a_save_late_is_given_up_until_it_is_tried_again() -> None:
    known = rates(1e9)
    assert choose(SAMPLES, known).codec == "planes"
    after = known.after_coded(Shown(10**9, 840_000_000, 1.01, 0.6, 1.0), core_seconds=1e9 / PLANES.rate)
    choice = choose(SAMPLES, after, "planes")
    assert (choice.codec, "later than it would have been raw" in choice.reason) == ("raw", True)
    assert choose(SAMPLES, after.after_raw(10**9, 1.0, 2.0)).codec == "raw"
    assert choose(SAMPLES, after.renewed()).codec == "planes"


def test_coding_that_had_fewer_cores_than_were_idle_counts_on_fewer() -> None:
    after = rates(0.25e9).after_coded(Shown(10**9, 840_000_000, 3.0, 1.2, 3.0), core_seconds=0.66)
    assert after.cores == pytest.approx(0.25)
    assert not after.is_late
    assert after.renewed().cores == 2.0


def test_a_store_that_was_at_work_all_the_time_shows_its_rate() -> None:
    known = rates(1e9).after_coded(Shown(100_000_000, 84_000_000, 1.0, 0.99, 0.15), core_seconds=0.3)
    for _ in range(3):
        known = known.after_coded(Shown(100_000_000, 84_000_000, 1.0, 0.99, 0.15), core_seconds=0.3)
    assert known.store == pytest.approx(84e6 / 0.99)
    assert known.cores == 2.0


def test_a_store_that_waited_for_coding_shows_only_that_it_is_no_slower() -> None:
    assert rates(1e9).after_coded(Shown(100_000_000, 84_000_000, 1.0, 0.5, 0.9), core_seconds=0.3).store == 1e9
    assert rates(1e8).after_coded(Shown(100_000_000, 84_000_000, 1.0, 0.1, 0.9), core_seconds=0.3).store > 1e8


# --- save by save -----------------------------------------------------------------------------------------------------


class Idle:
    """As many idle cores as a test says."""

    def __init__(self, cores: float) -> None:
        self.cores = cores

    def mark(self) -> None:
        pass

    def cores_since_mark(self) -> float:
        return self.cores


def item(name: str, nbytes: int, dtype: str = "float32", owner: str | None = None) -> TensorItem:
    role, _, rest = name.partition(".")
    size = {"float32": 4, "int64": 8, "bool": 1}[dtype]
    path = (role, rest.rpartition(".")[0], rest.rpartition(".")[2]) if owner else (role, rest)
    numbers = np.random.default_rng(0).standard_normal(nbytes // 4).astype(np.float32)
    return TensorItem(name, path, dtype, (nbytes // size,), role, ArraySource(numbers.view(np.uint8)), owner)


ITEMS = [
    item("model.w", LEAST_BYTES),
    item("optimizer.w.exp_avg", LEAST_BYTES, owner="w"),
    item("model.small", SMALLEST_BYTES // 2),
    item("model.mask", SMALLEST_BYTES, "bool"),
]


def adaptive(cores: float = 2.0) -> Coder:
    return Coder(Coding.of("adaptive"), Idle(cores))


def raw_save(coder: Coder, rate: float, *items: TensorItem) -> None:
    coder.learn(Work(LEAST_BYTES * 2, LEAST_BYTES * 2, LEAST_BYTES * 2 / rate, LEAST_BYTES * 2 / rate, 0.0, is_coded=False))
    coder.look(items or ITEMS)


def test_the_first_save_is_raw_and_the_next_is_what_the_rates_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    coder = adaptive()
    assert coder.choose(ITEMS, ROLES, False) == [RAW] * 4
    raw_save(coder, 1e7)
    assert coder.choose(ITEMS, ROLES, False)[:3] == [planes(4), planes(4), RAW]
    assert "coding of optimizer.exp_avg (float32): planes: 0.8" in caplog.text
    caplog.clear()
    coder.choose(ITEMS, ROLES, False)
    assert caplog.text == ""  # nothing has changed
    for _ in range(5):
        raw_save(coder, 1e12)
    assert coder.choose(ITEMS, ROLES, False) == [RAW] * 4
    assert "coding of model (float32): raw: planes would hold the store up" in caplog.text


def test_what_is_kept_for_ever_gets_no_planes() -> None:
    coder = Coder(Coding.of({"optimizer.*": "int8", "model.*": "planes"}), Idle(2.0))
    chosen = coder.choose(ITEMS, ROLES, False)
    assert chosen == [planes(4), int8("float32"), RAW, ZSTD]
    assert set(coder.choose(ITEMS, ROLES, True)) == {RAW, ZSTD}


def test_a_state_that_is_too_small_to_matter_is_not_measured() -> None:
    coder = adaptive()
    raw_save(coder, 1e6)
    assert coder.choose([item("model.w", SMALLEST_BYTES)], ROLES, False) == [RAW]
    assert not coder.choices or all(choice.codec == "raw" for choice in coder.choices.values())


def test_a_class_that_has_become_easier_is_found_out_when_samples_are_renewed() -> None:
    coder = adaptive()
    noise = np.random.default_rng(0).integers(0, 256, LEAST_BYTES, np.uint8)
    one = TensorItem("model.w", ("model", "w"), "float32", (LEAST_BYTES // 4,), "model", ArraySource(noise))
    raw_save(coder, 1e8, one)
    assert coder.choose([one], ROLES, False) == [RAW]
    noise[:] = 0
    chosen = []
    for _ in range(RENEW_SAVES):
        coder.look([one])
        chosen += coder.choose([one], ROLES, False)
    assert chosen[0] == RAW
    assert chosen[-1] in (ZSTD, planes(4))


def test_what_was_waited_for_while_the_state_was_captured_is_not_put_down_to_the_store_or_the_cores() -> None:
    waited = rates(1e9).after_coded(Shown(1_000_000_000, 840_000_000, 60.0, 0.9, 0.5), core_seconds=0.8)
    assert (waited.store, waited.cores) == (1e9, 2.0)
    coder = adaptive()
    coder.learn(Work(LEAST_BYTES, LEAST_BYTES, 60.0, LEAST_BYTES / 2e9, 0.0, is_coded=False))
    assert coder.rates.store == pytest.approx(2e9)


def test_integers_and_other_dtypes_get_what_fits_them() -> None:
    coder = Coder(Coding.of("planes"), Idle(2.0))
    items = [item("model.a", SMALLEST_BYTES, "int64"), item("model.b", SMALLEST_BYTES, "bool")]
    assert coder.choose(items, ROLES, False) == [planes(8), Codec("zstd")]


def test_idle_cores_are_counted_by_the_kernel() -> None:
    idle = IdleCores()
    idle.mark()
    while (cores := idle.cores_since_mark()) == float("inf"):
        sum(range(10**5))
    assert 0 <= cores < 10_000


def test_steps_that_are_kept_for_ever_do_not_change_the_choice_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    coder = adaptive()
    raw_save(coder, 1e7)
    for is_for_ever in (False, True):
        coder.choose(ITEMS, ROLES, is_for_ever)
    caplog.set_level(logging.INFO, "holdfast")
    for is_for_ever in (False, True) * 3:
        chosen = coder.choose(ITEMS, ROLES, is_for_ever)
        assert set(chosen) <= {RAW, ZSTD} if is_for_ever else chosen[:2] == [planes(4)] * 2
    assert caplog.text == ""


def test_on_a_slow_store_a_run_comes_to_code_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    store = Limit(MemoryStore("slow"), 30e6)
    session, coder = Session(store, {}), adaptive()
    saved = []
    for step in (1, 2, 3):
        items = [item("model.w", LEAST_BYTES + (4 << step)), item("model.b", SMALLEST_BYTES // 2)]
        saved.append(session.save(Contents(items, roles={"model": "dict"}), step, coding=coder).commit)
    assert [commit.codecs for commit in saved] == [[], ["planes"], ["planes"]]
    assert saved[2].new_bytes < 0.9 * saved[0].new_bytes
    assert "coding of model (float32): planes: 0.8" in caplog.text
    assert "the store takes 0.03 GB/s" in caplog.text


def test_on_a_slow_store_what_can_be_searched_deeper_is_and_reads_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    draw = np.random.default_rng(0)
    words = [draw.integers(97, 123, draw.integers(2, 12), np.uint8) for _ in range(3000)]
    text = np.concatenate([words[i] for i in (draw.random(LEAST_BYTES // 5) ** 2 * 3000).astype(int)])[:LEAST_BYTES]
    store = Limit(MemoryStore("text"), 20e6)
    session, coder = Session(store, {}), adaptive()
    saved = []
    for step in (1, 2):
        shifted = np.roll(text, step)  # so that nothing is left where it lies
        source = ArraySource(shifted)
        one = TensorItem("model.w", ("model", "w"), "uint8", shifted.shape, "model", source)
        saved.append(session.save(Contents([one], roles={"model": "dict"}), step, coding=coder).commit)
    assert saved[1].codecs == ["zstd"]
    assert "coding of model (uint8): zstd:" in caplog.text
    with holdfast.open(store, step=2) as checkpoint:
        assert ZSTD in checkpoint.index.codecs
        assert {codec.level for codec in checkpoint.index.codecs} == {1}, "an index says nothing of levels"
        assert np.array_equal(checkpoint["model.w"][:].numpy(), np.roll(text, 2))
