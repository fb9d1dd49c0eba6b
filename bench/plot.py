"""The picture: a panel for each column that matters, a bar for each median, a dot for each round."""

from pathlib import Path

import matplotlib

from bench.drive import Result
from bench.report import COLUMNS, medians

PANELS = {
    "durable": "save: until durable, s",
    "stall": "save: until the trainer may go on, s",
    "save_extra_bytes": "save: extra memory, MB",
    "load_cold": "load, cold, s",
    "load_warm": "load, warm, s",
    "one_cold": "one tensor of the whole, cold, ms",
}
OUR_COLOUR, PEER_COLOUR = "#1b7f5c", "#b8bec4"


def draw(results: dict[str, Result], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = [column for key in PANELS for column in COLUMNS if column.key == key]
    shown = list(reversed([result for result in results.values() if result.values]))
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 8), sharey=True, layout="constrained")
    for axis, column in zip(axes.flat, columns, strict=True):
        for row, result in enumerate(shown):
            values = [value / column.unit for value in result.values.get(column.key, [])]
            if not values:
                continue
            middle = medians(result)[column.key] / column.unit
            axis.barh(row, middle, color=OUR_COLOUR if result.is_ours else PEER_COLOUR)
            axis.plot(values, [row] * len(values), ".", color="black", markersize=4)
            axis.annotate(f" {middle:.{column.digits}f}", (max(values), row), va="center", fontsize=8)
        axis.set_title(PANELS[column.key], fontsize=10)
        axis.set_yticks(range(len(shown)), [result.title for result in shown])
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Medians, with every round as a dot; less is better", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
