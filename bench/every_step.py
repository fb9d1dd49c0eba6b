"""The command `python -m bench.every_step`: what it costs to save every step of a small model.

One process trains; stretches in which each step is saved take turns with stretches in which none is. The state is sized so that
its bytes a step are a given share of what the disk writes meanwhile. Prints the ratio of the medians, how many steps were saved
and how many were left out for want of memory.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import holdfast
from bench.machine import describe


def stretch(steps: int, first: int, train: object, ckpt: holdfast.Checkpointer | None) -> tuple[float, int]:
    """Seconds of so many steps, and how many of them were left out."""
    left_out = 0
    start = time.perf_counter()
    for step in range(first, first + steps):
        train()  # type: ignore[operator]
        if ckpt is not None:
            left_out += ckpt.step(step) is None
    return time.perf_counter() - start, left_out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.every_step", description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="that are saved, in all")
    parser.add_argument("--stretch", type=int, default=50)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(given.width, given.width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randn(1024, given.width)

    def train() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    directory = Path(tempfile.mkdtemp(dir=given.directory))
    machine = describe(directory)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    left_out, step = 0, 1
    try:
        state = holdfast.State(model=model, optimizer=optimizer)
        with holdfast.Checkpointer(directory / "run", state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=3)) as ckpt:
            ckpt.resume()
            for number in range(-1, given.steps // given.stretch):
                taken, missed = stretch(given.stretch, step, train, ckpt)
                step += given.stretch
                ckpt.save().wait("durable", 60)
                alone, _ = stretch(given.stretch, step, train, None)
                if number >= 0:  # the first one makes the memory
                    seconds["with"].append(taken / given.stretch)
                    seconds["without"].append(alone / given.stretch)
                    left_out += missed
        nbytes = holdfast.Run(directory / "run").latest().nbytes  # type: ignore[union-attr]
    finally:
        shutil.rmtree(directory)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    found = {
        "machine": machine,
        "bytes": nbytes,
        "ms_a_step": {name: 1e3 * value for name, value in medians.items()},
        "throughput": medians["without"] / medians["with"],
        "bytes_a_second": nbytes / medians["with"],
        "saved": given.steps - left_out,
        "left_out": left_out,
    }
    print(json.dumps(found, indent=2, default=str))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
