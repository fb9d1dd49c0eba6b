"""The command `python -m bench.gpu`: what saving costs a training on a GPU, and how fast its bytes come out and in.

A GPT and its fused AdamW train on the GPU; steps that are saved take turns with steps that are not. On the host it measures the
call of `step` and the optimizer's hook; on the device, by events, how much longer a saved step and the one after it take. Beside
that: a plain copy of as many bytes from the device into one pinned buffer, and loading. Needs a GPU; prints JSON.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from bench.machine import describe

SIZES = {"full": (24, 1024, 32768), "small": (4, 256, 1024)}
"""Layers, width, vocabulary."""


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(tokens)))
        return found


class Training:
    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        layers, width, self._vocabulary = SIZES[size]
        self.model = Gpt(layers, width, self._vocabulary).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.hook_seconds = 0.0

    def step(self) -> None:
        tokens = torch.randint(0, self._vocabulary, (8, 512), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.hook_seconds = time.perf_counter() - start
        self.optimizer.zero_grad()


def timed(work: Callable[[], Any]) -> float:
    """Seconds until the device has done it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def on_device(work: Callable[[], Any]) -> float:
    """Milliseconds between an event before and one behind what `work` enqueues."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


def plain_copy(nbytes: int, rounds: int) -> float:
    """Bytes a second of a copy into one pinned buffer."""
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return nbytes / statistics.median(timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(rounds))


def measure(given: argparse.Namespace, directory: Path) -> dict[str, Any]:
    training, step = Training(given.size), 0
    for _ in range(5):
        training.step()
    state = holdfast.State(model=training.model, optimizer=training.optimizer)
    rows: dict[str, list[float]] = {name: [] for name in ("call", "hook", "hook_alone", "with", "alone", "captured", "durable")}
    with holdfast.Checkpointer(
        directory / "run", state, save=holdfast.Every(steps=1), keep=holdfast.Keep(last=2), on_full="wait"
    ) as ckpt:
        ckpt.resume()
        for number in range(given.rounds + 3):
            alone = on_device(lambda: (training.step(), training.step()))
            hook_alone = training.hook_seconds
            step, taken = step + 1, [0.0, 0.0, 0.0]

            def saved(step: int = step, taken: list[float] = taken) -> Any:
                training.step()
                taken[2] = time.perf_counter()
                handle = ckpt.step(step)
                taken[0] = time.perf_counter() - taken[2]
                training.step()
                taken[1] = training.hook_seconds
                return handle

            handles: list[Any] = []
            together = on_device(lambda handles=handles, saved=saved: handles.append(saved()))  # type: ignore[misc]
            handles[0].wait("captured", 120)
            captured = time.perf_counter() - taken[2]
            handles[0].wait("durable", 120)
            if number >= 3:  # the first ones make the memory, and are compared
                found = (
                    1e3 * taken[0],
                    1e3 * taken[1],
                    1e3 * hook_alone,
                    together,
                    alone,
                    captured,
                    time.perf_counter() - taken[2],
                )
                for name, value in zip(rows, found, strict=True):
                    rows[name].append(value)
    latest = holdfast.Run(directory / "run").latest()
    assert latest is not None
    loading = statistics.median(timed(lambda: holdfast.restore(directory / "run", state)) for _ in range(3))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return {
        "machine": describe(directory),
        "device": torch.cuda.get_device_name(),
        "bytes": latest.nbytes,
        "host_ms": {"call": medians["call"], "call_max": max(rows["call"]), "optimizer": medians["hook"],
                    "optimizer_alone": medians["hook_alone"]},
        "device_ms": {"two_steps": medians["alone"], "with_a_save": medians["with"], "delay": medians["with"] - medians["alone"]},
        "seconds": {"captured": medians["captured"], "durable": medians["durable"], "loaded": loading},
        "plain_pinned_copy_bytes_a_second": plain_copy(min(latest.nbytes, 4 << 30), 5),
        "loaded_bytes_a_second": latest.nbytes / loading,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu: torch sees no GPU here", file=sys.stderr)
        return 2
    directory = Path(tempfile.mkdtemp(dir=given.directory))
    try:
        print(json.dumps(measure(given, directory), indent=2, default=str))
    finally:
        shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
