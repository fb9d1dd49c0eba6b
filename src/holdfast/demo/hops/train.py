"""The training program of the hops: `torchrun --nproc-per-node 4 -m holdfast.demo.hops.train --data 2 --tensor 2 ...`.

An ordinary program. It is the same one for every layout, each rank gives holdfast what it has, and nothing below says how a
tensor that was saved under one layout gets into another. For the demo to look at, the ranks write down which samples they
read, and save what they resumed once more, in a run of its own, as the new layout holds it.

Without `--checkpoints` it trains without checkpoints: what the loss is compared with.
"""

from __future__ import annotations

import argparse
import datetime
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.data import Loader, Sampler
from holdfast.demo.data import standard_library
from holdfast.demo.hops.layout import BATCH, CONTEXT, SAMPLES, Layout
from holdfast.demo.hops.model import Llama, spread
from holdfast.demo.journal import Samples, Writer

PATIENCE_SECONDS = 60
"""For another rank, in training and in a save: one that waits longer ends with an error."""


class Windows(Dataset[tuple[int, Tensor]]):
    """Consecutive pieces of the text, each with its number."""

    def __init__(self) -> None:
        text = standard_library(SAMPLES * CONTEXT + 1)
        self.windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, self.windows[number]


class Training:
    """Everything that a step reads or changes, as this rank has it."""

    def __init__(self, layout: Layout, *, steps: int, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)  # all generators equal on all ranks: `rng="replicated"` below says so
        self.model, self.ranks, number = Llama(), layout.ranks, 0
        if layout.ranks > 1:
            mesh = init_device_mesh("cpu", (layout.data, layout.tensor), mesh_dim_names=("data", "tensor"))
            spread(self.model, mesh)
            number = mesh.get_local_rank("data")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        text = Windows()
        sampler = Sampler(text, batch_size=BATCH // layout.data, rank=number, world=layout.data, seed=seed)
        self.data = Loader(DataLoader(text, batch_sampler=sampler))
        self.state = holdfast.State(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.data, rng="replicated"
        )
        self._batches = self._endless()

    def read(self) -> tuple[list[int], Tensor]:
        """This rank's part of the next global batch: the numbers of the samples, and their tokens."""
        numbers, tokens = next(self._batches)
        return numbers.tolist(), tokens

    def step(self, tokens: Tensor) -> float:
        """One update; the loss of the global batch before it."""
        loss = cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        mean = loss.detach()
        if self.ranks > 1:
            dist.all_reduce(mean)  # all ranks read equally many samples
        return mean.item() / self.ranks

    def _endless(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Epoch after epoch; the first one from where the data is."""
        while True:
            yield from self.data


def checkpointed(training: Training, journal: Writer, samples: Samples, steps: int, run: Path, every: int, again: Path) -> None:
    with holdfast.Checkpointer(
        run, training.state, save=holdfast.Every(steps=every), keep=holdfast.Keep(last=3), on_failure="raise",
        deadline=PATIENCE_SECONDS,
    ) as ckpt:  # fmt: skip
        start = ckpt.resume()
        if start:
            holdfast.save(again, training.state, start, deadline=PATIENCE_SECONDS)
        journal.start(start)
        for step in range(start, steps):
            numbers, tokens = training.read()
            samples.read(step + 1, numbers)
            loss = training.step(tokens)
            journal.loss(step + 1, loss)
            ckpt.step(step + 1, metrics={"loss": loss})


def uninterrupted(training: Training, journal: Writer, samples: Samples, steps: int) -> None:
    journal.start(0)
    for step in range(steps):
        numbers, tokens = training.read()
        samples.read(step + 1, numbers)
        loss = training.step(tokens)
        journal.loss(step + 1, loss)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="holdfast.demo.hops.train", description=__doc__)
    parser.add_argument("--data", type=int, required=True)
    parser.add_argument("--tensor", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--samples", type=Path, required=True, help="a directory; each rank writes a file in it")
    parser.add_argument("--checkpoints", type=Path, help="the run")
    parser.add_argument("--again", type=Path, help="where what was resumed is saved once more")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args(argv)
    layout = Layout(asked.data, asked.tensor)
    if layout.ranks > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    rank = dist.get_rank() if layout.ranks > 1 else 0
    training = Training(layout, steps=asked.steps, seed=asked.seed)
    with Writer.on(rank, asked.journal) as journal, Samples(asked.samples / f"rank{rank}") as samples:
        if asked.checkpoints is None:
            uninterrupted(training, journal, samples, asked.steps)
        else:
            checkpointed(training, journal, samples, asked.steps, asked.checkpoints, asked.every, asked.again)
        journal.end(asked.steps, "-")
    if layout.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
