"""Index parts as they lie in a step's directory: read, checked against their digest, with their layout."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import Corrupt
from ..format.columns import Columns
from ..format.digest import hex_digest
from ..format.index import layout_digest, read_index
from ..format.names import safe_path
from ..format.records import FileRef, PartRef
from ..store.base import Store
from .merge import join_layout


class Part(msgspec.Struct, kw_only=True):
    """What a writer says of its part besides the columns; JSON in the column `part.json`."""

    writer: str
    step: int
    attempt: int
    files: list[FileRef] = []
    values: list[Any] = []
    rank_values: dict[str, list[Any]] = {}
    roles: dict[str, str] = {}


def read_part(store: Store, path: str, digest: str | None = None, *, follow: bool = True) -> tuple[Columns, Part, PartRef]:
    """A writer's part; its layout fetched from the earlier part that holds it.

    Raises:
        FileNotFoundError: not published.  Corrupt: differs from `digest`, or is not an index.
    """
    data = store.map(path)
    found = hex_digest(data)
    if digest is not None and found != digest:
        raise Corrupt(f"{path} differs from the digest in the commit record", file=path)
    try:
        columns, metadata = read_index(data, path)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"{path} is not an index: {error}", file=path) from error
    try:
        part = msgspec.json.decode(columns.pop("part.json").tobytes(), type=Part)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{path} does not say who wrote it: {error}", file=path) from error
    if follow and (source := metadata.get("layout_of")):
        layout, _, _ = read_part(store, safe_path(source, path), follow=False)
        columns = join_layout(columns, layout)
        if layout_digest(columns) != metadata.get("layout"):
            raise Corrupt(f"the layout of {path} in {source} is not the one it was written with", file=source)
    return columns, part, PartRef(writer=part.writer, path=path, bytes=len(data), digest=found)


def values_bytes(values: list[Any], rank_values: dict[str, list[Any]]) -> bytes:
    """The bytes of the values that enter the content digest: compact JSON of [values, values by rank], keys sorted."""
    return msgspec.json.encode([values, rank_values], order="deterministic")
