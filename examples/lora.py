"""Fine-tuning with adapters: the base comes from elsewhere, is frozen, and is stored once.

    python examples/lora.py runs/lora

A new run begins with the base that `init=` names, here a directory of safetensors. It has no adapters, so their names
are waived; anything else that is missing would be an error. Each checkpoint is whole, base included, and can be loaded
alone; yet the base's bytes are on disk only once: what has not changed since an earlier step is not written again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import holdfast

WIDTH, LAYERS, RANK, STEPS = 512, 6, 4, 40


class LoraLinear(nn.Linear):
    """A linear layer whose own weight is frozen, plus a trained product of two thin matrices."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, width)
        self.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.lora_b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T


def make_base(directory: Path) -> dict[str, Tensor]:
    """What another training would have left: plain layers, in a file of safetensors."""
    base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).state_dict()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(base, directory / "model.safetensors")
    return base


def written_bytes(run: Path) -> dict[str, int]:
    """The size of each step's own files."""
    return {step.name: sum(file.stat().st_size for file in step.iterdir()) for step in sorted((run / "steps").iterdir())}


def main(run: Path) -> None:
    torch.manual_seed(0)
    base_directory = run.with_name(run.name + "-base")
    base = make_base(base_directory)

    model = nn.Sequential(*(LoraLinear(WIDTH, RANK) for _ in range(LAYERS)))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    state = holdfast.State(model=model, optimizer=optimizer)
    init = holdfast.Init(f"hf:{base_directory}", waive=("model.*lora*",))
    with holdfast.Checkpointer(run, state, init=init, save=holdfast.Every(steps=10), keep=holdfast.Keep(last=4)) as ckpt:
        start = ckpt.resume()
        account = ckpt.ledger
        print(f"starting at step {start}: {len(account.filled)} names filled, {len(account.waived)} waived")
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in base.items())
        for step in range(start, STEPS):
            x = torch.randn(32, WIDTH)
            loss = nn.functional.mse_loss(model(x), x.flip(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(step + 1, metrics={"loss": loss.item()})

    sizes = written_bytes(run)
    for name, size in sizes.items():
        print(f"{name}: {size / 1e6:6.2f} MB written")
    first, *later = sizes.values()
    print(f"the later steps wrote {max(later) / first:.1%} of what the first wrote")

    stored = holdfast.load(run, select="model.0.*")["model"]
    print(f"the latest step, loaded alone, has base and adapters: {', '.join(sorted(stored))}")
    assert torch.equal(stored["0.weight"], base["0.weight"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "run", nargs="?", type=Path, default="runs/lora", help="the directory of the run; the base is made beside it"
    )
    main(parser.parse_args().run)
