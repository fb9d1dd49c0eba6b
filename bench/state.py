"""The state that every method saves: a GPT and its AdamW, in memory that all workers share.

The tensors of one state lie in one anonymous shared segment (a memfd) that each worker maps, so that ten methods need
one copy. Each tensor has a storage of its own, which starts and ends with the tensor: several libraries treat views of
one large storage differently. The mapping is populated at once, since the first touch of memory is slow.
"""

import mmap
import os
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes; what torch's own CPU allocator gives."""


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    vocabulary: int
    positions: int


SIZES = {
    "full": Size(layers=24, width=768, vocabulary=32768, positions=1024),
    "small": Size(layers=2, width=256, vocabulary=1024, positions=128),
}


@dataclass(frozen=True)
class Segment:
    """Where the shared memory is: a descriptor of the process that made it, which outlives the workers."""

    pid: int
    descriptor: int
    nbytes: int

    def map(self) -> mmap.mmap:
        opened = os.open(f"/proc/{self.pid}/fd/{self.descriptor}", os.O_RDWR)
        try:
            return mmap.mmap(opened, self.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(opened)


class PrivateSegment(Segment):
    """Memory of one process alone, for a library whose snapshot is a fork: a child sees shared memory change."""

    @classmethod
    def like(cls, segment: Segment) -> "PrivateSegment":
        return cls(os.getpid(), -1, segment.nbytes)

    def map(self) -> mmap.mmap:
        return mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class GPT(nn.Module):
    """The parameters of a GPT whose output layer is its embedding. There is no forward: nothing here trains."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.positions, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.last = nn.LayerNorm(size.width)


def layout(size: Size) -> tuple[dict[str, tuple[torch.Size, int]], int]:
    """Shape and offset of each tensor by name, and the bytes of the whole segment."""
    with torch.device("meta"):
        model = GPT(size)
    places: dict[str, tuple[torch.Size, int]] = {}
    end = 0
    for name, parameter in model.named_parameters():
        for tensor, shape in (
            (f"model.{name}", parameter.shape),
            (f"optimizer.{name}.exp_avg", parameter.shape),
            (f"optimizer.{name}.exp_avg_sq", parameter.shape),
            (f"optimizer.{name}.step", torch.Size()),
        ):
            places[tensor] = (shape, end)
            end += -(-4 * shape.numel() // ALIGNMENT) * ALIGNMENT
    return places, end


def probe(size: Size) -> str:
    """The tensor that is read alone. It has 7.1 MB at full size: the nearest above 4 MB."""
    return f"model.blocks.{size.layers // 2}.qkv.weight"


def new_segment(size: Size) -> Segment:
    _, nbytes = layout(size)
    descriptor = os.memfd_create("bench-state")
    os.truncate(descriptor, nbytes)
    return Segment(os.getpid(), descriptor, nbytes)


class TrainingState:
    """A model and its optimizer over a segment: what a trainer holds between two steps."""

    def __init__(self, size: Size, segment: Segment) -> None:
        self.size, self.segment = size, segment
        self._mapping = segment.map()
        places, _ = layout(size)
        self.tensors: dict[str, Tensor] = {name: self._tensor(shape, offset) for name, (shape, offset) in places.items()}
        """Each tensor of the model and of the optimizer, by its full name; views of nothing but themselves."""
        with torch.device("meta"):
            self.model = GPT(size)
        self.model.load_state_dict(self.part("model."), assign=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1)
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                kind: self.tensors[f"optimizer.{name}.{kind}"] for kind in ("step", "exp_avg", "exp_avg_sq")
            }
        self.probe = probe(size)

    def _tensor(self, shape: torch.Size, offset: int) -> Tensor:
        return torch.frombuffer(self._mapping, dtype=torch.float32, count=shape.numel(), offset=offset).view(shape)

    def part(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def fill(self) -> None:
        """The same values at each call: random, so that nothing below can compress or skip them."""
        random = torch.Generator().manual_seed(20)
        for name, tensor in self.tensors.items():
            if name.endswith(".step"):
                tensor.fill_(1000.0)
            elif name.endswith(".exp_avg_sq"):
                tensor.normal_(0.0, 1e-4, generator=random).square_()
            else:
                tensor.normal_(0.0, 2e-2, generator=random)

    def advance(self) -> str:
        """Change every element, as an optimizer step does, so that no method can pass over what it saved before.

        Returns the new digest.
        """
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.view(torch.int32).add_(1)
        return self.digest()

    def clear(self) -> None:
        """Zero every byte in place: what a load must then bring back."""
        torch.frombuffer(self._mapping, dtype=torch.uint8).zero_()

    def digest(self) -> str:
        """xxh3-128 of all bytes in order, hex: equal means bit-equal, and loaded into these very tensors."""
        return xxhash.xxh3_128_hexdigest(memoryview(self._mapping))
