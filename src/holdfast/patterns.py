"""Patterns over logical names: shell globs in which `*` also matches dots, and renames that keep what a star matched."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence


def as_list(patterns: str | Sequence[str] | None) -> list[str]:
    """Patterns as a list; a lone string is one pattern."""
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def matches_any(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether any of the patterns matches the whole name."""
    return any(_compiled(p).match(name) for p in as_list(patterns))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern))


def renamer(renames: Mapping[str, str]) -> dict[str, tuple[re.Pattern[str], str]]:
    """Compiled renames: each pattern, as a regular expression with a group for each star, and the template.

    Raises:
        ValueError: a template has other stars than its pattern.
    """
    compiled = {}
    for old, new in renames.items():
        if old.count("*") != new.count("*"):
            raise ValueError(f"rename {old!r} -> {new!r}: both sides need the same number of stars")
        tail = r"\Z" if "*" in old else r"(?P<rest>\..*)?\Z"  # without a star, a whole name or a prefix of it
        compiled[old] = (re.compile("(.*)".join(map(re.escape, old.split("*"))) + tail, re.DOTALL), new)
    return compiled


def rename(name: str, renames: Mapping[str, tuple[re.Pattern[str], str]]) -> str:
    """`name` under the first rename that matches it, else as it is."""
    for pattern, template in renames.values():
        if match := pattern.match(name):
            pieces = template.split("*")
            if len(pieces) == 1:
                return template + (match.groupdict().get("rest") or "")
            return "".join(piece + (match[i + 1] if i + 1 < len(pieces) else "") for i, piece in enumerate(pieces))
    return name


def near(name: str, known: Iterable[str]) -> str:
    """(did you mean ...?) for the known name that looks most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
