"""The values of a step from those of its writers: what all say alike once, what differs by rank.

Parameter groups of optimizers are united by what they set, not by their number: a pipeline stage that has no group of biases
still sets the same hyper-parameters for its weights. They travel with the names of their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..errors import Refused
from ..format.names import dotted, path_of
from .parts import Part

Pair = tuple[Any, Any]
GROUPS, MEMBERS = "param_groups", "params"


def unite(parts: Sequence[Part]) -> tuple[list[Any], dict[str, list[Any]]]:
    """Common values, in the order of the tree, and values by the rank's position: [path, typed JSON] pairs.

    A value is common if all ranks that have it say the same. A part is that of the rank at its own position, or, where it has
    values by rank, that of these ranks.
    """
    if len(parts) == 1:
        return list(parts[0].values), dict(parts[0].rank_values)
    by_rank: dict[str, list[Any]] = {}
    united = _Groups({role for part in parts for role, kind in part.roles.items() if kind == "optimizer"})
    common: dict[bytes, Pair] = {}
    differing: set[bytes] = set()
    said: list[tuple[str, bytes, Pair]] = []
    for rank, values in _by_rank(parts):
        for path, data in united.take(values):
            key = msgspec.json.encode(path)
            said.append((rank, key, (path, data)))
            if _coded(common.setdefault(key, (path, data))[1]) != _coded(data):
                differing.add(key)
    _refuse_generators(parts, [common[key][0] for key in differing])
    for rank, key, pair in said:
        if key in differing:
            by_rank.setdefault(rank, []).append(list(pair))
    values = [list(pair) for key, pair in common.items() if key not in differing]
    return values + united.pairs(), by_rank


def _by_rank(parts: Sequence[Part]) -> list[tuple[str, list[Any]]]:
    """What each rank says, by ascending position."""
    found: dict[str, list[Any]] = {}
    for position, part in enumerate(parts):
        if part.values or not part.rank_values:
            found.setdefault(str(position), []).extend(part.values)
        for rank, pairs in part.rank_values.items():
            found.setdefault(rank, []).extend(pairs)
    return sorted(found.items(), key=lambda one: int(one[0]))


def _refuse_generators(parts: Sequence[Part], differing: Sequence[Any]) -> None:
    """Raises:
    Refused: random generators that are said to be replicated are not.
    """
    kinds = {role: kind for part in parts for role, kind in part.roles.items()}
    for path in differing:
        if kinds.get(path[0]) == "rng":
            raise Refused(
                f"{dotted(path_of(path))} is not the same on all ranks, and the state holds one for all of them: seed every "
                'generator alike on all ranks, or hold one for each rank with State(rng="rank") or "reseed"'
            )


def writer_of(rank: int) -> str:
    return f"n{rank:04d}"


def rank_of(writer: str) -> int:
    return int(writer[1:])


class _Groups:
    """The parameter groups of optimizers, united over the parts."""

    def __init__(self, optimizers: set[str]) -> None:
        self._optimizers = optimizers
        self._groups: dict[tuple[str, bytes, int], tuple[dict[str, Any], dict[str, None]]] = {}
        """By role, settings, and number among those of one part that set the same: settings, and names of members."""

    def take(self, values: Sequence[Any]) -> list[Pair]:
        """The values without those of parameter groups, which are kept here."""
        rest: list[Pair] = []
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for path, data in values:
            if len(path) >= 4 and path[0] in self._optimizers and path[1] == GROUPS and isinstance(path[2], int):
                found.setdefault((path[0], path[2]), {})[msgspec.json.encode(path[3:]).decode()] = data
            else:
                rest.append((path, data))
        taken: dict[tuple[str, bytes], int] = {}
        for (role, _), settings in found.items():
            members = settings.pop(_MEMBERS_KEY, [])
            coded = _coded(settings)
            number = taken[role, coded] = taken.get((role, coded), -1) + 1
            group = self._groups.setdefault((role, coded, number), (settings, {}))
            group[1].update(dict.fromkeys(members))
        return rest

    def pairs(self) -> list[Any]:
        pairs = []
        numbers: dict[str, int] = {}
        for (role, _, _), (settings, members) in self._groups.items():
            number = numbers[role] = numbers.get(role, -1) + 1
            pairs.append([[role, GROUPS, number, MEMBERS], list(members)])
            pairs += [[[role, GROUPS, number, *msgspec.json.decode(key)], data] for key, data in settings.items()]
        return pairs


_MEMBERS_KEY = msgspec.json.encode([MEMBERS]).decode()


def _coded(data: Any) -> bytes:
    return msgspec.json.encode(data, order="sorted")
