"""A damaged file of any kind is refused with its name, touches nothing, and never gives wrong bits."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast import Corrupt, HoldfastError, NoCheckpoint, Unsupported
from holdfast.format.records import FORMAT

from .refuse import exact_or_refused, never_wrong, refused
from .wreck import (
    CHUNK,
    Kinds,
    cut,
    fix_digests,
    flip,
    make_state,
    put,
    read_columns,
    rewrite_index,
    rewrite_record,
    seal,
    write_columns,
)

STRUCTURE = ["run", "attempt", "commit", "index"]
"""Files without which no byte of a checkpoint is to be believed."""
MARKS = ["pin", "note"]

Saved = tuple[Path, dict[int, dict[str, Any]]]
Fresh = Callable[[], Path]


def bits_of(path: Path) -> list[int]:
    """A few bits of a file: at its ends, in its middle, and spread over it."""
    last = path.stat().st_size * 8 - 1
    return sorted({0, 7, 8, last // 3, last // 2, 2 * last // 3, last - 8, last})


# --- a flipped bit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRUCTURE)
def test_a_flipped_bit_in_a_record_or_index_is_refused(kind: str, fresh: Fresh, saved: Saved) -> None:
    for bit in bits_of(Kinds(saved[0]).path(kind)):
        run = fresh()
        flip(Kinds(run).path(kind), bit)
        error = refused(str(run), Kinds(run).name(kind))
        assert isinstance(error, Corrupt)


def test_a_flipped_bit_in_a_pin_is_refused_by_who_asks_for_the_pin(run: Path, saved: Saved) -> None:
    flip(Kinds(run).path("pin"), 300)
    refused(f"{run}@kept", "pins/kept.json")
    assert exact_or_refused(str(run), saved[1][3], "pins/kept.json")


@pytest.mark.parametrize("kind", MARKS)
def test_nothing_is_pruned_while_a_mark_is_damaged(kind: str, run: Path, saved: Saved) -> None:
    flip(Kinds(run).path(kind), 300)
    with pytest.raises(Corrupt, match=Kinds(run).name(kind)):
        holdfast.Run(str(run)).prune(holdfast.Keep(last=1))
    for step, expected in saved[1].items():
        assert exact_or_refused(f"{run}@{step}", expected, Kinds(run).name(kind))


@pytest.mark.parametrize("kind", ["run", "attempt"])
def test_nothing_is_saved_into_a_run_whose_records_are_damaged(kind: str, run: Path) -> None:
    flip(Kinds(run).path(kind), 300)
    with pytest.raises(HoldfastError, match=Kinds(run).name(kind)):
        holdfast.save(str(run), make_state(), 9)


def test_a_flipped_bit_in_a_data_files_header_is_found_by_verify(fresh: Fresh, saved: Saved) -> None:
    for bit in (0, 63, 8 * 40, 8 * 500, 8 * 4095 + 7):
        run = fresh()
        flip(Kinds(run).path("data"), bit)
        exact_or_refused(str(run), saved[1][3], Kinds(run).name("data"))
        with holdfast.open(str(run)) as checkpoint:
            assert [d.file for d in checkpoint.verify()] == [Kinds(run).name("data")]


def test_a_flipped_bit_in_a_tensors_bytes_is_refused_with_file_and_tensor(run: Path) -> None:
    data = Kinds(run).path("data")
    flip(data, (data.stat().st_size - 1) * 8)
    error = refused(str(run), Kinds(run).name("data"), touches=True)
    assert isinstance(error, Corrupt)
    assert error.file == Kinds(run).name("data")
    assert error.tensor in str(error)
    assert error.tensor.startswith(("model.", "progress."))
    assert 4096 <= error.offset < data.stat().st_size


@pytest.mark.parametrize(
    "at", [4096, 4096 + CHUNK - 1, 4096 + CHUNK, 4096 + CHUNK + 400_000], ids=["first", "end", "second", "later"]
)
def test_a_flipped_bit_in_any_chunk_of_a_large_tensor_is_refused(at: int, run: Path, saved: Saved) -> None:
    """The chunk lies in the file of step 1, to which step 3 refers; step 2 is pinned and self-contained."""
    files = Kinds(run, step=1)
    with holdfast.open(f"{run}@1") as checkpoint:
        chunks = checkpoint.index.chunks(checkpoint.index.entries(checkpoint.tensor("model.big"))[0])
        assert len(chunks) == 2
        start = int(chunks.offset[0])
    flip(files.path("data"), (start - 4096 + at) * 8 + 3)
    for step in (1, 3):
        error = refused(f"{run}@{step}", files.name("data"), touches=True)
        assert isinstance(error, Corrupt)
        assert error.tensor == "model.big"
        assert error.offset == start + (CHUNK if at >= 4096 + CHUNK else 0)
    assert exact_or_refused(f"{run}@2", saved[1][2])


# --- files cut short, lengthened, gone --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRUCTURE)
def test_a_record_or_index_that_was_cut_is_refused(kind: str, fresh: Fresh, saved: Saved) -> None:
    size = Kinds(saved[0]).path(kind).stat().st_size
    for length in sorted({0, 1, 7, 8, 9, 100, size // 2, min(4095, size - 2), min(4096, size - 2), size - 50, size - 1}):
        run = fresh()
        cut(Kinds(run).path(kind), length)
        refused(str(run), Kinds(run).name(kind))


def test_a_data_file_that_was_cut_is_refused(fresh: Fresh, saved: Saved) -> None:
    size = Kinds(saved[0]).path("data").stat().st_size
    for length in (0, 7, 8, 4095, 4096, 4097, size - 1):
        run = fresh()
        cut(Kinds(run).path("data"), length)
        refused(str(run), Kinds(run).name("data"), touches=True)
        with holdfast.open(str(run)) as checkpoint:
            assert Kinds(run).name("data") in [d.file for d in checkpoint.verify()]


def test_a_large_data_file_that_was_cut_at_a_chunk_is_refused(fresh: Fresh) -> None:
    for length in (4096, 4096 + CHUNK - 1, 4096 + CHUNK, 4096 + CHUNK + 1):
        run = fresh()
        files = Kinds(run, step=1)
        cut(files.path("data"), length)
        refused(f"{run}@1", files.name("data"), touches=True)


def test_a_file_with_bytes_after_its_end_is_refused_or_harmless(fresh: Fresh, saved: Saved) -> None:
    for kind in (*STRUCTURE, "data"):
        run = fresh()
        path = Kinds(run).path(kind)
        put(path, path.read_bytes() + b"\n")
        assert exact_or_refused(str(run), saved[1][3], Kinds(run).name(kind)) == (kind == "data")
        if kind == "data":
            with holdfast.open(str(run)) as checkpoint:
                assert [d.file for d in checkpoint.verify()] == [Kinds(run).name(kind)]


@pytest.mark.parametrize("kind", ["run", "attempt", "index", "data"])
def test_a_file_that_is_gone_is_named(kind: str, run: Path) -> None:
    name = Kinds(run).name(kind)
    Kinds(run).path(kind).unlink()
    refused(str(run), name)


def test_an_attempt_that_is_gone_does_not_revive_what_it_left_behind(run: Path) -> None:
    """Step 4 is of attempt 2, whose past ends at step 1. Without its record, step 3 of attempt 1 would look like the newest."""
    holdfast.Run(str(run)).rollback(1)
    holdfast.save(str(run), make_state(100), 4)
    newest = max((run / "attempts").iterdir())
    newest.unlink()
    with pytest.raises(HoldfastError, match=f"attempts/{newest.name}"):
        holdfast.load(str(run))


def test_a_file_of_an_earlier_step_that_is_gone_is_named(run: Path, saved: Saved) -> None:
    files = Kinds(run, step=1)
    name = files.name("data")
    files.path("data").unlink()
    refused(f"{run}@3", name)
    assert exact_or_refused(f"{run}@2", saved[1][2])


def test_a_step_without_its_commit_record_does_not_exist(run: Path, saved: Saved) -> None:
    Kinds(run).path("commit").unlink()
    with pytest.raises(NoCheckpoint, match=r"no step 3; it has 1, 2"):
        holdfast.load(f"{run}@3")
    assert exact_or_refused(str(run), saved[1][2])


def test_a_pin_that_is_gone_is_no_pin(run: Path) -> None:
    Kinds(run).path("pin").unlink()
    with pytest.raises(NoCheckpoint, match="no pin kept"):
        holdfast.load(f"{run}@kept")


@pytest.mark.parametrize("kind", [*STRUCTURE, "data"])
def test_a_directory_where_a_file_should_be_is_an_error_with_its_name(kind: str, run: Path) -> None:
    name = Kinds(run).name(kind)
    path = Kinds(run).path(kind)
    path.unlink()
    path.mkdir()
    with pytest.raises(HoldfastError, match=name):
        holdfast.load(str(run))


def test_an_empty_hold_left_by_a_power_cut_stops_nobody(run: Path, saved: Saved) -> None:
    """Holds are not synced: a power cut may leave their name without their bytes."""
    (run / "pins" / "hold-0123456789ab.json").touch()
    (run / "intents").mkdir(exist_ok=True)
    (run / "intents" / "0000000009-a0001-0123abcd.json").touch()
    assert exact_or_refused(str(run), saved[1][3])
    assert exact_or_refused(f"{run}@kept", saved[1][2])
    holdfast.Run(str(run)).prune(holdfast.Keep(last=1))
    assert not list((run / "pins").glob("hold-*"))


@pytest.mark.parametrize(
    "name",
    ["attempts/²", "attempts/².json", "attempts/x.json", "attempts/0002.json.tmp", "steps/x", "steps/٠٠٠٠٠٠٠٠٠٤-a٠٠٠١", "stray"],
)
def test_a_strangers_file_is_ignored(name: str, run: Path, saved: Saved) -> None:
    (run / name).write_bytes(b"hello")
    assert exact_or_refused(str(run), saved[1][3])


# --- versions, garbage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["run", "attempt", "commit"])
@pytest.mark.parametrize("fields", [{"format": FORMAT + 1}, {"required_features": ["telepathy"]}], ids=["format", "feature"])
def test_a_record_of_a_later_version_is_unsupported(kind: str, fields: dict[str, Any], run: Path) -> None:
    rewrite_record(Kinds(run).path(kind), lambda record: record.update(fields))
    error = refused(str(run), Kinds(run).name(kind))
    assert isinstance(error, Unsupported)
    assert "upgrade" in str(error)


@pytest.mark.parametrize(
    "metadata", [{"version": "2"}, {"features": "telepathy"}, {"features": "a,b"}], ids=["version", "feature", "features"]
)
def test_an_index_of_a_later_version_is_unsupported(metadata: dict[str, str], run: Path) -> None:
    rewrite_index(Kinds(run), lambda columns, known: known.update(metadata))
    error = refused(str(run), Kinds(run).name("index"))
    assert isinstance(error, Unsupported)
    assert "upgrade" in str(error)


@pytest.mark.parametrize("kind", ["run", "attempt", "commit"])
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"5", b"{}", b'{"format": "x"', b'{"format": 1', b"\xff" * 60, b"[" * 100_000],
    ids=lambda b: b[:16].decode("ascii", "replace"),
)
def test_garbage_under_a_right_seal_is_refused(kind: str, body: bytes, run: Path) -> None:
    put(Kinds(run).path(kind), seal(body))
    refused(str(run), Kinds(run).name(kind))


@pytest.mark.parametrize("kind", [*STRUCTURE, "data"])
@pytest.mark.parametrize(
    "garbage", [b"", b"\x00" * 5000, b"\xff" * 5000, b"{}", b"PK\x03\x04" * 99], ids=["empty", "zeros", "ones", "braces", "zip"]
)
def test_a_file_full_of_something_else_is_refused(kind: str, garbage: bytes, run: Path) -> None:
    put(Kinds(run).path(kind), garbage)
    refused(str(run), Kinds(run).name(kind), touches=kind == "data")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8, 2**32])
def test_a_data_file_whose_header_claims_to_be_huge_does_no_harm(length: int, run: Path, saved: Saved) -> None:
    path = Kinds(run).path("data")
    put(path, struct.pack("<Q", length) + path.read_bytes()[8:])
    exact_or_refused(str(run), saved[1][3], Kinds(run).name("data"))
    never_wrong(str(run), saved[1][3])
    with holdfast.open(str(run)) as checkpoint:
        assert checkpoint.verify()
    with pytest.raises(Corrupt, match=path.name):
        holdfast.open(f"safetensors:{path}")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**8, 2**32])
def test_an_index_whose_header_claims_to_be_huge_is_refused(length: int, run: Path) -> None:
    path = Kinds(run).path("index")
    put(path, struct.pack("<Q", length) + path.read_bytes()[8:])
    fix_digests(Kinds(run))
    refused(str(run), Kinds(run).name("index"))


# --- records that are whole and wrong ---------------------------------------------------------------------------------


def part(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["parts"][0].update(fields)


WRONG_COMMITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another step": lambda r: r.update(step=2),
    "another attempt": lambda r: r.update(attempt=2),
    "another run": lambda r: r.update(run="f" * 16),
    "a decision nobody knows": lambda r: r.update(decision="perhaps"),
    "a kind nobody knows": lambda r: r.update(kind="increment"),
    "no parts": lambda r: r.update(parts=[]),
    "a part above the run": part(path="../secret"),
    "an absolute part": part(path="/etc/passwd"),
    "a part out of its directory": lambda r: r["parts"][0].update(
        path=f"{r['parts'][0]['path'].rpartition('/')[0]}/../../../secret"
    ),
    "a part of another step": lambda r: r["parts"][0].update(path=r["parts"][0]["path"].replace("0000000003", "0000000001")),
    "a part that is not there": lambda r: r["parts"][0].update(path=r["parts"][0]["path"].replace("n0000", "n0001")),
    "a part with a null in its name": part(path="steps/0000000003-a0001/\x00"),
    "the same part twice": lambda r: r.update(parts=r["parts"] * 2),
    "values that are no pairs": lambda r: r.update(values=[5]),
    "values of one": lambda r: r.update(values=[[["progress"]]]),
    "a value without a path": lambda r: r.update(values=[[[], 1]]),
    "a value at a number": lambda r: r.update(values=[[7, 1]]),
    "a value whose path is text": lambda r: r.update(values=[["progress", 1]]),
    "a value at an object": lambda r: r.update(values=[[[{"a": []}], 1]]),
    "a value twice": lambda r: r.update(values=[*r["values"], r["values"][0]]),
    "a value less": lambda r: r.update(values=r["values"][1:]),
    "another value": lambda r: r["values"][0].__setitem__(1, 77),
    "a value where a tensor is": lambda r: r["values"].append([["model", "small"], 1]),
    "a value below a tensor": lambda r: r["values"].append([["model", "small", "x"], 1]),
    "a mark nobody knows": lambda r: r["values"].append([["progress"], {"$node": "x"}]),
    "a mark that is a list": lambda r: r["values"].append([["progress"], {"$node": []}]),
    "a dict that is a list": lambda r: r["values"].append([["progress"], {"$node": "list"}]),
    "a content digest of another state": lambda r: r.update(content_digest="0" * 32),
    "no content digest": lambda r: r.pop("content_digest"),
}


@pytest.mark.parametrize("edit", WRONG_COMMITS.values(), ids=WRONG_COMMITS.keys())
def test_a_sealed_commit_record_that_is_wrong_is_refused(edit: Callable[[dict[str, Any]], Any], run: Path) -> None:
    (run.parent / "secret").write_bytes(Kinds(run).path("index").read_bytes())
    rewrite_record(Kinds(run).path("commit"), edit)
    refused(str(run), "steps/0000000003-a0001", "attempts/0002.json")


def test_an_attempt_of_another_number_or_run_is_refused(fresh: Fresh) -> None:
    for fields in ({"attempt": 3}, {"run": "f" * 16}):
        run = fresh()
        rewrite_record(Kinds(run).path("attempt"), lambda record, fields=fields: record.update(fields))
        refused(str(run), "attempts/0001.json")


def test_an_index_written_by_other_software_is_read(run: Path, saved: Saved) -> None:
    """The tools of these tests make a checkpoint that is right where nothing is damaged."""
    rewrite_index(Kinds(run), lambda columns, metadata: None)
    columns, metadata = read_columns(Kinds(run).path("index"))
    write_columns(Kinds(run).path("index"), dict(reversed(columns.items())), metadata)
    fix_digests(Kinds(run), columns)
    rewrite_record(Kinds(run).path("commit"), lambda record: json.loads(json.dumps(record)))
    assert exact_or_refused(str(run), saved[1][3])
