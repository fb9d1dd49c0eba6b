"""`holdfast inspect`: what a checkpoint holds, as a tree; or one tensor with its statistics. Without torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..address import UsageError, parse
from ..format.index import Index, TensorRow
from ..format.records import StepRef
from ..loading.checkpoint import Checkpoint
from ..patterns import matches_any, near
from .amounts import counted, metrics_text, number, short, size, when
from .place import find_run, open_address
from .statistics import statistics
from .terminal import Json, print_json, print_table, progress
from .tree import Leaf, Line, lines
from .values import is_container, stored_values, value_text


def inspect(
    address: Annotated[str, typer.Argument(help="Which checkpoint; without @, the latest.", metavar="ADDRESS")],
    name: Annotated[
        str | None, typer.Argument(help="A tensor: its statistics. A value, a part of the tree, a pattern: only that.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Sum up what lies deeper in the tree.")] = None,
    as_json: Json = False,
) -> int:
    """Show what a checkpoint holds, or one tensor with its statistics."""
    with open_address(address) as checkpoint:
        if name is not None and name in checkpoint:
            tensor = examine(checkpoint, name)
            if as_json:
                print_json(tensor)
            else:
                _tell_tensor(tensor)
            return 0
        result = describe(checkpoint, address, name)
    if as_json:
        print_json(result)
    else:
        _tell(result, depth)
    return 0


def examine(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """One tensor, read whole.

    Raises:
        Corrupt: naming the place.
    """
    result = _tensor(checkpoint.index, checkpoint.tensor(name))
    done = 0
    with progress() as advance:

        def read(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            advance(name, done, result["bytes"])

        return result | asdict(statistics(checkpoint, name, read))


def describe(checkpoint: Checkpoint, address: str, name: str | None = None) -> dict[str, Any]:
    """What a checkpoint holds; of its tensors and values those that `name` means, or all.

    Raises:
        UsageError: nothing is called so.
    """
    commit = checkpoint.commit
    tensors = [_tensor(checkpoint.index, row) for row in checkpoint.index.tensors() if _is_meant(row.name, name)]
    values = [{"name": n, "value": v} for n, v in stored_values(checkpoint).items() if not is_container(v)]
    known = [*checkpoint.names, *(v["name"] for v in values)]
    values = [v for v in values if _is_meant(v["name"], name)]
    if name is not None and not tensors and not values:
        raise UsageError(f"{address} holds no tensor or value called {name}{near(name, known)}")
    return {
        "address": address,
        "run": checkpoint.store.url,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "kind": commit.kind,
        "created": commit.created,
        "bytes": checkpoint.nbytes,
        "new_bytes": commit.new_bytes,
        "content_digest": checkpoint.content_digest,
        "codecs": commit.codecs,
        "lossy": commit.lossy,
        "roles": commit.roles,
        "libraries": commit.libraries,
        **_marks(checkpoint, address),
        "files": [{"path": f.path, "bytes": f.nbytes} for f in checkpoint.index.files()],
        "tensors": tensors,
        "values": values,
    }


def _is_meant(candidate: str, name: str | None) -> bool:
    return name is None or candidate == name or candidate.startswith(f"{name}.") or matches_any(candidate, name)


def _tensor(index: Index, row: TensorRow) -> dict[str, Any]:
    used = index.codecs_of(row)
    return {
        "name": row.name,
        "dtype": row.dtype.name,
        "shape": list(row.shape),
        "bytes": row.nbytes,
        "role": row.role,
        "owner": index.names[row.owner] if row.owner >= 0 else None,
        "alias_of": index.canonical(row).name if row.alias >= 0 else None,
        "codecs": sorted({codec.name for codec in used}),
        "is_lossy": any(codec.is_lossy for codec in used),
    }


def _marks(checkpoint: Checkpoint, address: str) -> dict[str, Any]:
    """Metrics with their notes, pins, and who wrote it: what the run says about the step beside its commit record."""
    if parse(address).format is not None:
        return {"metrics": checkpoint.metrics, "pins": [], "line": None, "writer": None}
    snapshot = find_run(address).history.look()
    ours = (checkpoint.step, checkpoint.attempt)
    step = next((s for s in snapshot.steps if (s.step, s.attempt) == ours), None)
    attempt = snapshot.attempts.get(checkpoint.attempt)
    writer = attempt and {
        "attempt": attempt.attempt,
        "reason": attempt.reason,
        "parent": _ref(attempt.parent),
        "skipped_samples": attempt.skipped_samples,
        "host": attempt.by.host,
        "pid": attempt.by.pid,
        "created": attempt.created,
    }
    return {
        "metrics": step.metrics if step else checkpoint.metrics,
        "pins": list(step.pins) if step else [],
        "line": ("abandoned" if step.is_abandoned else "lineage") if step else None,
        "writer": writer,
    }


def _ref(ref: StepRef | None) -> dict[str, int] | None:
    return {"step": ref.step, "attempt": ref.attempt} if ref else None


def _tell_tensor(tensor: dict[str, Any]) -> None:
    print(f"{tensor['name']}: {tensor['dtype']} {tensor['shape']}, {size(tensor['bytes'])}, role {tensor['role']}")
    if tensor["codecs"] not in ([], ["raw"]):
        print(f"  {'codec':<8}  {_lossy_text(tensor) or ', '.join(tensor['codecs'])}")
    for word in ("alias_of", "owner"):
        if tensor[word]:
            print(f"  {word.replace('_', ' '):<8}  {tensor[word]}")
    for word in ("min", "max", "mean", "std"):
        print(f"  {word:<8}  {'-' if tensor[word] is None else number(tensor[word])}")
    for word in ("elements", "zeros", "nan", "inf"):
        print(f"  {word:<8}  {tensor[word]}")
    print(f"  {'digest':<8}  {tensor['digest']}")


def _tell(result: dict[str, Any], depth: int | None) -> None:
    print(f"{result['run']}, step {result['step']}, attempt {result['attempt']}, {result['kind']}")
    if result["line"] == "abandoned":
        print("  line       abandoned: a rollback has left it behind")
    facts = {
        "saved": when(result["created"]),
        "writer": _writer_text(result["writer"]),
        "metrics": metrics_text(result["metrics"]),
        "pins": " ".join(result["pins"]),
        "bytes": f"{size(result['bytes'])} in {counted(len(result['files']), 'file')}",
        "codecs": ", ".join(result["codecs"]),
        "lossy": ", ".join(result["lossy"]),
        "roles": ", ".join(f"{role} ({kind})" for role, kind in result["roles"].items()),
        "libraries": ", ".join(f"{name} {version}" for name, version in result["libraries"].items()),
        "digest": result["content_digest"],
    }
    for name, text in facts.items():
        if text:
            print(f"  {name:<9}  {text}")
    leaves = {t["name"]: _tensor_leaf(t) for t in result["tensors"]}
    is_alone = len(result["values"]) == 1 and not leaves
    for value in result["values"]:
        text = value_text(value["name"], value["value"])
        leaves[value["name"]] = Leaf((text if is_alone else short(text), "", "", ""))
    if leaves:
        print()
        rows = [_cells(line) for line in lines(leaves, depth)]
        print_table(("name", "dtype or value", "shape", "size", ""), rows, right=("size",))


def _writer_text(writer: dict[str, Any] | None) -> str:
    if writer is None:
        return ""
    skipped = "".join(f", without samples {a} to {b}" for a, b in writer["skipped_samples"] or ())
    parent = f" from step {writer['parent']['step']}" if writer["parent"] else ""
    return f"process {writer['pid']} on {writer['host'].partition('/')[0]} ({writer['reason']}{parent}{skipped})"


def _tensor_leaf(tensor: dict[str, Any]) -> Leaf:
    alias = f"shares {tensor['alias_of']}" if tensor["alias_of"] else ""
    nbytes = 0 if alias else tensor["bytes"]
    note = alias or _lossy_text(tensor)
    return Leaf((tensor["dtype"], str(tensor["shape"]), size(tensor["bytes"]), note), nbytes, is_tensor=True)


def _lossy_text(tensor: dict[str, Any]) -> str:
    return f"lossy: {', '.join(tensor['codecs'])}" if tensor["is_lossy"] else ""


def _cells(line: Line) -> tuple[str, ...]:
    if line.leaf is not None:
        return (line.label, *line.leaf.cells)
    counts = [counted(n, thing) for n, thing in ((line.tensors, "tensor"), (line.values, "value")) if n]
    return (line.label, ", ".join(counts), "", size(line.nbytes) if line.tensors else "", "")
