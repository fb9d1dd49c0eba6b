"""Whatever happens to the bytes of a run: a load gives exactly what was saved, or raises a HoldfastError; no code is run.

Every kind of file is mutated: as an accident would do it, and with the seals and digests made right again afterwards, as a
faulty writer would. With HOLDFAST_SOAK=1 the tests try other mutations each time, and many more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Checkpointer, HoldfastError

from .refuse import exact_or_refused, live_state, never_wrong
from .wreck import Kinds, fix_digests, make_run, put, seal

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
KINDS = ["run", "attempt", "commit", "index", "data", "pin", "note"]
BIG = 300
"""Elements of the largest tensor: these runs are small, so that there is time for many."""

Mutation = list[tuple[str, float, float, bytes]]
INTERESTING = [
    b"\x00" * 8,
    b"\xff" * 8,
    b"\xff" * 7 + b"\x7f",
    b"\x00" * 7 + b"\x80",
    b"\x01" + b"\x00" * 7,
    b"\xff\xff\xff\xff",
    b'"',
    b"{}",
    b"[]",
    b"null",
    b"-1",
    b"9" * 30,
    b"1e999",
    b"\\u0000",
    b"../",
    b"\xed\xa0\x80",
]

positions = st.floats(0, 1, exclude_max=True)
mutations = st.lists(
    st.tuples(
        st.sampled_from(["flip", "splice", "truncate", "insert", "delete", "overwrite", "swap"]),
        positions,
        positions,
        st.one_of(st.sampled_from(INTERESTING), st.binary(min_size=1, max_size=12)),
    ),
    min_size=1,
    max_size=3,
)


def mutate(data: bytes, mutation: Mutation) -> bytes:
    for kind, where, other, given_bytes in mutation:
        at, second = int(where * len(data)), int(other * len(data))
        low, high = sorted((at, second))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ 1 << int(other * 8)]) + data[at + 1 :]
        elif kind == "splice":
            data = data[:at] + data[second : second + 64] + data[at + 64 :]
        elif kind == "truncate":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + given_bytes + data[at:]
        elif kind == "delete":
            data = data[:low] + data[min(high, low + 64) :]
        elif kind == "overwrite":
            data = data[:at] + given_bytes + data[at + len(given_bytes) :]
        elif kind == "swap":
            data = data[:low] + data[high : high + 16] + data[low + 16 : high] + data[low : low + 16] + data[high + 16 :]
    return data


def fuzzed(examples: int) -> Any:
    return settings(
        max_examples=examples * (20 if SOAK else 1),
        derandomize=not SOAK,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    path = tmp_path_factory.mktemp("fuzzed") / "run"
    return path, make_run(path, BIG)


@pytest.fixture
def mended(small: tuple[Path, Any]) -> Iterator[Kinds]:
    yield Kinds(small[0])
    assert exact_or_refused(f"{small[0]}@3", small[1][3]), "a test did not put back what it changed"


class Damage:
    """One file replaced while the block runs, and the commit record with it where that must agree."""

    def __init__(self, files: Kinds, kind: str, data: bytes, is_sealed: bool) -> None:
        self.files, self.path = files, files.path(kind)
        self.kept = {path: path.read_bytes() for path in (self.path, files.path("commit"))}
        self.data, self.needs_commit = data, is_sealed and kind == "index"

    def __enter__(self) -> None:
        put(self.path, self.data)
        if self.needs_commit:
            fix_digests(self.files)

    def __exit__(self, *exc: object) -> None:
        for path, data in self.kept.items():
            put(path, data)


@pytest.mark.parametrize("kind", KINDS)
@fuzzed(250)
@given(mutation=mutations)
def test_a_mutated_file_is_exact_or_refused(kind: str, mutation: Mutation, mended: Kinds, small: tuple[Path, Any]) -> None:
    path, held = small
    with Damage(mended, kind, mutate(mended.path(kind).read_bytes(), mutation), False):
        exact_or_refused(f"{path}@3", held[3])
        exact_or_refused(f"{path}@kept", held[2])


@pytest.mark.parametrize("kind", ["run", "attempt", "commit", "pin", "note"])
@fuzzed(400)
@given(mutation=mutations)
def test_a_mutated_record_that_is_sealed_again_is_exact_or_refused(
    kind: str, mutation: Mutation, mended: Kinds, small: tuple[Path, Any]
) -> None:
    path, held = small
    with Damage(mended, kind, seal(mutate(mended.path(kind).read_bytes()[:-50], mutation)), True):
        exact_or_refused(f"{path}@3", held[3])
        if kind == "pin":
            one_of_them(f"{path}@kept", held)


def one_of_them(address: str, held: dict[int, dict[str, Any]]) -> None:
    """A pin that was sealed with another step in it may lead there, and nowhere else."""
    try:
        found = holdfast.open(address)
    except HoldfastError:
        return
    with found:
        step = found.step
    assert exact_or_refused(address, held[step])


@fuzzed(1500)
@given(mutation=mutations)
@example(mutation=[("overwrite", 0.0, 0.0, b"\xff" * 8)])
def test_a_mutated_index_with_right_digests_is_exact_or_refused(
    mutation: Mutation, mended: Kinds, small: tuple[Path, Any]
) -> None:
    path, held = small
    with Damage(mended, "index", mutate(mended.path("index").read_bytes(), mutation), True):
        if not exact_or_refused(f"{path}@3", held[3]):
            never_wrong(f"{path}@3", held[3])


@fuzzed(200)
@given(mutation=mutations, kind=st.sampled_from(["commit", "index", "data"]), is_sealed=st.booleans())
def test_resume_gives_an_exact_step_or_refuses(
    mutation: Mutation, kind: str, is_sealed: bool, mended: Kinds, small: tuple[Path, Any]
) -> None:
    path, _ = small
    data = mended.path(kind).read_bytes()
    changed = seal(mutate(data[:-50], mutation)) if kind == "commit" and is_sealed else mutate(data, mutation)
    before = set((path / "attempts").iterdir())
    with Damage(mended, kind, changed, is_sealed):
        state = live_state(BIG)
        checkpointer = Checkpointer(str(path), state)
        try:
            step = checkpointer.resume()
        except HoldfastError:
            step = None
        for attempt in set((path / "attempts").iterdir()) - before:
            attempt.unlink()
    if step is not None:
        assert state.touched is None
        expected = live_state(BIG)
        holdfast.restore(f"{path}@{step}", expected)
        assert state.digest() == expected.digest()


# --- no code from a file ----------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


def verify(path: Path) -> None:
    with holdfast.open(str(path)) as checkpoint:
        checkpoint.verify()


def look_at_everything(path: Path) -> None:
    """Every way of reading a run; what is refused is refused."""
    steps: list[Any] = [lambda s=step: holdfast.load(f"{path}@{s}") for step in (1, 2, 3, "kept", "best", "latest")]
    steps += [lambda: holdfast.restore(str(path), live_state(BIG)), lambda: holdfast.Run(str(path)).steps(abandoned=True)]
    steps += [lambda: verify(path), lambda: holdfast.Run(str(path)).prune(dry_run=True)]
    for read in steps:
        with contextlib.suppress(HoldfastError):
            read()


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_pickle_is_never_executed(kind: str, mended: Kinds, small: tuple[Path, Any], tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for protocol in (0, 2, 5):
        bomb = pickle.dumps(Bomb(marker), protocol)
        data = mended.path(kind).read_bytes()
        for planted in (bomb, bomb + data, data + bomb, data[:8] + bomb + data[8 + len(bomb) :], seal(bomb)):
            with Damage(mended, kind, planted, True):
                look_at_everything(small[0])
            assert not marker.exists()
    assert subprocess.run([sys.executable, "-c", f"import pickle; pickle.loads({bomb!r})"], check=False).returncode == 0
    assert marker.exists(), "the bomb itself does not work"


def test_a_pickle_among_the_values_stays_bytes(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    bomb = pickle.dumps(Bomb(marker))
    holdfast.save(str(tmp_path / "run"), {"extras": {"bytes": bomb, "text": bomb.decode("latin-1")}}, 1)
    assert holdfast.load(str(tmp_path / "run"))["extras"]["bytes"] == bomb
    assert not marker.exists()
