"""Write the golden checkpoint of a format version: `python tests/golden/make_golden.py v2`.

A golden checkpoint is written once, by the version that brings the format, and loads for ever: it is never written again.
What it holds is recorded beside it in `expected.json`, in a form that does not depend on holdfast: the bytes of each tensor in
hexadecimal (the SHA-256 of those of large ones), and values as Python literals.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def patterned(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor whose bytes depend on nothing but its arguments: no generator of torch's is asked."""
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    raw = bytes((seed * 7919 + 31 * i + (i * i >> 3)) % (2 if dtype == torch.bool else 256) for i in range(count))
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape).clone() if count else torch.empty(shape, dtype=dtype)


DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
          "float8_e8m0fnu", "complex128", "complex64", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
          "bool"]  # fmt: skip


def golden_state(step: int) -> dict[str, Any]:
    """The state after `step`: tied, empty, scalar and non-contiguous tensors; in step 1 every dtype and kind of value."""
    tied = patterned((4, 3), torch.float32, 1)
    nan = struct.unpack("<d", struct.pack("<Q", 0x7FF8DEADBEEF0001))[0]
    return {
        "model": {
            "frozen": patterned((60, 5), torch.float32, 2),
            "head": tied,
            "embed": tied,
            "moving": patterned((7, 2), torch.bfloat16, 10 + step),
            "turned": patterned((3, 4), torch.float32, 3).t(),
            "none": torch.empty(0, 5),
            "scalar": torch.tensor(step),
            "odd @ name%/é": patterned((2,), torch.int16, 4),
        },
        "dtypes": {
            name: patterned((3, 2), getattr(torch, name), 20 + i)
            for i, name in enumerate(DTYPES)
            if hasattr(torch, name) and step == 1
        },
        "progress": {"step": step, "layers": [patterned((2,), torch.float64, 5), {"inner": patterned((1, 1), torch.int8, 6)}]},
        "extras": {}
        if step > 1
        else {
            "big": 2**100,
            "floats": [0.1, -0.0, math.inf, -math.inf, nan, 5e-324, 1e16],
            "text": 'naïve 🪸 "\\ \n\x00 $int',
            "surrogate": "\udc80",
            "bytes": b"\x00\xff\x80",
            "tuple": (1, (2.0, None), [True, "x"]),
            "sets": [{1, 2, 3}, frozenset({"a"})],
            "keys": {0: "zero", None: "none", (1, "b"): "pair", b"k": 1, 2**70: 2, "$int": 3, "a.b": 4},
            "ordered": OrderedDict([("z", 1), ("a", 2)]),
            "complex": complex(-0.0, 2.5),
            "range": range(1, 10, 3),
            "slice": slice(None, 3),
            "nothing": {},
            "list": [],
        },
    }


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(path as a literal, leaf) of a loaded tree."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)) and any(isinstance(v, (torch.Tensor, dict)) for v in tree):
        for number, value in enumerate(tree):
            yield from leaves(value, (*path, number))
    else:
        yield repr(path), tree


def described(leaf: Any) -> Any:
    """A leaf in plain JSON."""
    if isinstance(leaf, torch.Tensor):
        flat = leaf.detach().contiguous().view(-1)
        raw = flat.view(torch.uint8).numpy().tobytes() if leaf.numel() else b""
        text = raw.hex() if len(raw) <= 64 else f"sha256:{hashlib.sha256(raw).hexdigest()}"
        return {"dtype": str(leaf.dtype).removeprefix("torch."), "shape": list(leaf.shape), "bytes": text}
    return {"type": type(leaf).__name__, "value": exact(leaf)}


def exact(value: Any) -> str:
    """A value as text that no other value has: floats by their bits, sets in order."""
    if isinstance(value, float):
        return f"float:{struct.pack('>d', value).hex()}"
    if isinstance(value, complex):
        return f"complex:{exact(value.real)},{exact(value.imag)}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}:{sorted(map(exact, value))}"
    if isinstance(value, dict):
        return f"{type(value).__name__}:{[(exact(k), exact(v)) for k, v in value.items()]}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}:{[exact(v) for v in value]}"
    return ascii(value)


def main(name: str) -> None:
    """Write the run and what it holds: two attempts and a rollback, references, a pin, a note."""
    import holdfast
    from holdfast.run import identity

    identity._host = lambda: "golden/pid:[1]"  # type: ignore[assignment]  # records name the machine that writes them
    identity._boot = lambda: "00000000-0000-0000-0000-000000000000"  # type: ignore[assignment]
    folder = HERE / name
    if folder.exists():
        sys.exit(f"{folder} exists; a golden checkpoint is never written again")
    run = folder / "run"
    expected: dict[str, Any] = {"steps": {}}
    holdfast.save(str(run), golden_state(1), 1, metrics={"loss": 1.0, "name": "é"}, pin="first")
    holdfast.Run(str(run)).rollback(1)
    holdfast.save(str(run), golden_state(2), 2, metrics={"loss": 0.25})
    holdfast.Run(str(run)).note(2, {"accuracy": 0.5})
    for step in (1, 2):
        with holdfast.open(str(run), step=step) as checkpoint:
            digests = {tensor: checkpoint.digest(tensor) for tensor in checkpoint.names}
            expected["steps"][step] = {
                "content_digest": checkpoint.content_digest,
                "logical_digests": digests,
                "leaves": {path: described(leaf) for path, leaf in leaves(golden_state(step))},
            }
    expected["lineage"] = [s.step for s in holdfast.Run(str(run)).steps()]
    expected["metrics"] = {s.step: s.metrics for s in holdfast.Run(str(run)).steps(abandoned=True)}
    for path in [*run.rglob(".*"), *run.glob("intents"), *run.glob("tombstones")]:
        shutil.rmtree(path, ignore_errors=True)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
