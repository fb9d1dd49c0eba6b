"""`holdfast export`: write a checkpoint as others read it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..address import UsageError
from ..format.dtypes import BY_NAME
from ..patterns import matches_any
from .amounts import parse_size, size
from .place import open_address
from .terminal import Json, print_json

FORMATS = ("safetensors", "hf", "torch")


def export(
    address: Annotated[str, typer.Argument(help="Which checkpoint; without @, the latest.", metavar="ADDRESS")],
    target: Annotated[str, typer.Argument(help="A directory, or the file for `torch`; it must not hold anything yet.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="|".join(FORMATS),
            help="hf: the weights of the modules under the names that Hugging Face has. torch: one file for torch.load.",
        ),
    ] = "safetensors",
    select: Annotated[list[str] | None, typer.Option(help="Only names that match this pattern; repeatable.")] = None,
    cast: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN=DTYPE", help="Convert what matches, as in '*=bfloat16'; repeatable.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of one safetensors file.", metavar="SIZE")] = "5GiB",
    as_json: Json = False,
) -> int:
    """Write a checkpoint in another format, tensor by tensor."""
    if to not in FORMATS:
        raise UsageError(f"cannot export to {to!r}; known: {', '.join(FORMATS)}")
    casts, limit = _casts(cast or ()), parse_size(max_shard_size)
    with open_address(address) as checkpoint:
        known = [*checkpoint.names, *checkpoint.values] if to == "torch" else checkpoint.names
        for pattern in [*(select or ()), *casts]:
            if not any(matches_any(name, pattern) for name in known):
                raise UsageError(f"nothing in {address} matches {pattern!r}; `holdfast inspect {address}` shows the names")
        from ..interop.export import export_checkpoint

        paths = export_checkpoint(checkpoint, target, to, select, casts, limit)
        step = checkpoint.step
    files = [{"path": path, "bytes": os.path.getsize(path)} for path in paths]
    if as_json:
        print_json({"address": address, "step": step, "target": os.path.abspath(target), "format": to, "files": files})
    else:
        _tell(files)
    return 0


def _casts(texts: Sequence[str]) -> dict[str, str]:
    """PATTERN=DTYPE, taken apart.

    Raises:
        UsageError: not of this form, or an unknown dtype.
    """
    found = {}
    for text in texts:
        pattern, mark, wanted = text.rpartition("=")
        if not mark or not pattern:
            raise UsageError(f"--cast {text!r}: give PATTERN=DTYPE, such as '*=bfloat16'")
        if wanted.removeprefix("torch.") not in BY_NAME:
            raise UsageError(f"--cast {text!r}: there is no dtype {wanted}; known: {', '.join(BY_NAME)}")
        found[pattern] = wanted
    return found


def _tell(files: list[dict[str, Any]]) -> None:
    for file in files:
        print(f"{file['path']}  {size(file['bytes'])}")
