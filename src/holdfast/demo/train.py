"""The training process of the demo: `python -m holdfast.demo.train --journal FILE [--run RUN] ...`.

An ordinary program. It resumes by itself, saves as it goes, and knows nothing of being killed. Without `--run` it does
the same training without any checkpoint: what the interrupted run must equal, bit by bit.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch.nn.functional import cross_entropy

import holdfast
from holdfast.demo.data import Text, standard_library
from holdfast.demo.journal import Writer
from holdfast.demo.model import Transformer

THREADS = 1
"""A sum depends on how it is split among threads, so every process splits it in the same way, on a machine of any size.
One, since two that wait for each other are many times slower where something else wants a core."""


class Training:
    """Everything that a step reads or changes."""

    def __init__(self, *, steps: int, seed: int) -> None:
        torch.set_num_threads(THREADS)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(seed)
        numpy.random.seed(seed)
        random.seed(seed)
        self.model = Transformer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.data = Text(standard_library(), context=self.model.shape.context, batch_size=8, seed=seed)
        self.state = holdfast.State(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, data=self.data)

    def step(self) -> float:
        """One update; the loss before it."""
        inputs, targets = self.data.batch()
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def uninterrupted(training: Training, journal: Writer, steps: int) -> None:
    journal.start(0)
    for step in range(steps):
        journal.loss(step + 1, training.step())
    journal.end(steps, training.state.digest())


def checkpointed(training: Training, journal: Writer, steps: int, run: Path, every: int) -> None:
    with holdfast.Checkpointer(
        run, training.state, save=holdfast.Every(steps=every), keep=holdfast.Keep(last=3), on_failure="raise"
    ) as ckpt:
        start = ckpt.resume()
        journal.start(start)
        for step in range(start, steps):
            loss = training.step()
            journal.loss(step + 1, loss)
            ckpt.step(step + 1, metrics={"loss": loss})
    journal.end(steps, training.state.digest())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="holdfast.demo.train", description=__doc__)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    asked = parser.parse_args(argv)
    training = Training(steps=asked.steps, seed=asked.seed)
    with Writer(asked.journal) as journal:
        if asked.run is None:
            uninterrupted(training, journal, asked.steps)
        else:
            checkpointed(training, journal, asked.steps, asked.run, asked.every)


if __name__ == "__main__":
    main()
