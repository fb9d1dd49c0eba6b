"""Lives of the job of `job.py`: what it has told, its agent, and what holds when one of them was killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from joint.training import read_diary
from ranks.pools import Pool

import holdfast
from holdfast.agent.links import ask
from holdfast.agent.messages import Ask, Told
from holdfast.run.status import Status
from holdfast.store.locate import open_store

from .job import diary_of, train

PATIENCE_SECONDS = 40.0
"""For what happens in milliseconds where nothing else runs."""
CLEAN_STEPS = 6


def until(what: Callable[[], bool], why: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for what must come."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {why}"
        time.sleep(0.005)


def status(run: Path) -> Status | None:
    """What the agent of a run says of itself; None where there is none. HOLDFAST_AGENT_DIR must be set as for the ranks."""
    told = ask(open_store(run).url, "", Ask(), 5.0)
    return told.status if isinstance(told, Told) else None


def agents_in(sockets: Path) -> list[int]:
    """Processes of agents whose sockets lie, or lay, in a directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if "holdfast.agent.serve" in command and str(sockets) in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def kill(pid: int) -> None:
    """SIGKILL to a process that is not ours to wait for, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        watch = os.pidfd_open(pid)
        signal.pidfd_send_signal(watch, signal.SIGKILL)
        assert select.select([watch], [], [], PATIENCE_SECONDS)[0], f"process {pid} outlives SIGKILL"
        os.close(watch)


class Life:
    """One start of the job on a world of ranks.

    Args:
        diary: begins the names of the ranks' diaries. options: for `train`.
    """

    def __init__(self, run: Path, diary: Path, sockets: Path, world: int, seed: int, promises: Promises, **options: Any) -> None:
        self.run, self.world, self.promises, self._diary = run, world, promises, diary
        self.pool = Pool(world)
        self.pool.start(train, run, diary, sockets, seed, **options)
        self.some_went_first = False
        """Ranks that outlive others may be told so by an error."""
        self.voided = 0
        """What was begun up to this step may have died with an agent."""

    def told(self) -> list[list[dict[str, Any]]]:
        return [read_diary(diary_of(self._diary, rank)) for rank in range(self.world)]

    def most(self, what: str, of: Callable[[list[int]], int] = max) -> int:
        """The greatest step that the ranks have told of, as `resumed`, `step`, `captured` or `durable`; 0 where none has."""
        return of([max((line[what] for line in lines if what in line), default=0) for lines in self.told()])

    def kill_agent(self) -> bool:
        """Whether there was one. Before the life has resumed it is that of the life before, with all that this had captured."""
        if not all(any("resumed" in line for line in lines) for lines in self.told()):
            self.promises.hold_no_captures()
        found = status(self.run)
        if found is None:
            return False
        kill(found.pid)
        self.voided = self.most("step")
        return True

    def await_recovery(self) -> None:
        """The next save works, although the agent is gone."""
        until(lambda: self.most("durable", min) > self.voided, f"a step after {self.voided}, with another agent")

    def end(self, ranks: list[int] | None = None) -> None:
        """Kill ranks, all by default; with the last of them the life is over."""
        self.some_went_first = self.some_went_first or ranks is not None
        for rank in range(self.world) if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):  # it is dead already
                self.pool.kill(rank)

    def where(self) -> str:
        """Where the threads of each rank are; ends the life."""
        return "\n".join(str(result) for result in self.pool.results(timeout=0.1, catch=True))

    def close(self) -> None:
        self.pool.close(at_once=True)

    def captured_everywhere(self) -> int:
        """The last step that all ranks have told to be captured, by the agent that is there now; 0 where there is none."""
        told = [{line["captured"] for line in lines if line.get("captured", 0) > self.voided} for lines in self.told()]
        return max(set.intersection(*told), default=0)


class Promises:
    """What the lives of one run have been promised, and whether it was kept."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._least, self._most, self._committed = 0, 0, 0
        """The step that the next life resumes from lies between the first two; the third was committed when a life ended."""

    def hold_no_captures(self) -> None:
        """The agent with what was captured and not yet committed is about to be killed."""
        self._least = self._committed

    def ended(self, life: Life, agent_lives: bool) -> list[str]:
        """Take in what a life has told; call when all of its ranks are dead. What was wrong with it."""
        wrong = self._wrong(life)
        latest = holdfast.Run(self.run).latest() if self.run.exists() else None
        committed = latest.step if latest else 0
        durable = life.most("durable")
        if committed < durable:
            wrong.append(f"step {durable} was announced to be durable, the run has {committed}")
        self._committed = max(self._committed, committed)
        self._least = max(self._least, committed)
        self._most = max(self._least, self._most if agent_lives else 0)
        if agent_lives:
            self._least = max(self._least, life.captured_everywhere())
            self._most = max(self._most, life.most("step", min))
        else:
            self._most = committed
        return wrong

    def _wrong(self, life: Life) -> list[str]:
        told = life.told()
        found = [f"rank {rank}: {line['wrong']} at {line['resumed']}" for rank, lines in enumerate(told) for line in lines
                 if line.get("wrong")]  # fmt: skip
        resumed = {line["resumed"] for lines in told for line in lines if "resumed" in line}
        if len(resumed) > 1:
            found.append(f"ranks resumed from {resumed}")
        crashes = [(rank, line["crashed"]) for rank, lines in enumerate(told) for line in lines if "crashed" in line]
        may_say = ("Unavailable: ", "Deadline: ", "BoardGone: ") if life.some_went_first else ()
        found += [f"rank {rank}: {text}" for rank, text in crashes if not text.startswith(may_say)]
        return found + [
            f"resumed from {step}, which is not from {self._least} to {self._most}"
            for step in resumed
            if not self._least <= step <= self._most
        ]


def end_well(run: Path, diary: Path, sockets: Path, world: int, promises: Promises) -> None:
    """A last life that nothing disturbs: it resumes, its last step is the newest, and nothing of all lives is left."""
    life = Life(run, diary, sockets, world, 0, promises, most=CLEAN_STEPS)
    results = life.pool.results(timeout=PATIENCE_SECONDS, catch=True)
    life.pool.close()
    assert results == [None] * world, results
    assert promises.ended(life, agent_lives=False) == []
    last = life.most("resumed") + CLEAN_STEPS
    steps = holdfast.Run(run).steps()
    assert steps[-1].step == last
    for step in steps:
        with holdfast.open(run, step=step.step) as checkpoint:
            assert checkpoint.verify() == []
    marks = [str(path.relative_to(run)) for kind in ("intents", "tombstones") for path in run.glob(f"{kind}/[!.]*")]
    assert marks == []
    nothing_is_left(sockets)


def nothing_is_left(sockets: Path) -> None:
    """No agent, and no socket of one."""
    until(lambda: not agents_in(sockets), "the agent ends with its job")
    assert list(sockets.iterdir()) == []
