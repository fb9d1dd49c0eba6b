"""Engines of several nodes over one store; the ranks are this test, which fills their memory itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import holdfast
from holdfast.agent.arena import Arena
from holdfast.agent.engine import Engine
from holdfast.agent.messages import Adopt, Begin, Captured, Dropped, Memory, Message, Node, Outcome, Row, Table
from holdfast.agent.node import node_contents
from holdfast.agent.together import NodeWriter
from holdfast.agent.versions import DURABLE, FAILED, WRITING
from holdfast.errors import NoSpace
from holdfast.format.records import Claim
from holdfast.run.session import Session
from holdfast.run.store_board import StoreBoard, board_folder
from holdfast.store.base import Store
from holdfast.store.local import LocalStore
from holdfast.store.wrap import Wrapped

NODES = (Node("a", (0, 1)), Node("b", (2,)))
ROWS, WIDTH = 12, 4096
"""Of the tensor that all ranks have: large enough to be cut."""
PATIENCE_SECONDS = 30.0
T = TypeVar("T")
Box = tuple[tuple[int, ...], tuple[int, ...]]


def row(name: str, shape: tuple[int, ...], at: int, box: Box | None = None, held: Box | None = None, by: str = "") -> Row:
    nbytes = 4 * int(np.prod((box or ((), shape))[1]))
    return Row(name, ["state", name.partition(".")[2]], "float32", shape, "state", None, None, box, at, nbytes, 1, held, by)


class FullOnceCommitted(Wrapped):
    """A disk with room for a commit and not for a byte more of what nodes tell each other."""

    is_full = False

    def call(self, operation: str, path: str, run: Callable[[], T], nbytes: int = 0) -> T:
        if self.is_full and operation == "create" and path.startswith("agents/"):
            raise NoSpace(f"injected: no room for {path}")
        found = run()
        self.is_full = self.is_full or (operation == "create" and path.endswith("/commit.json"))
        return found


class OneNode:
    """Real engine, writer, board and disk of one node."""

    def __init__(
        self, run: Path, node: Node, nodes: tuple[Node, ...], claim: Claim, seconds: float, store: Store | None = None
    ) -> None:
        store = store or LocalStore(run)
        adopt = Adopt(claim, node.ranks, {}, holdfast.Keep(last=100), False, 60.0, "raw", nodes, seconds)
        self.node, self.told = node, {rank: [] for rank in node.ranks}  # type: ignore[var-annotated]
        self.arenas: dict[int, Arena] = {}
        ranks = sorted(rank for one in nodes for rank in one.ranks)
        self.engine = Engine(
            node.ranks, NodeWriter(store, adopt, Session(store, {}, claim=claim)), self._hear, store, claim.attempt,
            united=partial(node_contents, positions={rank: position for position, rank in enumerate(ranks)}),
        )  # fmt: skip

    def _hear(self, rank: int, message: Message, fds: Any) -> None:
        if isinstance(message, Memory):
            self.arenas[rank] = Arena(os.dup(fds[0]), message.slots, message.slot_bytes)
        self.told[rank].append(message)

    def table(self, rank: int, rows: list[Row]) -> None:
        self.engine.receive(rank, Table(1, rows, 3, max(one.at + one.nbytes for one in rows)))

    def begin(self, rank: int, step: int, numbers: np.ndarray | float, values: Any = (), turn: int = 1) -> None:
        """Capture a step; `numbers` are what is in the rank's memory."""
        slot = self.arenas[rank].slot(step % 3).view(np.float32)
        slot[: np.size(numbers)] = numbers
        self.engine.receive(rank, Begin(step, step % 3, 1, "", list(values), {"state": "dict"}, {}, False, "", time.time(), turn))

    def captured(self, rank: int, step: int) -> None:
        self.engine.receive(rank, Captured(step, {}))

    def await_level(self, step: int, level: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while {v.step: v.level for v in self.engine.versions}.get(step) != level:
            assert time.monotonic() < end, [(v.step, v.level, v.error) for v in self.engine.versions]
            time.sleep(0.002)

    def error(self, step: int) -> str:
        """Why a step failed, as the ranks were told."""
        [text] = {
            m.error[1] for rank in self.told for m in self.told[rank] if isinstance(m, Outcome) and m.step == step and m.error
        }
        return text

    def close(self) -> None:
        self.engine.writer.give_up()
        assert self.engine.close(PATIENCE_SECONDS)
        for arena in self.arenas.values():
            arena.close()


class Several:
    """The nodes of a job."""

    def __init__(self, run: Path, nodes: tuple[Node, ...], seconds: float, stores: Mapping[str, Store] | None = None) -> None:
        self.run, self._nodes, self._seconds = run, nodes, seconds
        self._claim = Session(LocalStore(run), {"holdfast": "0"}).claim
        self.all: list[OneNode] = []
        self.by_name = {node.name: self.start(node, (stores or {}).get(node.name)) for node in nodes}

    def start(self, node: Node, store: Store | None = None) -> OneNode:
        self.all.append(OneNode(self.run, node, self._nodes, self._claim, self._seconds, store))
        return self.all[-1]

    def stored(self, step: int) -> dict[str, Any]:
        with holdfast.open(self.run, step=step) as checkpoint:
            assert checkpoint.verify() == []
        found: dict[str, Any] = holdfast.load(self.run, step=step)["state"]
        return found


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Callable[..., Several]]:
    made: list[Several] = []

    def make(nodes: tuple[Node, ...] = NODES, seconds: float = 60.0, stores: Mapping[str, Store] | None = None) -> Several:
        made.append(Several(tmp_path / "run", nodes, seconds, stores))
        return made[0]

    yield make
    for job in made:
        for one in job.all:
            one.close()


def replicas(job: Several, by: str = "") -> tuple[OneNode, OneNode]:
    """All ranks hold all of a tensor. Node a has cut it among its two ranks, node b has one rank."""
    a, b = job.by_name["a"], job.by_name["b"]
    whole: Box = ((0, 0), (ROWS, WIDTH))
    for rank, first, count in ((0, 0, 5), (1, 5, ROWS - 5)):
        a.table(rank, [row("state.w", (ROWS, WIDTH), 0, ((first, 0), (count, WIDTH)), whole, by)])
    b.table(2, [row("state.w", (ROWS, WIDTH), 0, whole, None, by)])
    return a, b


def numbers() -> np.ndarray:
    return np.arange(ROWS * WIDTH, dtype=np.float32)


def save_replicas(a: OneNode, b: OneNode, step: int, theirs: np.ndarray) -> None:
    ours = numbers()
    a.begin(0, step, ours[: 5 * WIDTH])
    a.begin(1, step, ours[5 * WIDTH :])
    b.begin(2, step, theirs)
    for one in (a, b):
        for rank in one.node.ranks:
            one.captured(rank, step)


@pytest.mark.parametrize("by", ["", "a layout"])
def test_what_several_nodes_hold_is_written_once_however_each_has_cut_it(several: Callable[..., Several], by: str) -> None:
    job = several()
    a, b = replicas(job, by)
    save_replicas(a, b, 1, numbers())
    for one in (a, b):
        one.await_level(1, DURABLE)
    assert np.array_equal(job.stored(1)["w"].numpy().reshape(-1), numbers())
    written = [one.engine.written_bytes for one in (a, b)]
    assert numbers().nbytes <= sum(written) < numbers().nbytes + (64 << 10), written


def test_replicas_that_differ_between_nodes_are_refused_by_name(several: Callable[..., Several]) -> None:
    job = several()
    a, b = replicas(job)
    save_replicas(a, b, 1, numbers() + 1)
    for one in (a, b):
        one.await_level(1, FAILED)
        assert "state.w" in one.error(1)
        assert "PerRank" in one.error(1)
    save_replicas(a, b, 2, numbers())
    for one in (a, b):
        one.await_level(2, DURABLE)


def test_what_a_layout_declares_to_be_equal_is_not_compared(several: Callable[..., Several]) -> None:
    job = several()
    a, b = replicas(job, "a layout")
    save_replicas(a, b, 1, numbers() + 1)
    for one in (a, b):
        one.await_level(1, DURABLE)


def test_boxes_that_each_two_of_three_nodes_hold_are_all_written_once(several: Callable[..., Several]) -> None:
    """Hybrid sharding whose groups do not end where nodes do."""
    job = several((Node("a", (0, 1)), Node("b", (2, 3)), Node("c", (4, 5))))
    for node in job.by_name.values():
        for rank in node.node.ranks:
            box: Box = ((rank % 3,), (1,))
            node.table(rank, [row("state.w", (3,), 0, box, None, "a layout")])
            node.begin(rank, 1, float(rank % 3))
            node.captured(rank, 1)
    for node in job.by_name.values():
        node.await_level(1, DURABLE)
    assert job.stored(1)["w"].tolist() == [0.0, 1.0, 2.0]


def test_values_that_differ_by_rank_are_those_of_their_ranks_on_any_node(several: Callable[..., Several]) -> None:
    job = several((Node("a", (0, 2)), Node("b", (1, 3))))
    for node in job.by_name.values():
        for rank in node.node.ranks:
            node.table(rank, [row(f"state.r{rank}", (2,), 0)])
            pairs = [[["state", "same"], 7], [["state", "own"], rank], [["state", "by node"], node.node.name]]
            node.begin(rank, 1, float(rank), pairs)
            node.captured(rank, 1)
    for node in job.by_name.values():
        node.await_level(1, DURABLE)
    step = holdfast.Run(job.run).latest()
    assert step is not None
    assert [pair for pair in step.commit.values if pair[0][0] == "state"] == [[["state", "same"], 7]]
    found = {rank: {pair[0][1]: pair[1] for pair in pairs} for rank, pairs in step.commit.rank_values.items()}
    assert found == {str(rank): {"own": rank, "by node": "ab"[rank % 2]} for rank in range(4)}
    assert step.commit.world == 4


def test_a_step_that_one_rank_gives_up_is_given_up_at_once_on_all_nodes_who_are_told_whose_it_was(
    several: Callable[..., Several],
) -> None:
    job = several(seconds=600.0)
    a, b = replicas(job)
    a.begin(0, 1, 0.0)
    a.begin(1, 1, 0.0)
    a.await_level(1, WRITING)
    b.engine.receive(2, Dropped(1, ["Torn", "rank 2: it was changed"]))
    a.await_level(1, FAILED)
    assert "node b (rank 2): rank 2: it was changed" in a.error(1)
    save_replicas(a, b, 2, numbers())
    for one in (a, b):
        one.await_level(2, DURABLE)


def test_a_step_that_one_node_leaves_out_is_left_out_on_all_and_is_no_failure(several: Callable[..., Several]) -> None:
    job = several(seconds=600.0)
    a, b = replicas(job)
    for rank in (0, 1):
        a.begin(rank, 1, 0.0)
        a.captured(rank, 1)
    b.engine.receive(2, Dropped(1, ["Unavailable", "rank 2: no memory was free"], True))
    a.await_level(1, FAILED)
    assert "node b (rank 2): rank 2: no memory was free" in a.error(1)
    assert [(one.engine.counts["skipped"], one.engine.counts[FAILED]) for one in (a, b)] == [(1, 0)] * 2


def test_what_all_ranks_leave_out_is_no_word_between_nodes(several: Callable[..., Several]) -> None:
    job = several()
    a, b = replicas(job)
    for step in range(1, 20):
        for one in (a, b):
            for rank in one.node.ranks:
                one.engine.receive(rank, Dropped(step, ["Unavailable", "no memory was free"], True, by_all=True))
    save_replicas(a, b, 20, numbers())
    for one in (a, b):
        one.await_level(20, DURABLE)
    few = len(list((job.run / board_folder(1)).iterdir()))
    assert few < 20, "those of one save"


def test_a_step_that_is_being_written_when_a_rank_finds_it_torn_is_not_committed(several: Callable[..., Several]) -> None:
    job = several(seconds=600.0)
    a, b = replicas(job)
    for rank in (0, 1):
        a.begin(rank, 1, 0.0)
        a.captured(rank, 1)
    b.begin(2, 1, 0.0)
    for one in (a, b):
        one.await_level(1, WRITING)
    b.engine.receive(2, Dropped(1, ["Torn", "rank 2: it was changed"]))
    for one in (a, b):
        one.await_level(1, FAILED)
        assert "it was changed" in one.error(1)
    assert holdfast.Run(job.run).steps() == []


def test_a_rank_that_is_gone_holds_up_no_other_node(several: Callable[..., Several]) -> None:
    job = several(seconds=600.0)
    a, b = replicas(job)
    b.engine.leave(2)
    a.begin(0, 1, 0.0)
    a.begin(1, 1, 0.0)
    a.await_level(1, FAILED)
    assert "node b (rank 2) takes no part any more: rank 2 is gone" in a.error(1)


def test_a_node_that_never_comes_is_named_at_the_deadline(several: Callable[..., Several]) -> None:
    job = several(seconds=2.0)
    a, _ = replicas(job)
    for rank in (0, 1):
        a.begin(rank, 1, 0.0)
        a.captured(rank, 1)
    a.await_level(1, FAILED)
    assert "for node b (rank 2) (it never began" in a.error(1)


def test_what_is_not_captured_at_the_deadline_is_given_up_and_later_steps_are_saved(several: Callable[..., Several]) -> None:
    job = several(seconds=3.0)
    a, b = replicas(job)
    for rank in (0, 1):
        a.begin(rank, 1, 0.0)
        a.captured(rank, 1)
    b.begin(2, 1, 0.0)  # and no word that it is captured
    for one in (a, b):
        one.await_level(1, FAILED)
    assert "node b (rank 2)" in a.error(1)
    save_replicas(a, b, 2, numbers())
    for one in (a, b):
        one.await_level(2, DURABLE)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_an_agent_in_the_place_of_one_that_died_ends_the_calls_that_wait_for_it(
    several: Callable[..., Several], victim: str
) -> None:
    """Both of the node that leads and of another; the one that died had written nothing yet."""
    job = several(seconds=600.0)
    a, b = replicas(job)
    dead, other = (a, b) if victim == "a" else (b, a)
    for one in (a, b):
        for rank in one.node.ranks:
            one.begin(rank, 1, 0.0)
            if one is other:
                one.captured(rank, 1)
        one.await_level(1, WRITING)
    board = StoreBoard(LocalStore(job.run), board_folder(1), 2)
    assert board.wait(["save of step 1 to run/1/begin/answer"], PATIENCE_SECONDS), "both have taken part"
    job.by_name[victim] = job.start(dead.node)
    other.await_level(1, FAILED)
    assert "another one has taken its place" in other.error(1)
    dead.engine.receive(dead.node.ranks[0], Dropped(1, ["Unavailable", "its process was killed"]))
    dead.await_level(1, FAILED)
    a, b = replicas(job)
    save_replicas(a, b, 2, numbers())
    for one in (a, b):
        one.await_level(2, DURABLE)


def test_nothing_is_left_of_the_board_when_all_have_ended(several: Callable[..., Several]) -> None:
    job = several()
    a, b = replicas(job)
    save_replicas(a, b, 1, numbers())
    for one in (a, b):
        one.await_level(1, DURABLE)
    for one in (b, a):
        assert one.engine.close(PATIENCE_SECONDS)
    assert list((job.run / "agents").iterdir()) == []
    job.all.clear()
    for one in (a, b):
        for arena in one.arenas.values():
            arena.close()


def test_a_disk_that_is_full_right_after_the_commit_does_not_undo_it(several: Callable[..., Several], tmp_path: Path) -> None:
    """The leader cannot give its answer any more; the others read the decision, and no node says anything else."""
    job = several(stores={"a": FullOnceCommitted(LocalStore(tmp_path / "run"))})
    a, b = replicas(job, "a layout")
    save_replicas(a, b, 1, numbers())
    for node in (a, b):
        node.await_level(1, DURABLE)
    assert np.array_equal(job.stored(1)["w"].numpy().reshape(-1), numbers())
