"""Evaluation beside training: another process takes each new step, loads its weights alone, and notes what it measured.

    python examples/evaluate.py runs/evaluated

It starts a little trainer in the background, so that there is something to wait for. The two share nothing but the
directory. The trainer keeps only its last two steps; `hold` makes it spare the one that is being read. The optimizer's
state is not read: `State(model=model)` asks for nothing else. `note` adds the score to the step, `best` finds by it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import holdfast

TOTAL = 60


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed)) * 6.28
    return x, x.sin()


def train(run: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = holdfast.State(model=model, optimizer=optimizer)
    with holdfast.Checkpointer(run, state, save=holdfast.Every(steps=10), keep=holdfast.Keep(last=2)) as ckpt:
        for step in range(ckpt.resume(), TOTAL):
            x, y = points(64, seed=step)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step + 1, metrics={"loss": loss.item()})
            time.sleep(0.05)  # a real step takes a while


def evaluate(run: holdfast.Run) -> None:
    """Score the newest step, and again when there is a newer one, until the last."""
    model = build()
    x, y = points(1000, seed=-1)
    done = None
    while done != TOTAL:
        step = run.wait(after=done, timeout=60).step
        try:
            with run.hold(step):
                ledger = holdfast.restore(run.path, holdfast.State(model=model, rng=False), step=step)
                with torch.no_grad():
                    score = nn.functional.mse_loss(model(x), y).item()
                run.note(step, {"held_out": score})
        except holdfast.NoCheckpoint:
            continue  # it was pruned before it could be held, so there is a newer one
        print(f"step {step}: {len(ledger.filled)} tensors loaded, held-out loss {score:.4f}", flush=True)
        done = step


def main(run_directory: Path) -> None:
    run = holdfast.Run(run_directory)
    trainer = subprocess.Popen([sys.executable, __file__, "--train", str(run_directory)])
    try:
        evaluate(run)
    finally:
        trainer.wait(timeout=60)
    best = run.best("held_out")
    assert best is not None
    print(f"the best of the steps still there is {best.step}: {best.metrics}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", type=Path, default="runs/evaluated", help="the directory of a new run")
    parser.add_argument("--train", action="store_true", help="be the trainer, not the evaluator")
    asked = parser.parse_args()
    (train if asked.train else main)(asked.run)
