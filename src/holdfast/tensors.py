"""Tensors as bytes: reading any tensor's row-major bytes in ranges, and writing such ranges back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from .errors import Unsupported
from .format.digest import LogicalDigest, element_bits
from .format.dtypes import dtype
from .format.index import MAX_NDIM

Bytes = Any


def dtype_name(tensor: torch.Tensor) -> str:
    """The stored name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype stored as `name`.

    Raises:
        Unsupported: this torch does not have it.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise Unsupported(f"torch {torch.__version__} has no dtype {name}; load it with a newer one")
    return found


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it belongs to a lazy module that has not run yet."""
    return isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer))


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Raises:
    Unsupported: the tensor has no plain row-major bytes.
    """
    why = None
    if tensor.layout != torch.strided:
        why = f"has layout {tensor.layout}; make it dense"
    elif tensor.is_quantized:
        why = "is quantized; hold its integers, scale and zero point"
    elif tensor.device.type == "meta":
        why = "is on the meta device and has no bytes; materialise the model first"
    elif tensor.ndim > MAX_NDIM:
        why = f"has {tensor.ndim} dimensions; the format holds {MAX_NDIM}"
    elif is_lazy(tensor):
        why = "is not initialised yet; run the lazy module once"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and hasattr(tensor, "__tensor_flatten__"):
        why = f"is a {type(tensor).__name__}, which this version does not store; give its local tensor or a plain one"
    if why:
        raise Unsupported(f"{name} {why}")
    try:
        dtype(dtype_name(tensor))
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from None


def byte_view(tensor: torch.Tensor) -> np.ndarray | None:
    """A contiguous CPU tensor's memory as uint8, writable and shared; None for any other tensor."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return as_flat(tensor).view(torch.uint8).numpy()


def as_flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as 1-D with stride 1, whatever strides its dimensions of size one have."""
    return tensor.as_strided((tensor.numel(),), (1,))


def from_bytes(raw: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Raw bytes as a 1-D tensor that shares their memory."""
    return torch.from_numpy(raw).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements lie at one place, as after `expand`."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class TensorSource:
    """The row-major bytes of a tensor, wherever and however it lies. Holds no copy of it.

    What is not contiguous, or not in host memory, is copied slab by slab, with at most a few rows more than was asked for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._bytes = byte_view(tensor)
        self.nbytes = tensor.numel() * tensor.element_size()

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor, without its history."""
        return self._tensor

    def view(self, start: int, nbytes: int) -> np.ndarray | None:
        """The bytes themselves, where they lie in memory in this order."""
        return None if self._bytes is None else self._bytes[start : start + nbytes]

    def copy_into(self, start: int, out: np.ndarray) -> None:
        if self._bytes is not None:
            np.copyto(out, self._bytes[start : start + len(out)])
            return
        size = self._tensor.element_size()
        first, last = start // size, -(-(start + len(out)) // size)
        flat = _flat_range(self._tensor, first, last)
        skip = start - first * size
        raw = as_flat(flat.resolve_conj().resolve_neg().cpu().contiguous()).view(torch.uint8).numpy()
        np.copyto(out, raw[skip : skip + len(out)])


def write_flat(target: torch.Tensor, start: int, flat: torch.Tensor) -> None:
    """Put the 1-D `flat` into `target` from its row-major element `start` on, with a cast where the dtypes differ.

    A device fetches it in the current stream: `flat` must stay as it is until then.
    """
    target = target.detach()
    while not target.is_contiguous() and target.ndim and target.shape[0] == 1:
        target = target[0]
    if target.is_contiguous():
        as_flat(target)[start : start + len(flat)].copy_(flat, non_blocking=True)
        return
    row = target[0].numel()
    at = 0
    while at < len(flat):
        inside = (start + at) % row
        rows = (len(flat) - at) // row if inside == 0 else 0
        number = (start + at) // row
        if rows:
            part = flat[at : at + rows * row].view(rows, *target.shape[1:])
            target[number : number + rows].copy_(part, non_blocking=True)
            at += rows * row
        else:
            part = flat[at : at + row - inside]
            write_flat(target[number], inside, part)
            at += len(part)


def _flat_range(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Row-major elements `first` to `last` of a tensor, as 1-D."""
    while tensor.ndim and tensor.shape[0] == 1:
        tensor = tensor[0]
    if not tensor.ndim or tensor.is_contiguous():
        return tensor.reshape(-1)[first:last]
    row = tensor[0].numel()
    low, high = first // row, -(-last // row)
    if high - low == 1 and tensor.ndim > 1:
        return _flat_range(tensor[low], first - low * row, last - low * row)
    return tensor[low:high].reshape(-1)[first - low * row : last - low * row]


def await_devices(tensors: Iterable[torch.Tensor]) -> None:
    """Return when what was given to the current streams of the tensors' devices is done: other threads have other streams."""
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def logical_digest(tensor: torch.Tensor) -> str:
    """The logical digest of a live tensor, as `Checkpoint.digest` gives it for a stored one."""
    source = TensorSource(tensor)
    raw = np.empty(source.nbytes, np.uint8)
    source.copy_into(0, raw)
    result = LogicalDigest(dtype_name(tensor), tuple(tensor.shape))
    result.add(element_bits(raw, tensor.element_size()), 0)
    return result.hex()
