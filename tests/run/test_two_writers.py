"""Several processes write one step: each its data file and index part; one decision, taken once, stands for all of them."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Corrupt, Deadline, Refused, Run
from holdfast.errors import StepExists
from holdfast.format.records import Commit
from holdfast.run.decide import gather_parts
from holdfast.run.history import read_record
from holdfast.run.session import Session
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore

from .peer import Peer
from .writers import FOLDER, NAME, SHAPE, STEP, Box, commit, give_up, item, whole, write_part

BOTH = ["n0000", "n0001"]
UPPER: Box = ((0, 0), (6, 3))
LOWER: Box = ((6, 0), (4, 3))


def begun(store: Store) -> str:
    """Begin attempt 1 of a run; returns the run's id."""
    return Session(store, {}).run


def memory() -> tuple[MemoryStore, str]:
    store = MemoryStore(f"run of several writers {secrets.token_hex(4)}")
    return store, begun(store)


def decision(store: Store) -> str | None:
    record = read_record(store, f"{FOLDER}/commit.json", Commit)
    return record.decision if record else None


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    both = [Peer(), Peer()]
    yield both
    for peer in both:
        peer.kill()


# --- two processes ----------------------------------------------------------------------------------------------------


def test_what_two_processes_wrote_is_one_step(tmp_path: Path, peers: list[Peer]) -> None:
    run = begun(LocalStore(tmp_path))
    for peer, writer, box in zip(peers, BOTH, (UPPER, LOWER), strict=True):
        peer.tell(call="write_part", path=str(tmp_path), writer=writer, box=box)
    assert commit(LocalStore(tmp_path), run, BOTH).decision == "committed"
    assert [peer.hear() for peer in peers] == [None, None]
    assert torch.equal(holdfast.load(tmp_path)["model"]["weight"], torch.from_numpy(whole()))
    assert sorted(LocalStore(tmp_path).list(FOLDER)) == [
        "commit.json", "index-n0000.safetensors", "index-n0001.safetensors", "n0000-00.safetensors", "n0001-00.safetensors"
    ]  # fmt: skip
    with holdfast.open(tmp_path) as checkpoint:
        assert checkpoint.verify() == []


def test_a_writer_that_does_not_come_is_named(tmp_path: Path, peers: list[Peer]) -> None:
    run = begun(LocalStore(tmp_path))
    peers[0].ask(call="write_part", path=str(tmp_path), writer="n0000", box=UPPER)
    said = peers[1].ask(call="commit", path=str(tmp_path), run=run, writers=[*BOTH, "n0002"], seconds=0.2)
    assert said.startswith("Deadline: ")
    assert "n0001, n0002" in said
    assert "1 of 3 writers are done" in said
    assert decision(LocalStore(tmp_path)) is None
    assert Run(tmp_path).steps() == []


def test_of_a_commit_and_an_abort_at_once_exactly_one_wins(tmp_path: Path, peers: list[Peer]) -> None:
    chance = random.Random(1)
    outcomes = []
    for turn in range(50):
        path = tmp_path / f"run-{turn}"
        store = LocalStore(path)
        run = begun(store)
        write_part(store, "n0000", [item(UPPER)])
        write_part(store, "n0001", [item(LOWER)])
        pauses = [chance.uniform(0, 0.002), chance.uniform(0, 0.006)]
        if turn < 10:  # a clear lead for either, so that both outcomes are among the fifty on any machine
            pauses[turn % 2] = 0.1
        peers[0].tell(call="commit", path=str(path), run=run, writers=BOTH, pause=pauses[0])
        peers[1].tell(call="give_up", path=str(path), run=run, pause=pauses[1])
        committer, _ = (peer.hear() for peer in peers)
        decided = decision(store)
        outcomes.append(decided)
        if decided == "committed":
            assert committer == "committed"
            assert [step.step for step in Run(path).steps()] == [STEP]
        else:
            assert committer.startswith("StepExists: ")
            assert "aborted" in committer
            assert Run(path).steps() == []
    assert set(outcomes) == {"committed", "aborted"}


# --- what the decision refuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([UPPER, ((5, 0), (5, 3))], "overlap"),
        ([UPPER, ((7, 0), (3, 3))], "3 of 30 elements are missing"),
        ([UPPER, UPPER], "overlap"),
        ([UPPER], "12 of 30 elements are missing"),
        ([((0, 0), (10, 2)), ((6, 0), (4, 3))], "overlap"),
    ],
)
def test_boxes_that_do_not_cover_a_tensor_once_are_refused_by_its_name(boxes: list[Box], why: str) -> None:
    store, run = memory()
    writers = [f"n{n:04d}" for n in range(len(boxes))]
    for writer, box in zip(writers, boxes, strict=True):
        write_part(store, writer, [item(box)])
    with pytest.raises(Refused, match=rf"model\.weight.*{why}"):
        commit(store, run, writers)
    assert decision(store) is None
    assert Run(store).steps() == []


def test_writers_that_disagree_about_a_tensor_are_refused_by_its_name() -> None:
    for other in (item(((6, 0), (5, 3)), shape=(11, 3)), item(LOWER, dtype="float16")):
        store, run = memory()
        write_part(store, "n0000", [item(UPPER)])
        write_part(store, "n0001", [other])
        with pytest.raises(Refused, match=rf"two writers give {NAME} different"):
            commit(store, run, BOTH)


def test_a_part_that_was_damaged_on_its_way_is_not_committed() -> None:
    store, run = memory()
    write_part(store, "n0000", [item(UPPER)])
    write_part(store, "n0001", [item(LOWER)])
    path = f"{FOLDER}/index-n0001.safetensors"
    data = store.read(path)
    store.delete(path)
    store.create(path, data[: len(data) // 2])
    with pytest.raises(Corrupt, match="index-n0001"):
        commit(store, run, BOTH)
    assert decision(store) is None


# --- giving up --------------------------------------------------------------------------------------------------------


def test_a_late_part_after_an_abort_never_becomes_a_step() -> None:
    store, run = memory()
    write_part(store, "n0000", [item(UPPER)])
    give_up(store, run)
    write_part(store, "n0001", [item(LOWER)])
    with pytest.raises(StepExists, match="aborted") as raised:
        commit(store, run, BOTH)
    assert raised.value.existing.reason == "gave up waiting"
    assert Run(store).steps() == []
    Run(store).prune()
    assert store.list("steps") == []


def test_who_waits_for_parts_hears_of_the_abort_before_the_deadline() -> None:
    store, run = memory()
    write_part(store, "n0000", [item(UPPER)])
    give_up(store, run)
    start = time.monotonic()
    with pytest.raises(StepExists, match="aborted while its parts were awaited: gave up waiting"):
        gather_parts(store, FOLDER, BOTH, start + 30)
    assert time.monotonic() - start < 5


def test_an_abort_after_the_commit_changes_nothing() -> None:
    store, run = memory()
    write_part(store, "n0000", [item(((0, 0), SHAPE))])
    commit(store, run, BOTH[:1])
    give_up(store, run)
    assert decision(store) == "committed"
    assert torch.equal(holdfast.load(store)["model"]["weight"], torch.from_numpy(whole()))


def test_a_second_committer_finds_the_decision_of_the_first() -> None:
    store, run = memory()
    write_part(store, "n0000", [item(((0, 0), SHAPE))])
    first = commit(store, run, BOTH[:1])
    with pytest.raises(StepExists) as raised:
        commit(store, run, BOTH[:1])
    assert raised.value.existing == first


# --- however it is cut ------------------------------------------------------------------------------------------------


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[Box]]]:
    """A shape, and for each of some writers its boxes: a grid, dealt out at random."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    edges = [[0, *sorted(draw(st.sets(st.integers(1, d - 1), max_size=2)) if d > 1 else []), d] for d in shape]
    cells = [()]
    for line in edges:
        cells = [(*cell, (low, high - low)) for cell in cells for low, high in itertools.pairwise(line)]
    count = draw(st.integers(1, 4))
    hands: list[list[Box]] = [[] for _ in range(count)]
    for cell in cells:
        hands[draw(st.integers(0, count - 1))].append((tuple(o for o, _ in cell), tuple(s for _, s in cell)))
    return shape, hands


@settings(deadline=None)
@given(cuts())
def test_a_step_loads_the_same_however_its_tensors_were_cut(cut: tuple[tuple[int, ...], list[list[Box]]]) -> None:
    shape, hands = cut
    rounds = max(map(len, hands))
    writers = []
    store, run = memory()
    for number, boxes in enumerate(hands):  # one writer has one box of a tensor: more boxes are more writers
        for turn, box in enumerate(boxes):
            writers.append(f"n{number * rounds + turn:04d}")
            write_part(store, writers[-1], [item(box, shape=shape)], values=[[["progress", "step"], 7]])
    commit(store, run, writers)
    one, run = memory()
    write_part(one, "n0000", [item(((0,) * len(shape), shape), shape=shape)], values=[[["progress", "step"], 7]])
    commit(one, run, ["n0000"])
    with holdfast.open(store) as many, holdfast.open(one) as single:
        assert many.verify() == []
        assert many.values == single.values == {"progress.step": 7}
        assert many.digest(NAME) == single.digest(NAME)
        assert np.array_equal(many[NAME][...].numpy(), whole(shape=shape))


def test_values_of_several_writers_are_united_and_those_that_differ_by_rank_are_kept_apart() -> None:
    store, run = memory()
    shared = [["progress", "step"], 7]
    for writer, box in zip(BOTH, (UPPER, LOWER), strict=True):
        write_part(store, writer, [item(box)], values=[shared])
    record = commit(store, run, BOTH)
    assert record.values == [shared]
    assert [part.writer for part in record.parts] == BOTH
    assert [file.path for file in record.files] == [f"{FOLDER}/{writer}-00.safetensors" for writer in BOTH]
    assert record.raw_bytes == record.new_bytes - sum(f.header_bytes for f in record.files) == whole().nbytes
    assert msgspec.json.decode(store.read(f"{FOLDER}/commit.json"))["tensors"] == 1


def test_a_deadline_that_has_passed_still_takes_parts_that_are_there() -> None:
    store, _ = memory()
    write_part(store, "n0000", [item(UPPER)])
    assert len(gather_parts(store, FOLDER, BOTH[:1], time.monotonic() - 1)) == 1
    with pytest.raises(Deadline):
        gather_parts(store, FOLDER, BOTH, time.monotonic() - 1)


# --- what one process does with such a step ---------------------------------------------------------------------------


@pytest.fixture
def of_two() -> Store:
    """A run whose step 100 was written by two writers, a third having nothing to write."""
    store, run = memory()
    write_part(store, "n0000", [item(UPPER)])
    write_part(store, "n0001", [item(LOWER)])
    write_part(store, "n0002", [])
    commit(store, run, [*BOTH, "n0002"])
    return store


def test_a_writer_may_have_nothing_to_write(of_two: Store) -> None:
    assert torch.equal(holdfast.load(of_two)["model"]["weight"], torch.from_numpy(whole()))


def test_one_process_goes_on_from_it(of_two: Store) -> None:
    holdfast.save(of_two, {"model": {"weight": torch.from_numpy(whole())}}, 200)
    Run(of_two).prune(holdfast.Keep(last=1))
    assert [step.step for step in Run(of_two).steps()] == [200]
    assert torch.equal(holdfast.load(of_two)["model"]["weight"], torch.from_numpy(whole()))


def test_it_is_pinned_and_outlives_pruning(of_two: Store) -> None:
    Run(of_two).pin(STEP, "good")
    holdfast.save(of_two, {"model": {"weight": torch.from_numpy(whole(2))}}, 200)
    Run(of_two).prune(holdfast.Keep(last=1))
    assert torch.equal(holdfast.load(of_two, step=STEP)["model"]["weight"], torch.from_numpy(whole()))


def test_it_is_copied(of_two: Store) -> None:
    target = MemoryStore("target of a copy")
    Run(of_two).copy(STEP, target)
    assert torch.equal(holdfast.load(target)["model"]["weight"], torch.from_numpy(whole()))
