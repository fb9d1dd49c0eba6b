"""The command line: `holdfast ls`, `inspect`, `verify` and the rest; one module for each command.

app         finds the command that was called, runs it, turns its end into an exit code
place       from what stands on the command line to a run or a checkpoint, and what to say where there is none
terminal    JSON, tables and progress; amounts: bytes, times and metrics as text, and back
elements, statistics, measure, recovery, machine, probes   what single commands compute
"""

from __future__ import annotations

from .app import main

__all__ = ["main"]
