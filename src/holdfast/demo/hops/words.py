"""How a hop and a loss curve look in a few lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.demo.hops.stored import Box, Stored

EXAMPLES = ("model.embed.weight", "model.layers.0.attention.wo.weight", "optimizer.model.layers.0.ffn.w1.weight.exp_avg")
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 64


def shown(before: Stored | None, after: Stored | None) -> list[str]:
    """Some tensors of a hop: their pieces and their digests, before and after; and the digest of all."""
    if before is None or after is None:
        return []
    rows = [
        (name, f"{pieces(before.pieces[name])} -> {pieces(after.pieces[name])}", before.tensors[name], after.tensors[name])
        for name in EXAMPLES
        if name in before.tensors and name in after.tensors
    ]
    rows.append((f"all {len(after.tensors)} tensors and {len(after.values)} values", "", before.digest, after.digest))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return [
        f"{name:<{widths[0]}}  {how:<{widths[1]}}  {one[:12]} {'=' if one == other else 'differs from'} {other[:12]}"
        for name, how, one, other in rows
    ]


def pieces(boxes: Sequence[Box]) -> str:
    """`4 of 32x64`; unequal ones as `22x64 22x64 20x64`."""
    if len(boxes) == 1:
        return f"whole {_size(boxes[0])}"
    if len(Counter(boxes)) == 1:
        return f"{len(boxes)} of {_size(boxes[0])}"
    return " ".join(map(_size, boxes))


def curve(losses: dict[int, float], ranks: dict[int, int]) -> list[str]:
    """The losses as bars, and below each bar on how many ranks it was trained."""
    steps = sorted(losses)
    if not steps:
        return []
    columns = min(WIDTH, len(steps))
    groups = [steps[len(steps) * c // columns : len(steps) * (c + 1) // columns] for c in range(columns)]
    means = [sum(losses[step] for step in group) / len(group) for group in groups]
    low, high = min(means), max(means)
    heights = [round((mean - low) / ((high - low) or 1) * (len(BARS) - 1)) for mean in means]
    return [
        f"loss   {''.join(BARS[height] for height in heights)}  {losses[steps[0]]:.2f} -> {losses[steps[-1]]:.2f}",
        f"ranks  {''.join(str(ranks[group[-1]]) for group in groups)}",
    ]


def _size(box: Box) -> str:
    return "x".join(map(str, box)) or "scalar"
