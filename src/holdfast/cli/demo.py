"""`holdfast demo`: train, kill, resume, and compare with a training that was left alone."""

from __future__ import annotations

from typing import Annotated

import typer

from .terminal import Json


def demo(
    directory: Annotated[str | None, typer.Argument(help="Where the files go; default: a new temporary directory.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of the first part's training.")] = 120,
    kills: Annotated[int, typer.Option(min=0, help="How often the training process is killed in the first part.")] = 3,
    every: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the model, the data, and when to kill.")] = 0,
    part: Annotated[list[str] | None, typer.Option("--part", help="Run only this part: one or layouts.")] = None,
    keep_files: Annotated[bool, typer.Option("--keep-files", help="Leave the run and the journals.")] = False,
    as_json: Json = False,
) -> int:
    """Train, kill, resume, and compare.

    A small transformer is killed again and again, and must end bit-equal to one left alone. Then another one goes on under four
    parallel layouts, and each hop must be bit-equal. Exit code 5 if something is not.
    """
    from ..demo import run_demo

    return run_demo(directory, steps, kills, seed, keep_files, every=every, as_json=as_json, parts=part or ("one", "layouts"))
