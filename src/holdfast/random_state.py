"""The states of the global random generators: as a process has them, or as one of several streams.

Streams belong to ranks, or to data-parallel ranks, so that ranks that compute the same draw the same. A stream is a few tensors
of bytes. What cannot be mapped to another number of ranks is refused, unless the rule is to derive new streams from the old.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .errors import Refused
from .live import Live, LiveValue
from .per_rank import PerRank
from .tree import Leaf

MODES = (True, False, "replicated", "data", "rank", "reseed")
_DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")
"""Names, or beginnings of names, of the mesh dimensions whose ranks see other samples."""
_PYTHON = struct.Struct("<625I?d")
_NUMPY = struct.Struct("<624Iq?d")


class Streams(PerRank):
    """The generators' states, one stream for each rank.

    Args:
        reseed: whether another number of ranks derives new streams from the stored ones.
    """

    def __init__(self, reseed: bool = False) -> None:
        super().__init__({}, derive if reseed else None)

    def state(self) -> Any:
        return stream()

    def load(self, state: Any) -> None:
        set_stream(state)


class DataStreams(Streams):
    """One stream for each data-parallel rank: ranks that see the same samples hold the same.

    Args:
        mesh: a DeviceMesh with names.
    """

    axis = "data"

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        names = getattr(mesh, "mesh_dim_names", None)
        if not names:
            raise Refused('State(rng="data") needs mesh=, a DeviceMesh whose dimensions have names')
        dims = [i for i, name in enumerate(names) if name.startswith(_DATA)]
        ranks = mesh.mesh.numpy()
        numbers = np.zeros(ranks.shape, np.int64)
        for dim in dims:
            numbers = numbers * ranks.shape[dim] + np.indices(ranks.shape)[dim]
        self._names, self._count = names, math.prod(ranks.shape[dim] for dim in dims)
        self._numbers = dict(zip(ranks.reshape(-1).tolist(), numbers.reshape(-1).tolist(), strict=True))

    def place(self, rank: int, position: int, world: int) -> tuple[int, int]:
        if rank not in self._numbers:
            raise Refused(f'State(rng="data"): rank {rank} is not in the mesh {self._names}')
        return self._numbers[rank], self._count


def add_random_generators(live: Live, mode: bool | str, mesh: Any, role: str = "rng") -> PerRank | None:
    """Add the states of Python's, numpy's, torch's CPU and CUDA's global generators; or return the part that holds them."""
    if mode == "data":
        return DataStreams(mesh)
    if mode in ("rank", "reseed") or (mode is True and live.world > 1):
        return Streams(mode == "reseed")
    live.roles[role] = "rng"
    live.values[f"{role}.python"] = LiveValue(f"{role}.python", (role, "python"), role, random.getstate(), random.setstate)
    plain = _numpy_state()
    plain["state"]["key"] = plain["state"]["key"].tolist()
    live.values[f"{role}.numpy"] = LiveValue(f"{role}.numpy", (role, "numpy"), role, plain, _set_numpy)
    live.add_leaf(Leaf((role, "torch"), torch.get_rng_state(), torch.set_rng_state), role)
    if _has_cuda():
        for device in range(torch.cuda.device_count()):
            live.add_leaf(Leaf((role, f"cuda{device}"), torch.cuda.get_rng_state(device), _cuda_setter(device)), role)
    return None


def stream() -> dict[str, torch.Tensor]:
    """The states of this process's generators as tensors of bytes; of CUDA the current device's."""
    _, words, gauss = random.getstate()
    state = _numpy_state()
    found = {
        "python": _bytes(_PYTHON.pack(*words, gauss is not None, gauss or 0.0)),
        "numpy": _bytes(
            _NUMPY.pack(*state["state"]["key"].tolist(), state["state"]["pos"], bool(state["has_gauss"]), state["gauss"])
        ),
        "torch": torch.get_rng_state(),
    }
    return found | ({"cuda": torch.cuda.get_rng_state()} if _has_cuda() else {})


def set_stream(state: dict[str, torch.Tensor]) -> None:
    """Give the generators of this process the states of a stream."""
    *words, has_gauss, gauss = _PYTHON.unpack(bytes(state["python"].tolist()))
    random.setstate((3, tuple(words), gauss if has_gauss else None))
    *key, position, has_gauss, gauss = _NUMPY.unpack(bytes(state["numpy"].tolist()))
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, int(has_gauss), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and _has_cuda():
        torch.cuda.set_rng_state(state["cuda"])


def derive(states: Sequence[Any], rank: int, world: int) -> dict[str, torch.Tensor]:
    """A new stream for `rank` of `world`, from all the old ones: another one for each rank, the same at each resume."""
    running = hashlib.blake2b(f"{rank} of {world}".encode(), digest_size=8)
    for state in states:
        for name in sorted(state):
            value = state[name]
            running.update(f"{name}:".encode())
            running.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    seed = int.from_bytes(running.digest(), "little")
    _, words, _ = random.Random(seed).getstate()
    legacy = np.random.RandomState(seed % 2**32).get_state(legacy=False)
    assert isinstance(legacy, dict)
    found = {
        "python": _bytes(_PYTHON.pack(*words, False, 0.0)),
        "numpy": _bytes(_NUMPY.pack(*legacy["state"]["key"].tolist(), legacy["state"]["pos"], False, 0.0)),
        "torch": torch.Generator().manual_seed(seed % 2**63).get_state(),
    }
    return found | ({"cuda": torch.Generator("cuda").manual_seed(seed % 2**63).get_state()} if _has_cuda() else {})


def _has_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    assert isinstance(state, dict)
    return {**state, "state": dict(state["state"])}


def _set_numpy(state: Any) -> None:
    key = np.array(state["state"]["key"], np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})


def _cuda_setter(device: int) -> Callable[[torch.Tensor], None]:
    return lambda state: torch.cuda.set_rng_state(state, device)
