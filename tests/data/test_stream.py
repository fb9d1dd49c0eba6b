"""Streams over sources: merging and splitting shards neither loses nor repeats an item, whatever is buffered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.data import Reshardable, ShardedStream, TokenStream


class Lines(ShardedStream):
    """Source n has as many items as its number says: (name, item)."""

    def read(self, source: str, start: int) -> Iterator[str]:
        for number in range(start, int(source.split(":")[1])):
            yield f"{source}/{number}"


class Triples(Lines):
    """A sample is three items, less at the end of a pass: up to two wait in the buffer."""

    def is_ready(self, buffer: list[Any], at_end: bool) -> bool:
        return len(buffer) >= 3 or (at_end and bool(buffer))

    def draw(self, buffer: list[Any]) -> list[str]:
        sample = buffer[:3]
        del buffer[:3]
        return sample


class Documents(TokenStream):
    """Document d of a source is a run of tokens that occur nowhere else."""

    def read(self, source: int, start: int) -> Iterator[list[int]]:
        for number in range(start, 4):
            first = 1000 * source + 100 * number
            yield list(range(first, first + (7 * source + 5 * number) % 23))


def sources(sizes: list[int]) -> list[str]:
    return [f"s{number}:{size}" for number, size in enumerate(sizes)]


def next_life(states: list[dict[str, Any]], streams: list[ShardedStream]) -> None:
    """Load the merged state of all old shards into new ones, each merging for itself."""
    for number, stream in enumerate(streams):
        whole = stream.merge(json.loads(json.dumps(states)))
        stream.load_state_dict(stream.split(whole, number, len(streams)))


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=9)
LIVES = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 7), min_size=6, max_size=6)), min_size=1, max_size=6)
"""(shards, samples that each reads before the job stops)"""


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, lives=LIVES, kind=st.sampled_from([Lines, Triples]))
def test_every_item_of_a_pass_comes_once_over_any_number_of_shards(
    sizes: list[int], lives: list[tuple[int, list[int]]], kind: type[ShardedStream]
) -> None:
    names = sources(sizes)
    states: list[dict[str, Any]] = []
    seen: list[str] = []
    for shards, counts in [*lives, (2, [10_000] * 6)]:
        streams = [kind(names, rank=n, world=shards) for n in range(shards)]
        if states:
            next_life(states, streams)
        for stream, count in zip(streams, counts, strict=False):
            for sample in islice(stream, count):
                seen += [sample] if isinstance(sample, str) else sample
        states = [stream.state_dict() for stream in streams]
    assert sorted(seen) == sorted(f"{name}/{i}" for name, size in zip(names, sizes, strict=True) for i in range(size))


@settings(max_examples=80, deadline=None)
@given(lives=LIVES, length=st.integers(1, 40))
def test_every_token_is_packed_once_whatever_the_buffers_hold(lives: list[tuple[int, list[int]]], length: int) -> None:
    states: list[dict[str, Any]] = []
    seen: list[int] = []
    for shards, counts in [*lives, (1, [10_000])]:
        streams = [Documents(range(7), length, rank=n, world=shards) for n in range(shards)]
        if states:
            next_life(states, streams)
        for stream, count in zip(streams, counts, strict=False):
            for sample in islice(stream, count):
                assert len(sample) <= length
                seen += sample
        states = [stream.state_dict() for stream in streams]
    everything = [t for source in range(7) for document in Documents([], 1).read(source, 0) for t in document]
    assert Counter(seen) == Counter(everything)


@settings(max_examples=80, deadline=None)
@given(sizes=SIZES.filter(any), lives=LIVES)
def test_a_stream_without_end_reads_each_item_once_in_each_pass(sizes: list[int], lives: list[tuple[int, list[int]]]) -> None:
    names = sources(sizes)
    states: list[dict[str, Any]] = []
    seen: Counter[str] = Counter()
    for shards, counts in lives:
        streams = [Lines(names, repeat=True, rank=n, world=shards) for n in range(shards)]
        if states:
            next_life(states, streams)
        for stream, count in zip(streams, counts, strict=False):
            seen.update(islice(stream, count))
        states = [stream.state_dict() for stream in streams]
    for source, passes, offset in Lines(names).merge(states)["todo"]:
        for item in range(sizes[source]):
            assert seen[f"{names[source]}/{item}"] == passes + (item < offset)


def test_a_stream_is_reshardable() -> None:
    assert isinstance(Lines(["a:1"]), Reshardable)


def test_tokens_are_packed_into_samples_of_one_length_and_a_rest() -> None:
    stream = TokenStreamOf([[1, 2, 3], [4], [5, 6, 7, 8, 9], [10]], 4)
    assert list(stream) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    assert list(TokenStreamOf([[1, 2, 3], [4, 5]], 4, drop_last=True)) == [[1, 2, 3, 4]]


class TokenStreamOf(TokenStream):
    """One source, whose documents are given."""

    def __init__(self, documents: list[list[int]], length: int, **options: Any) -> None:
        super().__init__([0], length, **options)
        self.documents = documents

    def read(self, source: int, start: int) -> Iterator[list[int]]:
        yield from self.documents[start:]


def test_a_stream_in_its_middle_goes_on_exactly() -> None:
    stream, other = Triples(sources([5, 4])), Triples(sources([5, 4]))
    iterator = iter(stream)
    next(iterator)
    other.load_state_dict(stream.state_dict())
    assert list(other) == list(iterator)
    assert len(list(other)) == 3, "the next pass is whole"


def test_a_state_is_a_copy() -> None:
    stream = Triples(sources([9]))
    iterator = iter(stream)
    next(iterator)
    state = stream.state_dict()
    before = json.dumps(state)
    stream.load_state_dict(state)
    list(stream)
    assert json.dumps(state) == before


def test_a_shard_without_a_source_gives_nothing() -> None:
    assert list(Lines(["a:3"], rank=1, world=2, repeat=True)) == []


def test_sources_that_are_all_empty_end_a_stream_without_end() -> None:
    assert list(Lines(["a:0", "b:0"], repeat=True)) == []


def test_shards_that_are_missing_are_not_overlooked() -> None:
    shards = [Lines(sources([3, 3, 3]), rank=n, world=3) for n in range(3)]
    states = [shard.state_dict() for shard in shards]
    with pytest.raises(holdfast.Mismatch, match="s1:3"):
        shards[0].merge([states[0], states[2]])
    with pytest.raises(holdfast.Mismatch, match="several"):
        shards[0].merge([states[0], states[0], states[1], states[2]])


def test_a_state_of_other_sources_is_refused_unless_they_have_the_same_names() -> None:
    class Moved(Lines):
        def name(self, source: str) -> str:
            return source.rpartition("/")[2]

    state = Lines(["here/a:2"]).state_dict()
    with pytest.raises(holdfast.Mismatch, match="sources"):
        Lines(["there/a:2"]).load_state_dict(state)
    Moved(["there/a:2"]).load_state_dict(Moved(["here/a:2"]).state_dict())


def test_samples_in_the_buffer_come_before_anything_is_read() -> None:
    stream = Lines(["a:2"])
    stream.load_state_dict(stream.state_dict() | {"buffer": ["first"]})
    assert next(iter(stream)) == "first"
    assert stream.state_dict()["buffer"] == []
    assert stream.state_dict()["todo"] == [[0, 0, 0]]
