"""The public surface is a tested list: what `docs/interface.md` says is there, documented, and nothing else."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import holdfast

INTERFACE = (Path(__file__).parent.parent / "docs" / "interface.md").read_text()

PUBLIC = {
    # saving and loading
    "State",
    "PerRank",
    "save",
    "load",
    "restore",
    "open",
    "export",
    # the object that a trainer holds
    "Checkpointer",
    "Init",
    "Handle",
    "Every",
    "Keep",
    # looking at runs and checkpoints
    "Run",
    "Checkpoint",
    "Ledger",
    # errors
    "HoldfastError",
    "NoCheckpoint",
    "Mismatch",
    "Corrupt",
    "Unavailable",
    "Deadline",
    "Superseded",
    "Overdue",
    "Refused",
}

METHODS = {
    "State": {"names", "digest"},
    "Checkpointer": {"resume", "step", "save", "close", "ledger", "__enter__", "__exit__"},
    "Handle": {"step", "attempt", "level", "error", "wait"},
    "Run": {
        *("path", "id", "steps", "latest", "best", "wait", "hold", "pin", "unpin", "note", "rollback", "prune", "copy"),
    },
    "Checkpoint": {
        *("names", "values", "step", "attempt", "metrics", "content_digest", "nbytes", "verify", "digest", "close"),
        *("__getitem__", "__enter__", "__exit__"),
    },
    "Ledger": {
        *("filled", "allocated", "cast", "renamed", "waived", "missing", "unexpected", "live", "hyper", "fallbacks"),
        *("step", "attempt", "as_dict"),
    },
}

SIGNATURES = {
    "State": "(*, rng=True, **roles)",
    "PerRank": "(obj, reshape=None)",
    "save": "(run, state_or_dict, step, *, metrics=None, pin=None, select=None, recycle=True)",
    "load": "(address, *, step=None, select=None, exclude=())",
    "restore": "(address, state_or_dict, *, step=None, select=None, exclude=(), waive=(), rename={}, cast={}, live=(), "
    "stage=False)",
    "open": "(address, *, step=None)",
    "export": "(address, target, *, to='safetensors', step=None, select=None, cast={}, max_shard_bytes=5368709120)",
    "Checkpointer": "(run, state, *, save=Every(steps=100), keep=Keep(last=3), init=None, on_failure='warn', "
    "recycle=True, deadline='10m')",
    "Checkpointer.resume": "(at=None, *, skip_samples=None, required=False, live=(), waive=(), rename={}, cast={}, "
    "stage=False)",
    "Checkpointer.step": "(n, *, metrics=None)",
    "Checkpointer.save": "(*, pin=None, select=None)",
    "Checkpointer.close": "()",
    "Init": "(source, *, waive=(), rename={}, cast={}, select=None)",
    "Handle.wait": "(level='durable', timeout=None)",
    "Every": "(steps=None, minutes=None)",
    "Keep": "(last=3, every=None, best=0, metric=None, mode='min', weights=None)",
    "Run": "(path, *, create=False)",
    "Run.steps": "(abandoned=False)",
    "Run.latest": "()",
    "Run.best": "(metric=None, mode=None)",
    "Run.wait": "(after=None, *, timeout=None)",
    "Run.hold": "(step)",
    "Run.pin": "(step, name)",
    "Run.unpin": "(name)",
    "Run.note": "(step, metrics)",
    "Run.rollback": "(step, *, skip_samples=None)",
    "Run.prune": "(keep=None, *, dry_run=False)",
    "Run.copy": "(step, target)",
    "Checkpoint.verify": "(progress=None)",
    "Checkpoint.digest": "(name)",
    "Checkpoint.close": "()",
    "Ledger.as_dict": "()",
}


def find(dotted: str) -> object:
    found: object = holdfast
    for part in dotted.split("."):
        found = getattr(found, part)
    return found


def test_the_public_names_are_these() -> None:
    assert set(holdfast.__all__) - {"__version__"} == PUBLIC
    assert len(holdfast.__all__) == len(set(holdfast.__all__))


def test_dir_shows_the_public_names() -> None:
    assert set(dir(holdfast)) >= set(holdfast.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="restor_"):
        holdfast.restor_  # noqa: B018


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_public_name_is_on_the_page(name: str) -> None:
    assert re.search(rf"(^|[\s`|(]){name}\b", INTERFACE), f"docs/interface.md does not name {name}"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_the_public_name_is_documented(name: str) -> None:
    found = find(name)
    doc = inspect.getdoc(found)
    assert doc
    # a dataclass without a docstring gets its signature as one
    assert not doc.startswith(f"{name}("), f"holdfast.{name} has no docstring of its own"


def public_members() -> list[str]:
    members = []
    for name in sorted(PUBLIC):
        found = find(name)
        if inspect.isclass(found):
            members += [f"{name}.{m}" for m in vars(found) if not m.startswith("_")]
    return members


def test_every_public_method_and_property_is_documented() -> None:
    bare = [
        dotted
        for dotted in public_members()
        if (inspect.isroutine(member := find(dotted)) or isinstance(member, property)) and not inspect.getdoc(member)
    ]
    assert not bare, f"without a docstring: {bare}"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_class_has_what_the_page_lists(name: str) -> None:
    found = find(name)
    has = set(dir(found)) | set(inspect.get_annotations(found)) | assigned(found)  # type: ignore[arg-type]
    assert not METHODS[name] - has


def assigned(cls: type) -> set[str]:
    """Attributes that `__init__` gives to self."""
    return set(re.findall(r"\bself\.(\w+)\b[^=\n]*=", inspect.getsource(cls)))


@pytest.mark.parametrize("dotted", sorted(SIGNATURES))
def test_the_signature_is_the_one_on_the_page(dotted: str) -> None:
    signature = inspect.signature(find(dotted))  # type: ignore[arg-type]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values() if p.name != "self"]
    shown = str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    assert normal(shown) == normal(SIGNATURES[dotted])


def normal(signature: str) -> str:
    """Without what a repr may add: another name of an empty mapping, a policy's fields that are at their default."""
    signature = re.sub(r"mappingproxy\(\{\}\)", "{}", signature)
    signature = re.sub(r"Every\(steps=100[^)]*\)", "Every(steps=100)", signature)
    return re.sub(r"Keep\(last=3[^)]*\)", "Keep(last=3)", signature)
