"""Nodes that need the same read each a part, and send it to each other. Here a node is a name that ranks of one machine take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import Pool, RankDied, pool

import holdfast
from holdfast.loading.pairing import LEAST_BYTES

from . import reading_once
from .reading_once import Seen, awkward, parts
from .test_read_once import MOST, SEED, assert_read_once, code, damage, saved, stored_bytes

OnNodes = Callable[..., list[Any]]


@pytest.fixture
def on_nodes() -> Iterator[OnNodes]:
    """`on_nodes(nodes, ranks, function, ...)`: call on so many nodes of so many ranks. Their pool ends with the test."""
    used: list[Pool] = []

    def run(
        nodes: int,
        ranks: int,
        function: Callable[..., Any],
        *arguments: Any,
        least: int = 0,
        catch: bool = False,
        **keywords: Any,
    ) -> list[Any]:
        used.append(pool(nodes * ranks, fresh=True))
        return used[-1].run(reading_once.on_nodes_of, ranks, least, function, *arguments, catch=catch, **keywords)

    yield run
    for one in used:
        if one.is_usable:
            one.close()


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("middling"), 60)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (3, 1), (2, 2)])
def test_nodes_of_replicas_read_the_checkpoint_once_in_all(middling: Path, on_nodes: OnNodes, nodes: int, ranks: int) -> None:
    seen = on_nodes(nodes, ranks, reading_once.restore_awkward, str(middling), 60, SEED)
    assert_read_once(middling, seen)
    assert all(rank.read < 1.4 * stored_bytes(middling) / len(seen) for rank in seen)


def test_shards_replicated_over_nodes_are_read_once_in_all(tmp_path: Path, on_nodes: OnNodes) -> None:
    pool(2).run(reading_once.save_sharded, str(tmp_path), SEED, 1)
    assert_read_once(tmp_path, on_nodes(2, 2, reading_once.restore_hybrid, str(tmp_path), SEED))


def test_nodes_that_need_different_things_read_each_its_own(tmp_path: Path, on_nodes: OnNodes) -> None:
    holdfast.save(tmp_path, {"model": parts(SEED, None)}, 1)
    seen = on_nodes(2, 2, reading_once.restore_parts, str(tmp_path), SEED)
    assert [(rank.error, rank.wrong, rank.left) for rank in seen] == [("", [], [])] * 4
    assert stored_bytes(tmp_path) < sum(rank.read for rank in seen) < 2 * stored_bytes(tmp_path)


def test_what_is_small_is_read_by_each_node(tmp_path: Path, on_nodes: OnNodes) -> None:
    saved(tmp_path, 1)
    seen = on_nodes(2, 2, reading_once.restore_awkward, str(tmp_path), 1, SEED, least=LEAST_BYTES)
    assert_read_once(tmp_path, seen, at_most=2 * MOST)
    assert sum(rank.read for rank in seen) > 1.9 * stored_bytes(tmp_path)


def test_coded_chunks_are_sent_decoded(tmp_path: Path, on_nodes: OnNodes) -> None:
    saved(tmp_path, 30)
    code(tmp_path)
    assert_read_once(tmp_path, on_nodes(2, 2, reading_once.restore_awkward, str(tmp_path), 30, SEED))


@pytest.mark.parametrize("part", [0.2, 0.5, 0.95])
def test_damage_that_a_rank_of_one_node_finds_is_told_alike_on_all(tmp_path: Path, on_nodes: OnNodes, part: float) -> None:
    damage(saved(tmp_path, 30), part)
    with pytest.raises(holdfast.Corrupt) as alone:
        holdfast.restore(tmp_path, {"model": awkward(30, SEED)})
    seen = on_nodes(2, 2, reading_once.restore_awkward, str(tmp_path), 30, SEED)
    assert [(rank.kind, rank.error, rank.left) for rank in seen] == [("Corrupt", str(alone.value), [])] * 4
    assert all(rank.touched for rank in seen)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_another_node_that_is_killed_is_named_at_once(middling: Path, on_nodes: OnNodes, rank: int) -> None:
    seen: list[Any] = on_nodes(
        2, 2, reading_once.restore_hurt, str(middling), 60, SEED, rank=rank, at=2, hurt="kill", deadline=60, catch=True
    )
    assert isinstance(seen.pop(rank), RankDied)
    for other in seen:
        assert other.kind == "Unavailable"
        assert f"rank {rank} " in other.error
        assert other.seconds < 15
        assert other.left == []


def test_a_rank_of_another_node_that_hangs_is_named_at_the_deadline(middling: Path, on_nodes: OnNodes) -> None:
    seen: list[Seen] = on_nodes(2, 1, reading_once.restore_hurt, str(middling), 60, SEED, rank=1, at=2, hurt="sleep", deadline=3)
    assert seen[0].kind == "Deadline"
    assert "rank 1 of another node did not send its part" in seen[0].error
    assert seen[0].seconds < 6


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_that_cannot_reach_each_other_read_each_for_itself_and_say_so(
    middling: Path, on_nodes: OnNodes, rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = on_nodes(2, 2, reading_once.restore_unreachable, str(middling), 60, SEED, rank)
    assert [(other.error, other.wrong, other.left) for other in seen] == [("", [], [])] * 4
    for node in (seen[:2], seen[2:]):
        assert 0.95 * stored_bytes(middling) < sum(other.read for other in node) < MOST * stored_bytes(middling)
    assert "nodes that need the same cannot read for each other" in capfd.readouterr().out
