"""Ranks of one node read each stored byte once; what several of them need passes through memory that they share."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zstandard
from faults.wreck import Kinds, put, put_table, rewrite_index
from ranks import RankDied, pool

import holdfast
from holdfast.loading import node

from . import reading_once
from .reading_once import Seen, awkward, parts

MOST = 1.05
SEED = 3
RING_BYTES = node.SLOTS * node.SLOT_BYTES


def stored_bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("n0*-*.safetensors"))


def saved(run: Path, mib: int) -> Path:
    holdfast.save(run, {"model": awkward(mib, SEED)}, 1)
    return run


def assert_read_once(run: Path, ranks: list[Seen], at_most: float = MOST) -> None:
    assert [(rank.error, rank.wrong, rank.left, rank.touched) for rank in ranks] == [("", [], [], None)] * len(ranks)
    assert sum(rank.read for rank in ranks) <= at_most * stored_bytes(run)
    assert [rank.read for rank in ranks] == [rank.told for rank in ranks]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("large"), 200)


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("middling"), 60)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_replicas_of_one_node_read_the_checkpoint_once(large: Path, replicas: int) -> None:
    ranks = pool(replicas).run(reading_once.restore_awkward, str(large), 200, SEED)
    assert_read_once(large, ranks)
    share = stored_bytes(large) / replicas
    assert all(0.8 * share < rank.read < 1.2 * share for rank in ranks)


@pytest.mark.parametrize(("saved_dim", "live_dim"), [(0, 1), (1, 0), (0, 0)])
def test_a_layout_whose_chunks_straddle_ranks_is_read_once(tmp_path: Path, saved_dim: int, live_dim: int) -> None:
    pool(4).run(reading_once.save_sharded, str(tmp_path), SEED, saved_dim)
    assert_read_once(tmp_path, pool(4).run(reading_once.restore_sharded, str(tmp_path), SEED, live_dim))


def test_another_number_of_ranks_reads_once(tmp_path: Path) -> None:
    pool(4).run(reading_once.save_sharded, str(tmp_path), SEED, 0)
    assert_read_once(tmp_path, pool(3).run(reading_once.restore_sharded, str(tmp_path), SEED, 1))


def test_what_one_rank_some_ranks_and_all_ranks_need_is_read_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": parts(SEED, None)}, 1)
    assert_read_once(tmp_path, pool(5).run(reading_once.restore_parts, str(tmp_path), SEED))


def test_a_tiny_state_is_read_once(tmp_path: Path) -> None:
    assert_read_once(saved(tmp_path, 0), pool(4).run(reading_once.restore_awkward, str(tmp_path), 0, SEED))


def test_some_ranks_of_a_node_read_once(middling: Path) -> None:
    ranks = pool(4).run(reading_once.restore_awkward, str(middling), 60, SEED, ranks=[1, 3])
    assert [rank is None for rank in ranks] == [True, False, True, False]
    assert_read_once(middling, ranks[1::2])


def test_staging_checks_every_byte_once_and_reads_it_once_more(middling: Path) -> None:
    ranks = pool(3).run(reading_once.restore_awkward, str(middling), 60, SEED, stage=True)
    assert [rank.wrong for rank in ranks] == [[]] * 3
    assert sum(rank.read for rank in ranks) <= 2 * MOST * stored_bytes(middling)
    assert sum(rank.told for rank in ranks) <= MOST * stored_bytes(middling)


def test_loads_follow_one_another(middling: Path) -> None:
    for _ in range(3):
        assert_read_once(middling, pool(3).run(reading_once.restore_awkward, str(middling), 60, SEED))


# --- coded chunks -----------------------------------------------------------------------------------------------------


def code(run: Path) -> None:
    """Rewrite the data file of step 1 with every chunk coded by zstd."""
    files = Kinds(run, 1)
    data = files.path("data").read_bytes()

    def edit(columns: dict, metadata: dict) -> None:
        header = int(columns["file.header_bytes"][0])
        order = np.argsort(columns["chunk.offset"], kind="stable")
        coded, at = [data[:header]], header
        for row in order.tolist():
            start, size = int(columns["chunk.offset"][row]), int(columns["chunk.raw_bytes"][row])
            coded.append(zstandard.ZstdCompressor(level=1).compress(data[start : start + size]))
            columns["chunk.offset"][row], columns["chunk.stored_bytes"][row] = at, len(coded[-1])
            at += len(coded[-1])
        columns["chunk.codec"] = np.ones(len(order), np.uint16)
        put_table(columns, "codec.json", [b'["raw", 1, ""]', b'["zstd", 1, ""]'])
        columns["file.bytes"][0] = at
        put(files.path("data"), b"".join(coded))

    rewrite_index(files, edit)


def test_coded_chunks_are_read_and_decoded_once(tmp_path: Path) -> None:
    whole = stored_bytes(saved(tmp_path, 60))
    code(tmp_path)
    assert stored_bytes(tmp_path) < 0.8 * whole
    assert_read_once(tmp_path, pool(3).run(reading_once.restore_awkward, str(tmp_path), 60, SEED))


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(run: Path, part: float) -> None:
    """Flip a bit at this part of the data file."""
    path = Kinds(run, 1).path("data")
    at = int(path.stat().st_size * part)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("part", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("is_coded", [False, True], ids=["raw", "coded"])
def test_damage_that_one_rank_finds_is_told_alike_on_all(tmp_path: Path, part: float, is_coded: bool) -> None:
    saved(tmp_path, 30)
    if is_coded:
        code(tmp_path)
    damage(tmp_path, part)
    with pytest.raises(holdfast.Corrupt) as alone:
        holdfast.restore(tmp_path, {"model": awkward(30, SEED)})
    ranks = pool(3).run(reading_once.restore_awkward, str(tmp_path), 30, SEED)
    assert [(rank.kind, rank.error) for rank in ranks] == [("Corrupt", str(alone.value))] * 3
    assert all("did not finish" in rank.touched or "failed" in rank.touched for rank in ranks)
    assert [rank.left for rank in ranks] == [[]] * 3


def test_damage_in_what_two_of_the_ranks_need_is_an_error_of_all(tmp_path: Path) -> None:
    holdfast.save(tmp_path, {"model": parts(SEED, None)}, 1)
    with holdfast.open(tmp_path) as checkpoint:
        tensor = checkpoint.tensor("model.pair1")
        at = int(checkpoint.index.chunks(checkpoint.index.entries(tensor)[0]).offset[0])
    damage(tmp_path, (at + 5000) / stored_bytes(tmp_path))
    ranks = pool(5).run(reading_once.restore_parts, str(tmp_path), SEED)
    assert {rank.kind for rank in ranks} == {"Corrupt"}
    assert all("model.pair1" in rank.error and rank.touched for rank in ranks)


# --- ranks that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_is_named_at_once(middling: Path, rank: int) -> None:
    ranks = pool(3).run(reading_once.restore_hurt, str(middling), 60, SEED, rank=rank, at=3, hurt="kill", deadline=60, catch=True)
    assert isinstance(ranks.pop(rank), RankDied)
    for other in ranks:
        assert other.kind == "Unavailable"
        assert f"rank {rank} (process " in other.error
        assert "died" in other.error
        assert other.touched is not None
        assert other.left == []
        assert other.seconds < 10


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_hangs_is_named_at_the_deadline(middling: Path, rank: int) -> None:
    ranks = pool(3).run(reading_once.restore_hurt, str(middling), 60, SEED, rank=rank, at=2, hurt="sleep", deadline=3)
    for other in ranks[:rank] + ranks[rank + 1 :]:
        assert other.kind == "Deadline"
        assert f"rank {rank}" in other.error
        assert other.seconds < 6
    assert [other.left for other in ranks] == [[]] * 3


def test_what_one_rank_cannot_read_is_the_error_of_all(middling: Path) -> None:
    ranks = pool(3).run(reading_once.restore_hurt, str(middling), 60, SEED, rank=1, at=2, hurt="refuse")
    assert {other.kind for other in ranks} == {"Unavailable"}
    assert all("the disk is on fire" in other.error for other in ranks)
    assert all("rank 1" in other.error for other in ranks[::2])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_a_rank_that_fails_around_the_meeting_leaves_nothing_open(middling: Path, rank: int, is_before: bool) -> None:
    ranks = pool(3).run(reading_once.restore_unprepared, str(middling), 60, SEED, rank, is_before)
    assert [(other.kind, other.left, other.touched) for other in ranks] == [(ranks[0].kind, [], None)] * 3
    assert all("no memory" in other.error and other.seconds < 6 for other in ranks)


@pytest.mark.parametrize("rank", [1, 2])
def test_ranks_that_cannot_share_memory_read_for_themselves_and_say_so(
    middling: Path, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = pool(3).run(reading_once.restore_cut_off, str(middling), 60, SEED, rank)
    assert [(other.wrong, other.error, other.left) for other in ranks] == [([], "", [])] * 3
    assert [other.read for other in ranks] == [ranks[0].read] * 3
    assert f"rank {rank} cannot reach the others' memory and sockets" in capfd.readouterr().out


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_shared_memory_is_a_ring_however_large_the_state(large: Path) -> None:
    ranks = pool(4)
    most, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            most = max([most, *(shared_by(pid) for pid in ranks.pids)])
            time.sleep(0.002)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        assert_read_once(large, ranks.run(reading_once.restore_awkward, str(large), 200, SEED))
    finally:
        is_over.set()
        watching.join()
    assert 0 < most <= RING_BYTES
    assert most < stored_bytes(large) / 2


def shared_by(pid: int) -> int:
    """Bytes of the memory that a process shares with the others."""
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if "holdfast-exchange" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                return os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512
    except OSError:
        pass
    return 0
