"""Pretraining under FSDP2 and tensor parallelism; the same command goes on under another layout, on another number of ranks.

    torchrun --nproc-per-node 4 examples/fsdp_tp.py runs/gpt
    torchrun --nproc-per-node 2 examples/fsdp_tp.py runs/gpt

Four ranks make a mesh of 2 x 2: FSDP over one dimension, tensor parallelism over the other. Two ranks are FSDP alone, and
three cut the tensors unevenly. Nothing below says so to holdfast: every rank gives what it has, each tensor is stored under
its name in global coordinates, and a rank that loads takes the parts that it now holds.

The position in the data is one number for the whole job, so that another number of ranks goes on with the very next sample.
The random generators belong to each rank; `rng="reseed"` says that another number of ranks may derive new ones from them.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.data import Loader, Sampler

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 48, 4, 2
GLOBAL_BATCH = 24
"""Samples of a step, on however many ranks."""


class Texts(Dataset[Tensor]):
    """Sequences with a rule in them: each token is the one before it plus a stride, which differs from text to text."""

    def __len__(self) -> int:
        return 4800

    def __getitem__(self, number: int) -> Tensor:
        start, stride = number % VOCABULARY, number // VOCABULARY % 5 + 1
        return (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY


class Block(nn.Module):
    """Attention and a feed-forward net. A tensor-parallel rank computes the heads that its projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Gives the loss of its predictions. The output layer is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def mesh_of(world: int) -> DeviceMesh:
    """Tensor parallelism of 2 where four ranks or more are an even number, and FSDP over the rest."""
    tp = 2 if world >= 4 and world % 2 == 0 else 1
    return init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))


def parallelise(model: Gpt, mesh: DeviceMesh) -> Gpt:
    if mesh["tp"].size() > 1:
        gathered = {"input_layouts": Replicate(), "output_layouts": Replicate()}
        columns, rows = ColwiseParallel(), RowwiseParallel()
        for block in model.blocks:
            plan = {"q": columns, "k": columns, "v": columns, "o": rows, "up": columns, "down": rows}
            parallelize_module(block, mesh["tp"], plan)
        parallelize_module(model, mesh["tp"], {"tokens": RowwiseParallel(**gathered), "head": ColwiseParallel(**gathered)})
        model.head.weight = model.tokens.weight  # each was cut by itself, and they are one tensor
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def main(run: str, total: int, every: int) -> None:
    dist.init_process_group("gloo")
    mesh = mesh_of(dist.get_world_size())
    dp, tp = mesh.shape
    torch.manual_seed(0)
    model = parallelise(Gpt(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    texts = Texts()
    sampler = Sampler(texts, batch_size=GLOBAL_BATCH // dp, rank=mesh.get_local_rank("dp"), world=dp)
    data = Loader(DataLoader(texts, batch_sampler=sampler))

    state = holdfast.State(model=model, optimizer=optimizer, scheduler=scheduler, data=data, rng="reseed")
    policy = {"save": holdfast.Every(steps=every), "keep": holdfast.Keep(last=3)}
    with holdfast.Checkpointer(run, state, **policy, deadline="60s") as ckpt:
        step = ckpt.resume()
        say(f"resumed from step {step} of {total} on {dp} x {tp} ranks, at sample {data.position}")
        while step < total:
            for tokens in data:  # the rest of an epoch
                loss = model(tokens)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                mean = mean_over(loss, mesh["dp"])
                say(f"step {step} loss {mean:.6f}")
                ckpt.step(step, metrics={"loss": mean})
                if step == total:
                    break
    say(f"finished at step {total}, at sample {data.position}")
    dist.destroy_process_group()


def mean_over(loss: Tensor, mesh: DeviceMesh) -> float:
    """Of the data-parallel ranks' losses."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total.item() / mesh.size()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="runs/gpt", help="the directory of the run, new or not")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    asked = parser.parse_args()
    main(asked.run, asked.steps, asked.every)
