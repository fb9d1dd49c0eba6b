"""The order of an epoch is a permutation, of seed and epoch only, and stays what it is."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.order import Order


def whole(length: int, seed: int = 0, epoch: int = 0, shuffle: bool = True) -> list[int]:
    return Order(length, seed, epoch, shuffle).at(np.arange(length))


@settings(deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_sample_has_one_position(length: int, seed: int, epoch: int) -> None:
    assert sorted(whole(length, seed, epoch)) == list(range(length))


@settings(deadline=None)
@given(length=st.integers(1, 2**60), data=st.data())
def test_distinct_positions_of_a_huge_epoch_are_distinct_samples(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=50, unique=True))
    found = Order(length, 1, 2, True).at(np.array(positions, np.int64))
    assert len(set(found)) == len(positions)
    assert all(0 <= sample < length for sample in found)


def test_the_order_never_changes_between_versions() -> None:
    """A resume in the middle of an epoch by a newer version must not lose or repeat samples: never edit these numbers."""
    assert whole(10, seed=7, epoch=3) == GOLDEN_10
    assert Order(10**12, 7, 3, True).at(np.arange(4)) == GOLDEN_HUGE
    assert Order(1, 0, 0, True).at(np.arange(1)) == [0]


GOLDEN_10 = [0, 1, 6, 3, 5, 8, 4, 7, 9, 2]
GOLDEN_HUGE = [529013498180, 374458377660, 48326613363, 452926150681]


def in_plain_numbers(length: int, seed: int, epoch: int, x: int) -> int:
    """The algorithm as its docstring tells it, without numpy."""
    a = math.isqrt(length - 1) + 1
    b = -(-length // a)
    keys = hashlib.shake_256(f"holdfast feistel-1 seed {seed} epoch {epoch}".encode()).digest(128)
    while True:
        high, low = divmod(x, b)
        for number in range(16):
            key = int.from_bytes(keys[8 * number : 8 * number + 8], "little")
            if number % 2 == 0:
                high = (high + splitmix(low ^ key) % a) % a
            else:
                low = (low + splitmix(high ^ key) % b) % b
        x = high * b + low
        if x < length:
            return x


def splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


@settings(deadline=None)
@given(length=st.integers(1, 2**60), seed=st.integers(0, 100), epoch=st.integers(0, 100), data=st.data())
def test_the_order_is_what_its_description_says(length: int, seed: int, epoch: int, data: st.DataObject) -> None:
    x = data.draw(st.integers(0, length - 1))
    assert Order(length, seed, epoch, True).at(np.array([x])) == [in_plain_numbers(length, seed, epoch, x)]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {tuple(whole(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_without_shuffle_samples_come_as_they_are() -> None:
    assert whole(7, shuffle=False) == list(range(7))


@pytest.mark.parametrize("length", [5, 12])
def test_each_sample_is_equally_often_first(length: int) -> None:
    seeds = 3000
    first = Counter(Order(length, seed, 0, True).at(np.zeros(1, np.int64))[0] for seed in range(seeds))
    expected = seeds / length
    assert sum((first[n] - expected) ** 2 / expected for n in range(length)) < 4 * length


def test_all_permutations_of_a_few_samples_occur_equally_often() -> None:
    seeds = 24 * 200
    found = Counter(tuple(whole(4, seed)) for seed in range(seeds))
    assert len(found) == 24
    assert sum((n - 200) ** 2 / 200 for n in found.values()) < 60


def test_neighbours_in_a_large_epoch_are_unrelated() -> None:
    found = np.array(whole(100_000), np.float64)
    assert abs(np.corrcoef(found, np.arange(len(found)))[0, 1]) < 0.02
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.02
