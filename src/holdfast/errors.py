"""The tree of errors. Each has the exit code of the command line, and carries its facts as attributes.

HoldfastError                  1
  NoCheckpoint                 3   nothing committed at that address
  Mismatch                     5   what is stored and what is live differ; live state was not touched
  Corrupt                      4   stored bytes are not what was captured
  Unavailable                  7   the store does not answer, or refuses
    NoSpace                    8   it does not fit
    BoardGone                  7   the store by which ranks talk does not answer
    LeftOut                    7   a save was left out on purpose
    Replaced                   7   an agent was killed and replaced
  Deadline                     7   a wait ran out
  Superseded                   6   a newer attempt has taken over the run
  Overdue                      1   more than `lose_at_most` would be lost
  Refused                      6   would lose or mix data
    StepExists                 6   the decision about this step was already taken
    TooLate                    6   the job is killed before this save could end
  Unsupported                  2   a value, a dtype or an object that has no stored form
  Torn                         1   a capture was not of one instant; nothing of it was committed
"""

from __future__ import annotations

from typing import Any


class HoldfastError(Exception):
    """The root of all errors that holdfast raises on purpose."""

    exit_code = 1


class NoCheckpoint(HoldfastError):
    """Nothing committed at that address."""

    exit_code = 3


class Mismatch(HoldfastError):
    """The stored and the live state differ in names, shapes, dtypes or aliases. Live state was not touched.

    Attributes:
        differences: one line for each difference.
    """

    exit_code = 5

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class Corrupt(HoldfastError):
    """Stored bytes are not what was captured.

    Attributes:
        file: path in the run; tensor: logical name or None; offset: first damaged byte in the file, or None.
    """

    exit_code = 4

    def __init__(self, message: str, *, file: str = "", tensor: str | None = None, offset: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor
        self.offset = offset


class Unavailable(HoldfastError):
    """The store does not answer, or refuses: permissions, a missing directory, an input or output error."""

    exit_code = 7


class BoardGone(Unavailable):
    """The key-value store by which ranks talk does not answer; what they have decided is in the checkpoint store."""


class LeftOut(Unavailable):
    """A save was left out on purpose, by another node: no memory was free there, or a newer one took its place."""


class Replaced(Unavailable):
    """An agent that had a part in a save was killed, and another one has taken its place, which knows nothing of that save."""


class NoSpace(Unavailable):
    """The disk or the quota is full. Nothing committed was harmed."""

    exit_code = 8


class Deadline(HoldfastError):
    """A wait ran out; the message names who is missing, in which phase, and after how long."""

    exit_code = 7


class Superseded(HoldfastError):
    """A newer attempt has taken over the run; this writer must stop.

    Attributes:
        attempt: ours; newer: the newest one.
    """

    exit_code = 6

    def __init__(self, message: str, *, attempt: int = 0, newer: int = 0) -> None:
        super().__init__(message)
        self.attempt = attempt
        self.newer = newer


class Overdue(HoldfastError):
    """More than `lose_at_most` would be lost if the job died now."""


class Refused(HoldfastError):
    """What was asked would lose or mix data."""

    exit_code = 6


class StepExists(Refused):
    """The create-once decision about this step was already taken; `existing` is its record."""

    def __init__(self, message: str, existing: Any = None) -> None:
        super().__init__(message)
        self.existing = existing


class TooLate(Refused):
    """The job is killed before this save could end, so that it was not begun. The last good step is as it was."""


class Unsupported(HoldfastError):
    """A value, a dtype or an object that has no stored form; the message names its path and the way out."""

    exit_code = 2


class Torn(HoldfastError):
    """The state was changed while it was being captured; nothing of that capture was committed."""
