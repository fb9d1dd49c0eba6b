"""What all tests share: a state as awkward as real ones, equality of bits, a watch for what a test leaves behind."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

LARGE_ELEMENTS = (64 << 20) // 4 + 12_345
"""fp32 elements of the large tensor: more than one chunk of 64 MiB, and not a whole number of them."""

GRACE_SECONDS = 3.0
"""How long a test's children and shared memory may take to go away after it."""


os.environ.setdefault("HOLDFAST_SYNC", "1")
"""Most tests want a step to be durable when `step` returns; those of saving in the background use `in_background`."""


@pytest.fixture
def in_background(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Saves as users have them: in the background, by agents whose sockets lie in this directory; it ends the agents."""
    sockets = tmp_path / "agents"
    monkeypatch.delenv("HOLDFAST_SYNC")
    monkeypatch.setenv("HOLDFAST_AGENT_DIR", str(sockets))
    yield sockets
    for process in psutil.process_iter():
        if "holdfast.agent.serve" in (command := _command(process)) and str(sockets) in command:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# --- an awkward state -------------------------------------------------------------------------------------------------


def build_awkward_state(*, seed: int = 0, steps: int = 2, large: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its AdamW after `steps` real steps, and a dict of extras, with all that makes states hard to store.

    More than 300 tensors in float32, bfloat16, int64 and others; an output layer tied to the embedding; an empty, a
    scalar and a non-contiguous parameter; sizes that no number of ranks divides; views into one storage; NaNs with
    payloads. With `large`, a parameter above 64 MiB as well (and its two moments). Another seed gives other numbers of
    the same structure.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int, hidden: int) -> None:
            super().__init__()
            self.norm1 = nn.LayerNorm(width)
            self.norm2 = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, 3 * width)
            self.out = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, hidden)
            self.down = nn.Linear(hidden, width)
            self.adapter = nn.Parameter(torch.randn(width, 3).to(torch.bfloat16))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Any) -> Any:
            self.seen += 1
            q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
            x = x + self.out(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v)
            x = x + self.down(torch.relu(self.up(self.norm2(x))))
            return x + (x.to(torch.bfloat16) @ self.adapter @ self.adapter.T).to(x.dtype)

    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, hidden, vocabulary = 23, 37, 101
            self.embed = nn.Embedding(vocabulary, width)
            self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(8))
            self.norm = nn.BatchNorm1d(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.head.weight = self.embed.weight
            self.temperature = nn.Parameter(torch.tensor(1.25))
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.transposed = nn.Parameter(torch.randn(13, 7).t())
            self.frozen = nn.Parameter(torch.randn(11).to(torch.bfloat16), requires_grad=False)
            self.register_buffer("mask", torch.rand(3, 5, 7) > 0.5)
            self.register_buffer("table", torch.arange(17, dtype=torch.int64))
            self.register_buffer("not_kept", torch.ones(4), persistent=False)
            if large:
                self.large = nn.Parameter(torch.randn(LARGE_ELEMENTS))

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            x = self.norm(x.flatten(0, 1)).view_as(x)
            more = self.transposed.sum() + self.empty.sum() + (self.large[:: 1 << 16].sum() if large else 0)
            return self.head(x) * self.temperature + 1e-3 * more

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Awkward()
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        for _ in range(steps):
            tokens = torch.randint(0, 101, (2, 9), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    storage = torch.randn(6, 10, generator=generator)
    nans = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x3F800000], dtype=torch.int32).view(torch.float32)
    extras: dict[str, Any] = {
        "epoch": 3,
        "samples": 2**62 + seed,
        "best": -0.0,
        "worst": math.inf,
        "undefined": math.nan,
        "name": "a run: naïve @ 100% 🪸",
        "sizes": (1, 2, (3, b"\x00\xff")),
        "by_layer": {0: "first", 7: "last", "extra.dotted": [None, True, 0.1 + 0.2]},
        "nothing": {},
        "tensors": {
            "nan_payload": nans,
            "half": torch.tensor([1.0, -0.0, 65504.0], dtype=torch.float16),
            "double": torch.rand(5, 3, generator=generator, dtype=torch.float64),
            "bytes": torch.randint(0, 256, (251,), generator=generator, dtype=torch.uint8),
            "cursor": torch.randint(-(2**62), 2**62, (7, 3), generator=generator),
            "row": storage[2],
            "column": storage[:, 4],
            "strided": storage[::2, 1::3],
            "expanded": torch.tensor([2.5]).expand(4, 3),
            "scalar": torch.tensor(7, dtype=torch.int64),
            "no_rows": torch.empty(0, 3, dtype=torch.bfloat16),
        },
    }
    return model, optimizer, extras


@pytest.fixture
def awkward_state() -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """`awkward_state(seed=0, steps=2, large=False)` -> (model, optimizer, extras): see `build_awkward_state`."""
    return build_awkward_state


# --- equality of bits -------------------------------------------------------------------------------------------------


def bit_differences(a: Any, b: Any, path: str = "") -> list[str]:
    """One line for each place where two states differ in type, structure, dtype, shape or any bit; empty when equal.

    A state is a module, an optimizer or anything with `state_dict()`, or a tree of dicts, lists and tuples with
    tensors, arrays and values at its leaves. The payload of a NaN and the sign of a zero matter; strides, the device
    and the order of keys do not.
    """
    import numpy as np
    import torch

    a, b = (x.state_dict() if hasattr(x, "state_dict") else x for x in (a, b))
    here = path or "the state"
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return [f"{here}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}"]
        bits_a, bits_b = (x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (a, b))
        unequal = int((bits_a != bits_b).view(-1, max(1, a.element_size())).any(1).sum()) if a.numel() else 0
        return [f"{here}: {unequal} of {a.numel()} elements differ"] if unequal else []
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        lines = [f"{here}: {k!r} is only in the first" for k in a if k not in b]
        lines += [f"{here}: {k!r} is only in the second" for k in b if k not in a]
        return lines + [d for k in a if k in b for d in bit_differences(a[k], b[k], f"{path}.{k}" if path else str(k))]
    if type(a) is not type(b):
        return [f"{here}: a {type(a).__name__} against a {type(b).__name__}"]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{here}: {len(a)} items against {len(b)}"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in bit_differences(x, y, f"{path}.{i}")]
    if isinstance(a, float):
        return [] if struct.pack("<d", a) == struct.pack("<d", b) else [f"{here}: {a!r} against {b!r}"]
    if isinstance(a, (np.ndarray, np.generic)):
        is_equal = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return [] if is_equal else [f"{here}: the arrays differ"]
    return [] if a == b else [f"{here}: {a!r} against {b!r}"]


@pytest.fixture
def equal_states() -> Callable[[Any, Any], bool]:
    """`equal_states(a, b)`: whether two states are equal in every bit; the test's output says where they are not."""

    def equal(a: Any, b: Any) -> bool:
        lines = bit_differences(a, b)
        for line in lines[:20]:
            print(line)
        if len(lines) > 20:
            print(f"... and {len(lines) - 20} more")
        return not lines

    return equal


# --- nothing stays behind ---------------------------------------------------------------------------------------------

_SHARED_MEMORY = Path("/dev/shm")
_MADE_BY_US = ("holdfast", "psm_", "sem.mp-", "torch_", "tmp", "pym-")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fails a test that leaves a child process or a file in shared memory behind."""
    children, files = _children(), _shared_files()
    yield
    end = time.monotonic() + GRACE_SECONDS
    while True:
        left = _children() - children
        stray = {name for name in _shared_files() - files if not _is_held_by_others(_SHARED_MEMORY / name)}
        if not left and not stray:
            return
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    told = [f"process {p.pid}: {_command(p)}" for p in left] + [f"{_SHARED_MEMORY / name}" for name in sorted(stray)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    pytest.fail("the test left behind:\n  " + "\n  ".join(told), pytrace=False)


def _children() -> set[psutil.Process]:
    """Live descendants, without the helper that Python keeps for shared memory until the interpreter ends."""
    found = psutil.Process().children(recursive=True)
    return {p for p in found if "multiprocessing.resource_tracker" not in _command(p) and _is_alive(p)}


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _shared_files() -> set[str]:
    try:
        return {name for name in os.listdir(_SHARED_MEMORY) if name.startswith(_MADE_BY_US)}
    except OSError:
        return set()


def _is_held_by_others(path: Path) -> bool:
    """Whether a process that is not ours has the file open or mapped: then it is not ours either."""
    ours = {os.getpid()} | {p.pid for p in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            used = {f.path for f in process.open_files()} | {m.path for m in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
        if str(path) in used:
            return True
    return False
