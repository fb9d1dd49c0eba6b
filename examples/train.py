"""The smallest training loop that resumes: end it at any moment, start it again, and it goes on where it was saved.

    python examples/train.py runs/sine

What makes it resume is the `State`, the `with`, the `resume()` in the `for` and the `step()` at its end. Everything
that changes while training is in the state: the model, the optimizer, the schedule, the position in the data; the state
of the random generators is there unasked.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import holdfast


def batch(position: int, size: int = 64) -> tuple[Tensor, Tensor]:
    """Points of a sine wave: a data set whose samples are a function of the position alone."""
    x = torch.rand(size, 1, generator=torch.Generator().manual_seed(position)) * 6.28
    return x, x.sin()


def main(run: str, total: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.02), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
    data = {"samples": 0}

    state = holdfast.State(model=model, optimizer=optimizer, scheduler=scheduler, data=data)
    with holdfast.Checkpointer(run, state, save=holdfast.Every(steps=20), keep=holdfast.Keep(last=3)) as ckpt:
        start = ckpt.resume()
        print(f"starting at step {start} of {total}")
        for step in range(start, total):
            x, y = batch(data["samples"])
            data["samples"] += len(x)
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            ckpt.step(step + 1, metrics={"loss": loss.item()})
    print(f"finished: the weights have the digest {holdfast.State(model=model, rng=False).digest()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/sine", help="the directory of the run, new or not")
    parser.add_argument("--steps", type=int, default=200, help="train until this step")
    asked = parser.parse_args()
    main(asked.run, asked.steps)
