"""Names: from a path in the tree of a state to the logical name under which a tensor or value is stored, and file names.

A logical name is the path's components joined by dots. `%`, `@`, control characters, and the name `__metadata__` are written
as `%XX` of their UTF-8 bytes, so that `name@offset+shape` can be taken apart and a safetensors header stays valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Corrupt, Unsupported
from .records import StepRef

_ESCAPED = re.compile(r"[%@\x00-\x1f\x7f]")
_STEP_DIR = re.compile(r"([0-9]{10,18})-a([0-9]{4,9})(?:-r([0-9]{1,9}))?\Z")


def escape(text: str) -> str:
    """`text` as it may stand in a logical name.

    Raises:
        Unsupported: it has lone surrogates, which no file can hold.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Unsupported(f"the name {text!r} is not valid Unicode; rename the key") from None
    escaped = _ESCAPED.sub(lambda m: f"%{ord(m.group()):02X}", text)
    return "%5F_metadata__" if escaped == "__metadata__" else escaped


@dataclass(frozen=True)
class Key:
    """A component of a path that is neither a string nor an integer: its typed JSON, as text."""

    text: str


def key_part(data: Any) -> Any:
    """The component of a path for a key, given as typed JSON. Strings and integers stand for themselves."""
    return data if type(data) in (str, int) else Key(_compact(data))


def path_of(stored: Sequence[Any]) -> tuple[Any, ...]:
    """A path from its stored form, a list of typed JSON."""
    return tuple(map(key_part, stored))


def stored_path(path: Sequence[Any]) -> list[Any]:
    """The stored form of a path; inverse of `path_of`."""
    return [json.loads(p.text) if isinstance(p, Key) else p for p in path]


def dotted(path: Sequence[Any]) -> str:
    """The logical name of a path: its components, escaped, joined by dots. Keys that are no strings stand as their JSON."""
    return ".".join(escape(p if isinstance(p, str) else p.text if isinstance(p, Key) else _compact(p)) for p in path)


def _compact(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def step_dir(step: int, attempt: int, rewrite: int = 0) -> str:
    """The directory of a step in a run: `steps/0000001000-a0007`, with `-r1` after it where the step was written again."""
    return f"steps/{step:010d}-a{attempt:04d}" + (f"-r{rewrite}" if rewrite else "")


def parse_step_dir(name: str) -> tuple[int, int, int] | None:
    """(step, attempt, rewrite) of the last component of a step directory, or None if it is not one."""
    match = _STEP_DIR.match(name)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def owner_of(path: str) -> StepRef:
    """The step in whose directory a file of a run lies.

    Raises:
        Corrupt: it lies in none.
    """
    parsed = parse_step_dir(path.split("/")[1]) if path.startswith("steps/") else None
    if parsed is None:
        raise Corrupt(f"{path!r} lies in no step's directory")
    return StepRef(parsed[0], parsed[1])


def safe_path(path: str, where: str) -> str:
    """`path` if it stays inside the run.

    Raises:
        Corrupt: it is absolute, or has empty, `.` or `..` components, or control characters.
    """
    parts = path.split("/")
    if not path or any(p in ("", ".", "..") for p in parts) or "\\" in path or any(ord(c) < 32 for c in path):
        raise Corrupt(f"{where} names the file {path!r}, which does not lie inside the run; nothing was read", file=where)
    return path
