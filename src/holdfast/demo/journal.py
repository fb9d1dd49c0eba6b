"""What a training process wrote about itself: a file of lines that outlives it.

The parent reads it while the process runs, and again when the process is dead. Losses are written as hexadecimal
floats, which name one float exactly, so comparing words is comparing bits.

    start 60 1763640000.25            the process began (or resumed) at step 60, at this time
    loss 61 0x1.5a5f2cp+2 1763640000.31
    end 300 5f0c...                   it finished; the digest of the final state
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType


class Writer:
    """Appends lines. Each goes to the operating system before the call returns, so SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    @classmethod
    def on(cls, rank: int, path: Path) -> Writer:
        """The journal of a job of several ranks is the first one's; what the others write goes nowhere."""
        return cls(path if rank == 0 else Path(os.devnull))

    def start(self, step: int) -> None:
        self._line("start", step, time.time())

    def loss(self, step: int, loss: float) -> None:
        self._line("loss", step, loss.hex(), time.time())

    def end(self, step: int, digest: str) -> None:
        self._line("end", step, digest)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def _line(self, *words: object) -> None:
        self._file.write(" ".join(str(word) for word in words) + "\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class Loss:
    step: int
    loss: str
    """Hexadecimal."""
    time: float
    """Seconds since the epoch."""


@dataclass(slots=True)
class Story:
    """A journal read so far. All starts of a run write into the same one."""

    starts: list[tuple[int, float]] = field(default_factory=list)
    """The step each process began at, and when."""
    losses: list[Loss] = field(default_factory=list)
    """In the order of writing; a step that was done again is there again."""
    digest: str | None = None
    """Of the final state; None until a process finished."""
    step: int = 0
    """Where the newest process is: the last step it did, or the one it began at."""


class Reader:
    """Follows a journal that another process writes."""

    def __init__(self, path: Path) -> None:
        self.story = Story()
        self._path = path
        self._offset = 0

    def read(self) -> Story:
        """Take in what was written since the last call; a line without its end waits for the next."""
        for words in self._lines():
            match words:
                case ["start", step, when]:
                    self.story.starts.append((int(step), float(when)))
                    self.story.step = int(step)
                case ["loss", step, loss, when]:
                    self.story.losses.append(Loss(int(step), loss, float(when)))
                    self.story.step = int(step)
                case ["end", _, digest]:
                    self.story.digest = digest
                case _:
                    raise ValueError(f"{self._path}: a line that no training process writes: {' '.join(words)!r}")
        return self.story

    def _lines(self) -> Iterator[list[str]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            yield line.decode().split()


class Samples:
    """A file in which one rank writes the samples that each step reads, before it does the step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def read(self, step: int, samples: Sequence[int]) -> None:
        self._file.write(f"{step} {' '.join(map(str, samples))}\n")
        self._file.flush()

    def __enter__(self) -> Samples:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def samples_of(path: Path) -> dict[int, list[int]]:
    """What one rank read in each step."""
    lines = path.read_bytes().rpartition(b"\n")[0].splitlines() if path.exists() else []
    numbers = ([int(word) for word in line.split()] for line in lines)
    return {step: samples for step, *samples in numbers}
