"""The command line: `holdfast ls`, `inspect`, `verify` and the rest; one module for each command, of the command's name.

app         finds the command that was called, runs it, turns its end into an exit code
place       from what stands on the command line to a run or a checkpoint, and what to say where there is none
terminal    JSON, tables, progress; amounts: bytes, times, metrics as text, and back
tree, values        how `inspect` shows names and values
elements    stored elements as numbers; statistics of one tensor, measure between two
damage      what `verify` looks for
findings    what `doctor` says: checkup of a place by its probes, machine, recovery of a run
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
