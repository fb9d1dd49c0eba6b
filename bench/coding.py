"""Time to durable with and without coding, on a store that is throttled and on one that is not: `python -m bench.coding`.

The state is real: the demo's model, larger, with AdamW after some steps of training. Each way of coding has a run of its own for
each rate; in each round the model trains one step, and then all save it, in an order that is drawn anew. What is reported is the
median over the rounds of each time, and of each time over that of raw in the same round.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import holdfast
from bench.machine import describe
from holdfast.api import state_contents
from holdfast.coding import Coder, coder_of
from holdfast.demo.data import Text, standard_library
from holdfast.demo.model import Shape, Transformer
from holdfast.run.session import Session
from holdfast.runs import Run
from holdfast.store.local import LocalStore
from holdfast.store.wrap import Limit
from holdfast.version import libraries

MODES = ("raw", "adaptive", "planes", "zstd")
RATES = {"100 MB/s": 100e6, "500 MB/s": 500e6, "unthrottled": None}
RESULTS = Path(__file__).parent / "results"
AT_MOST, AT_LEAST = 1.05, 1.15
"""The targets: adaptive over raw everywhere, and raw over adaptive at 100 MB/s."""


class Training:
    def __init__(self, shape: Shape, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Transformer(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = Text(standard_library(), context=shape.context, batch_size=4, seed=seed)
        self.state = holdfast.State(model=self.model, optimizer=self.optimizer)

    def step(self) -> float:
        inputs, targets = self.data.batch()
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


@dataclass
class Lane:
    """One way of coding at one rate: a run of its own, and what it took."""

    rate: str
    mode: str
    session: Session
    run: Run
    coder: Coder | None
    seconds: list[float] = field(default_factory=list)
    stored_bytes: list[int] = field(default_factory=list)
    codecs: list[dict[str, str]] = field(default_factory=list)

    def save(self, made: tuple[Any, str], step: int) -> None:
        gc.collect()
        start = time.perf_counter()
        done = self.session.save(made[0], step, kind=made[1], recycle=False, coding=self.coder)
        self.seconds.append(time.perf_counter() - start)
        self.stored_bytes.append(done.commit.new_bytes)
        self.codecs.append({str(of): choice.codec for of, choice in self.coder.choices.items()} if self.coder else {})
        self.run.prune(holdfast.Keep(last=1))

    def forget(self) -> None:
        self.seconds.clear()
        self.stored_bytes.clear()
        self.codecs.clear()


def lanes(directory: Path, rates: Sequence[str], modes: Sequence[str]) -> list[Lane]:
    made = []
    for rate in rates:
        limit = RATES[rate]
        for mode in modes:
            local = LocalStore(directory / f"{rate}-{mode}".replace("/", "-").replace(" ", "-"))
            store = Limit(local, limit) if limit else local
            made.append(Lane(rate, mode, Session(store, libraries()), Run(local), coder_of(mode)))
    return made


def measure(shape: Shape, made: list[Lane], warm_up: int, rounds: int) -> None:
    """Let all lanes save so many rounds. What the first `warm_up` of them took is not kept: the first save of all is raw."""
    training = Training(shape)
    for _ in range(10):
        training.step()
    order = random.Random(0)
    for number in range(1, warm_up + rounds + 1):
        loss = training.step()
        contents = state_contents(training.state, None)
        for lane in order.sample(made, len(made)):
            lane.save(contents, number)
            if number <= warm_up:
                lane.forget()
        print(f"round {number} of {warm_up + rounds}, loss {loss:.3f}", flush=True)


def summary(made: Sequence[Lane]) -> list[dict[str, Any]]:
    raw = {lane.rate: lane for lane in made if lane.mode == "raw"}
    return [
        {
            "rate": lane.rate,
            "mode": lane.mode,
            "seconds": statistics.median(lane.seconds),
            "over_raw": statistics.median(a / b for a, b in zip(lane.seconds, raw[lane.rate].seconds, strict=True)),
            "stored_over_raw": statistics.median(lane.stored_bytes) / statistics.median(raw[lane.rate].stored_bytes),
            "all_seconds": lane.seconds,
            "codecs": lane.codecs[-1],
        }
        for lane in made
    ]


def targets(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    adaptive = {row["rate"]: row["over_raw"] for row in rows if row["mode"] == "adaptive"}
    met = {f"adaptive takes at most {AT_MOST} of raw, {rate}": over <= AT_MOST for rate, over in adaptive.items()}
    slowest = adaptive.get("100 MB/s")
    return met | ({f"adaptive is {AT_LEAST} times as fast as raw at 100 MB/s": slowest <= 1 / AT_LEAST} if slowest else {})


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.coding", description=__doc__)
    parser.add_argument("--directory", type=Path, help="where the runs lie for the time; a temporary directory unless told")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="besides raw")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{time.strftime('%Y-%m-%d')}-coding.json")
    asked = parser.parse_args()
    logging.basicConfig(format="  %(message)s")
    logging.getLogger("holdfast").setLevel(logging.INFO)
    directory = Path(tempfile.mkdtemp(prefix="holdfast-coding-", dir=asked.directory))
    try:
        machine = describe(directory)
        made = lanes(directory, asked.rates, ["raw", *(mode for mode in asked.modes if mode != "raw")])
        measure(Shape(width=asked.width, heads=8, layers=asked.layers), made, asked.warm_up, asked.rounds)
    finally:
        shutil.rmtree(directory)
    rows = summary(made)
    met = targets(rows)
    print(f"{'store':<12} {'mode':<9} {'durable':>9} {'of raw':>7} {'bytes':>6}")
    for row in rows:
        print(
            f"{row['rate']:<12} {row['mode']:<9} {row['seconds']:>7.2f} s {row['over_raw']:>7.2f} {row['stored_over_raw']:>6.2f}"
        )
    for text, is_met in met.items():
        print(f"{'met   ' if is_met else 'MISSED'}  {text}")
    state = {"width": asked.width, "layers": asked.layers, "bytes": statistics.median(made[0].stored_bytes)}
    result = {"what": "coding", "machine": machine, "state": state, "rounds": asked.rounds, "rows": rows, "targets": met}
    asked.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
