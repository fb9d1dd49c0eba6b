"""The stored values of a checkpoint by name, as typed JSON, and as a reader likes to see them."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ..errors import HoldfastError
from ..format.names import dotted
from ..format.values import decode
from ..loading.checkpoint import NODE, Checkpoint


def stored_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Typed JSON by name; a rank's own values have the rank in theirs. Containers that are no dicts count as values."""
    found = {_name(path, data): data for path, data in checkpoint.commit.values}
    for rank, pairs in checkpoint.commit.rank_values.items():
        found |= {f"{_name(path, data)} (rank {rank})": data for path, data in pairs}
    return found


def is_container(data: Any) -> bool:
    """Whether typed JSON says what a path is besides a dict, such as a list, and is no value itself."""
    return isinstance(data, dict) and NODE in data


def value_text(name: str, data: Any) -> str:
    """A value as Python writes it; its typed JSON where its type is not known here."""
    if is_container(data):
        return str(data[NODE])
    with contextlib.suppress(HoldfastError):
        return repr(decode(data, name))
    return json.dumps(data)


def _name(path: list[Any], data: Any) -> str:
    return f"{dotted(path)} (kind of container)" if is_container(data) else dotted(path)
