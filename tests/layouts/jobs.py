"""Jobs: a model under a layout, its optimizer, and one training step. Data depends on the step only.

The loss of a step is this rank's own: it is compared with that of the same rank in another job of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .models import LENGTH, VOCABULARY, Model

ROWS = 12
"""Of a batch; 1, 2, 3 and 4 divide it."""


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a step, or a data-parallel rank's part of them."""
    drawn = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1000 + step))
    mine = drawn.chunk(parts)[part]
    return mine[:, :-1], mine[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Job:
    """What a rank holds."""

    models: list[nn.Module]
    """One, or several chunks of an interleaved pipeline."""
    forward_backward: Callable[[int], float]
    """Leaves gradients; returns the loss, 0 on ranks that do not have it."""
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.StepLR = field(init=False)
    progress: dict[str, Any] = field(default_factory=lambda: {"step": 0, "name": "matrix"})

    def __post_init__(self) -> None:
        self.optimizer = self.make_optimizer()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return adamw(*self.models)

    @property
    def roles(self) -> dict[str, Any]:
        """As `holdfast.State` takes them."""
        model = self.models[0] if len(self.models) == 1 else self.models
        return {"model": model, "optimizer": self.optimizer, "scheduler": self.scheduler, "progress": self.progress}

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def groups(self) -> list[list[dict[str, Any]]]:
        """Parameter groups; those of several optimizers that have the same settings together."""
        return [[group] for group in self.optimizer.param_groups]

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that the optimizers hold."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def train(self, steps: int) -> list[float]:
        """The losses of the next steps."""
        losses = []
        for _ in range(steps):
            self.progress["step"] += 1
            losses.append(self.forward_backward(self.progress["step"]))
            self.update()
        return losses

    def update(self) -> None:
        """Take a step with the gradients that there are, and drop them."""
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def is_tied(self) -> bool:
        """Whether the output layer still *is* the embedding, where both are held, for the optimizer too."""
        held = set(map(id, self.trained))
        lasts = [m for m in map(unwrapped, self.models) if getattr(m, "is_last", False)]
        return all(m.head.weight is m.embed.weight and id(m.head.weight) in held for m in lasts)


def adamw(*models: nn.Module) -> torch.optim.AdamW:
    """Over all that the models train, in a group of matrices and one of vectors."""
    named = dict(p for model in models for p in model.named_parameters() if p[1].requires_grad)
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, foreach=False)


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP or an engine of DeepSpeed's."""
    return model.module if isinstance(getattr(model, "module", None), Model) else model


def whole(model: nn.Module, part: int = 0, parts: int = 1) -> Job:
    """A job without stages, on its part of the batch."""

    def forward_backward(step: int) -> float:
        tokens, targets = batch(step, part, parts)
        loss = loss_of(model(tokens), targets)
        loss.backward()
        return loss.item()

    return Job([model], forward_backward)


def pipeline(chunks: Sequence[nn.Module | None], owners: Sequence[int], tie: Any, part: int = 0, parts: int = 1) -> Job:
    """A pipeline, one batch at a time.

    Args:
        chunks: in the order of the pipeline; None where another rank has it. owners: the rank of each.
        tie: the process group of the ranks that hold the embedding; its gradients are summed there.
    """
    me = dist.get_rank()
    held = [chunk for chunk in chunks if chunk is not None]

    def forward_backward(step: int) -> float:
        tokens, targets = batch(step, part, parts)
        shape = (*tokens.shape, 12)
        runs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for number, chunk in enumerate(chunks):
            if chunk is None:
                continue
            x = tokens if number == 0 else _received(shape, owners[number - 1]).requires_grad_()
            y = chunk(x)
            if number + 1 < len(chunks):
                dist.send(y.detach().contiguous(), owners[number + 1])
            runs.append((number, x, y))
        loss = 0.0
        for number, x, y in reversed(runs):
            if number + 1 == len(chunks):
                last = loss_of(y, targets)
                last.backward()
                loss = last.item()
            else:
                y.backward(_received(shape, owners[number + 1]))
            if number:
                assert x.grad is not None
                dist.send(x.grad.contiguous(), owners[number - 1])
        for model in held:
            if hasattr(model, "embed"):
                gradient = model.embed.weight.grad
                dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=tie)
        return loss

    assert all(owner == me for chunk, owner in zip(chunks, owners, strict=True) if chunk is not None)
    return Job(held, forward_backward)


def _received(shape: tuple[int, ...], source: int) -> torch.Tensor:
    tensor = torch.empty(shape)
    dist.recv(tensor, source)
    return tensor
