"""Layout expressions for hand-sharded tensors: how a rank's tensor lies in the logical one.

One product of factors for each dimension, outermost first: `(@tp * out, in)` says that the first dimension is cut over the mesh
axis `tp`, equally. Axes that are not named hold replicas. Of the language for layout rules these are the simple factors: names
and `@axis`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import Refused, Unsupported
from .layouts import Mesh, Placement, Replicate, Shard

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def parse(expression: str) -> list[list[str]]:
    """The mesh axes that cut each dimension, outermost first.

    Raises:
        Refused: not an expression.  Unsupported: a factor that this version does not have.
    """
    text = expression.strip()
    if not (text.startswith("(") and text.endswith(")")):
        raise Refused(f"the layout {expression!r} is no expression: write one factor for each dimension, as in '(@tp * out, in)'")
    return [_axes(dim, expression) for dim in text[1:-1].split(",")]


def layout_of(expression: str, local: Sequence[int], names: Sequence[str], mesh: Any) -> tuple[tuple[int, ...], Mesh]:
    """Global shape and layout of a tensor of which each rank holds `local`.

    Args:
        local: shape of this rank's tensor. names: of the mesh's dimensions. mesh: its global ranks, as an array.
    Raises:
        Refused: the expression does not fit the tensor or the mesh.
    """
    cuts = parse(expression)
    ranks = np.asarray(mesh)
    if len(cuts) != len(local):
        raise Refused(f"the layout {expression!r} has {len(cuts)} dimensions, and the tensor {len(local)}: {list(local)}")
    used = [axis for dim in cuts for axis in dim]
    if unknown := [axis for axis in used if axis not in names]:
        raise Refused(f"the layout {expression!r} names the axis {unknown[0]}; the mesh has {', '.join(names)}")
    if len(set(used)) < len(used):
        raise Refused(f"the layout {expression!r} cuts twice over one axis")
    order = [names.index(axis) for axis in used] + [i for i, name in enumerate(names) if name not in used]
    turned = ranks.transpose(order)
    placements: list[Placement] = [Shard(dim) for dim, axes in enumerate(cuts) for _ in axes]
    placements += [Replicate()] * (len(names) - len(used))
    sizes = dict(zip(names, ranks.shape, strict=True))
    shape = tuple(n * math.prod(sizes[axis] for axis in axes) for n, axes in zip(local, cuts, strict=True))
    return shape, Mesh(tuple(turned.reshape(-1).tolist()), turned.shape, tuple(placements))


def _axes(dim: str, expression: str) -> list[str]:
    axes, names = [], 0
    for factor in (part.strip() for part in dim.split("*")):
        if factor.startswith("@") and _NAME.match(factor[1:]) and not names:
            axes.append(factor[1:])
        elif _NAME.match(factor):
            names += 1
        else:
            raise Unsupported(
                f"the factor {factor!r} in the layout {expression!r} is not known here: factors are names and, before them, @axis"
            )
    return axes
