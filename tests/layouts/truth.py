"""What a job holds, found with torch alone: whole tensors out of a job, and whole tensors into one, by hand.

Nothing here uses holdfast, so that its answers have something to be compared with. Names are spelled as holdfast does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from .jobs import Job, unwrapped
from .zero import Slot, ZeroJob

Tensors = dict[str, torch.Tensor]


def live_tensors(job: Job) -> Tensors:
    """Every tensor of the model and the optimizer on this rank, by logical name; sharded ones as DTensors, or slots."""
    if isinstance(job, ZeroJob):
        return job.live_tensors()
    found: Tensors = {}
    for model in map(unwrapped, job.models):
        found |= {f"model.{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    for name, parameter in _parameters(job).items():
        for key, value in job.optimizer.state.get(parameter, {}).items():
            found[f"optimizer.{name}.{key}"] = value
    return found


def whole_tensors(job: Job) -> Tensors:
    """The same, gathered: copies. A collective of the ranks that share a tensor's mesh."""
    with torch.no_grad():
        return {
            name: (t.full_tensor() if isinstance(t, (DTensor, Slot)) else t).detach().clone()
            for name, t in live_tensors(job).items()
        }


def unite(ranks: list[Tensors]) -> Tensors:
    """The tensors of all ranks.

    Raises:
        AssertionError: two ranks that hold one name do not hold the same bits.
    """
    united: Tensors = {}
    for rank, tensors in enumerate(ranks):
        for name, tensor in tensors.items():
            assert name not in united or same_bits(united[name], tensor), f"{name} of rank {rank} is not what lower ranks have"
            united.setdefault(name, tensor)
    return united


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    raw = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*raw)


def put_whole(job: Job, tensors: Tensors, hyper: dict[str, Any]) -> None:
    """Give a job the state of another, from its whole tensors and what is not a tensor (`hyper_of` that job)."""
    with torch.no_grad():
        job.put_tensors(tensors) if isinstance(job, ZeroJob) else _put_tensors(job, tensors)
    job.scheduler.load_state_dict(hyper["scheduler"])
    job.progress.update(hyper["progress"])
    for alike, settings in zip(job.groups, hyper["groups"], strict=True):
        for group in alike:
            group.update(settings)


def _put_tensors(job: Job, tensors: Tensors) -> None:
    for model in map(unwrapped, job.models):
        for name, tensor in model.state_dict(keep_vars=True).items():
            local_of(tensor).copy_(part_of(tensors[f"model.{name}"], tensor))
    for name, parameter in _parameters(job).items():
        moments = {key: _moment(tensors[f"optimizer.{name}.{key}"], parameter) for key in ("exp_avg", "exp_avg_sq")}
        job.optimizer.state[parameter] = {"step": tensors[f"optimizer.{name}.step"].clone(), **moments}


def hyper_of(job: Job) -> dict[str, Any]:
    """What a job's state has besides tensors.

    Raises:
        AssertionError: groups that should have the same settings do not.
    """
    groups = []
    for alike in job.groups:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in alike]
        assert all(one == settings[0] for one in settings), settings
        groups.append(settings[0])
    return {"scheduler": job.scheduler.state_dict(), "progress": dict(job.progress), "groups": groups}


def local_of(tensor: torch.Tensor | Slot) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, (DTensor, Slot)) else tensor


def part_of(whole: torch.Tensor, like: torch.Tensor | Slot) -> torch.Tensor:
    """This rank's part of a whole tensor, laid out as `like` is.

    Cut by the placements from the right: where FSDP and tensor parallelism cut one dimension, tensor parallelism cut it first.
    """
    if isinstance(like, Slot):
        return like.part_of(whole)
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()  # not `get_local_rank`, which is that of a group whose ranks torch has sorted
    assert coordinate is not None
    for dimension in reversed(range(mesh.ndim)):
        placement = like.placements[dimension]
        if isinstance(placement, Replicate):
            continue
        cut: int = placement.dim  # type: ignore[attr-defined]
        assert type(placement) is Shard or any(p.is_shard(cut) for p in like.placements[dimension + 1 :])
        chunks = whole.chunk(mesh.size(dimension), cut) if whole.shape[cut] else ()
        at = coordinate[dimension]
        whole = chunks[at] if at < len(chunks) else whole.narrow(cut, 0, 0)
    return whole


def _moment(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(parameter, dtype=whole.dtype)
    local_of(made).copy_(part_of(whole, parameter))
    return made


def _parameters(job: Job) -> dict[str, nn.Parameter]:
    """Trained parameters by logical name; tied ones once, under the first."""
    found: dict[str, nn.Parameter] = {}
    for model in map(unwrapped, job.models):
        found |= {f"model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    return found
