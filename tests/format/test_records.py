"""Records: what was sealed comes back; a record with any bit flipped is refused; later versions' fields are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Corrupt, HoldfastError, Unsupported
from holdfast.format.digest import hex_digest
from holdfast.format.records import (
    Attempt,
    Commit,
    Intent,
    Note,
    PartRef,
    Pin,
    Process,
    RunRecord,
    StepRef,
    Tombstone,
    seal,
    unseal,
)

SAMPLES = [
    RunRecord(run="0123456789abcdef", created=1.5, library="1.0"),
    Attempt(
        run="r", attempt=7, parent=StepRef(500, 6), reason="rollback", skipped_samples=[[10, 20]], by=Process(host="h", pid=1)
    ),
    Commit(
        decision="committed",
        run="r",
        step=2**62,
        attempt=7,
        values=[[["a", 0, {"$tuple": [1]}], {"$float": "8000000000000000"}]],
        parts=[PartRef(writer="n0000", path="p", bytes=1, digest="0" * 32)],
        metrics={"loss": 0.1, "name": "é\u2028🪸\x00"},
    ),
    Intent(step=1, attempt=1, parents=[StepRef(0, 1)]),
    Tombstone(step=1, attempt=1),
    Pin(name="best", step=1, attempt=1, expires=2.0),
    Note(step=1, attempt=1, metrics={"a": None, "b": True, "c": 10**17}),
]


def sealed(text: str) -> bytes:
    """`text`, a JSON object's beginning without its closing brace, with a right seal."""
    body = text.encode(errors="surrogatepass")
    return body + b',\n  "check": "' + hex_digest(body).encode() + b'"\n}\n'


@pytest.mark.parametrize("record", SAMPLES, ids=lambda r: type(r).__name__)
def test_a_record_comes_back(record: Any) -> None:
    assert unseal(seal(record), type(record), "there") == record
    plain = json.loads(seal(record))
    assert list(plain)[-1] == "check"


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.one_of(
            st.none(), st.booleans(), st.text(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False)
        ),
    )
)
def test_any_metrics_come_back(metrics: dict[str, Any]) -> None:
    found = unseal(seal(Note(step=1, attempt=1, metrics=metrics)), Note, "note")
    assert repr(found.metrics) == repr(metrics)


def test_a_record_with_any_single_bit_flipped_is_refused() -> None:
    record = Note(step=1000, attempt=7, metrics={"loss": 2.5}, created=1700000000.0)
    data = seal(record)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt, match="notes/x"):
            unseal(bytes(flipped), Note, "notes/x")


def test_a_record_cut_anywhere_is_refused() -> None:
    data = seal(SAMPLES[1])
    for length in range(len(data)):
        with pytest.raises(Corrupt, match="attempts/0007"):
            unseal(data[:length], Attempt, "attempts/0007")


@pytest.mark.parametrize("more", [b"\n", b" ", b"\x00", b"{}", b"\xff"])
def test_a_record_with_bytes_before_or_after_it_is_refused(more: bytes) -> None:
    data = seal(SAMPLES[0])
    for changed in (more + data, data + more, data[:50] + more + data[50:]):
        with pytest.raises(Corrupt, match="there"):
            unseal(changed, RunRecord, "there")


def test_another_kind_of_record_is_refused() -> None:
    with pytest.raises(Corrupt, match="there"):
        unseal(seal(SAMPLES[0]), Commit, "there")


def test_unknown_fields_are_ignored() -> None:
    data = sealed('{\n  "format": 1,\n  "step": 3,\n  "attempt": 1,\n  "a_later_idea": {"deep": [1]}')
    assert unseal(data, Note, "there") == Note(step=3, attempt=1)


def test_missing_fields_have_their_defaults() -> None:
    assert unseal(sealed('{\n  "step": 3,\n  "attempt": 1'), Note, "there") == Note(step=3, attempt=1)


def test_a_later_format_is_unsupported_and_not_corrupt() -> None:
    with pytest.raises(Unsupported, match=r"there.*format 2.*upgrade"):
        unseal(sealed('{\n  "format": 2,\n  "all_new": true'), Commit, "there")


def test_an_unknown_required_feature_is_named() -> None:
    with pytest.raises(Unsupported, match=r"there.*telepathy.*upgrade"):
        unseal(sealed('{\n  "format": 1,\n  "required_features": ["telepathy"],\n  "step": 3,\n  "attempt": 1'), Note, "there")


GARBAGE = [
    "",
    "{",
    "[1",
    "5",
    '"x"',
    "null",
    '{"step": 1',
    '{"step": "x", "attempt": 1',
    '{"step": 1.5, "attempt": 1',
    '{"step": null, "attempt": 1',
    '{"format": "x", "step": 1, "attempt": 1',
    '{"format": null, "step": 1, "attempt": 1',
    '{"required_features": 5, "step": 1, "attempt": 1',
    '{"step": 1, "attempt": 1, "metrics": []',
    '{"step": 1, "attempt": 1, "metrics": {"a": NaN}',
    '{"step": 1, "attempt": 1, "metrics": {"x": "\ud800"}',
    '{"step": 1, "attempt": 1, "created": 1e999',
    '{"step": 1, "attempt": 1, "x": ' + "[" * 100_000 + "]" * 100_000,
    '{"step": 1, "attempt": 1, "metrics": {"a": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}",
    '{"step": ' + "9" * 10_000 + ', "attempt": 1',
    '{"step": 1, "attempt": 1, "metrics": {"x": "\x01"}',
]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda t: t[:60].encode("ascii", "replace").decode())
def test_garbage_under_a_right_seal_is_refused(text: str) -> None:
    with pytest.raises(HoldfastError, match="notes/x"):
        unseal(sealed(text), Note, "notes/x")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_under_a_right_seal_are_a_record_or_refused(body: bytes) -> None:
    data = body + b',\n  "check": "' + hex_digest(body).encode() + b'"\n}\n'
    for kind in (Note, Commit, Attempt):
        try:
            unseal(data, kind, "there")
        except HoldfastError as error:
            assert "there" in str(error)
