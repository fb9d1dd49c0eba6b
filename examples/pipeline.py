"""An interleaved pipeline: each rank holds several chunks of the model, and gives them to one role as a list.

    torchrun --nproc-per-node 2 examples/pipeline.py runs/pipeline
    torchrun --nproc-per-node 4 examples/pipeline.py runs/pipeline
    python examples/pipeline.py runs/pipeline

Four chunks, dealt to the ranks in turn: of two ranks the first has the chunks 0 and 2, the second 1 and 3. The names of a
list's parts are united, so the layers must have the names that they have in the whole model: `model.layers.5.weight`, by
the layer's number in the model and not in its chunk. Then it does not matter who holds which layer: the same command goes on
with one, two or four ranks, and `holdfast.load` gives the whole model to a program that knows of no pipeline.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

import holdfast

LAYERS, CHUNKS, WIDTH = 8, 4, 32
ROWS, MICROBATCHES = 32, 4


class Chunk(nn.Module):
    """Some layers of the model. A ModuleDict keeps their numbers; a list would begin at 0 in each chunk."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in layers:
            torch.manual_seed(number)  # the same weights, whoever holds the layer
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.flip(1)


class Pipeline:
    """The chunks of this rank, and one training step through all of them."""

    def __init__(self, rank: int, world: int) -> None:
        if CHUNKS % world:
            raise SystemExit(f"{CHUNKS} chunks cannot be dealt to {world} ranks")
        per_chunk = LAYERS // CHUNKS
        numbers = range(rank, CHUNKS, world)
        self.chunks = [Chunk(range(n * per_chunk, (n + 1) * per_chunk)) for n in numbers]
        self.is_first, self.is_last = rank == 0, rank == world - 1
        self._schedule = None
        if world > 1:
            stages = [PipelineStage(c, n, CHUNKS, torch.device("cpu")) for c, n in zip(self.chunks, numbers, strict=True)]
            if len(stages) > 1:
                self._schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
            else:
                self._schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)

    def step(self, x: Tensor, y: Tensor) -> float | None:
        """Leaves gradients; the loss, on the rank of the last chunk."""
        losses: list[Tensor] = []
        if self._schedule is None:
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                for chunk in self.chunks:
                    part = chunk(part)
                losses.append(nn.functional.mse_loss(part, target))
                (losses[-1] / MICROBATCHES).backward()
        else:
            inputs = (x,) if self.is_first else ()
            self._schedule.step(*inputs, target=y if self.is_last else None, losses=losses if self.is_last else None)
        return torch.stack(losses).mean().item() if self.is_last else None


def main(run: str, total: int, every: int) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    pipeline = Pipeline(rank, world)
    parameters = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    progress = {"samples": 0}

    state = holdfast.State(model=pipeline.chunks, optimizer=optimizer, progress=progress, rng="reseed")
    policy = {"save": holdfast.Every(steps=every), "keep": holdfast.Keep(last=3)}
    with holdfast.Checkpointer(run, state, **policy, deadline="60s") as ckpt:
        start = ckpt.resume()
        layers = [number for chunk in pipeline.chunks for number in chunk.layers]
        print(f"rank {rank} of {world} resumed from step {start} of {total} with the layers {' '.join(layers)}", flush=True)
        for step in range(start, total):
            loss = pipeline.step(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
            progress["samples"] += ROWS
            if loss is not None:
                print(f"step {step + 1} loss {loss:.6f}", flush=True)
            ckpt.step(step + 1, metrics={} if loss is None else {"loss": loss})  # from whichever rank has it
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/pipeline", help="the directory of the run, new or not")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    asked = parser.parse_args()
    main(asked.run, asked.steps, asked.every)
