"""`holdfast demo`: its arguments reach the demo, and its exit code comes back. The demo itself has tests of its own."""

from __future__ import annotations

import pytest

import holdfast.demo


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What the demo was asked for, instead of being run."""
    calls: list[tuple] = []

    def run_demo(*args: object, **options: object) -> int:
        calls.append((args, options))
        return 5

    monkeypatch.setattr(holdfast.demo, "run_demo", run_demo)
    return calls


def test_arguments_and_exit_code_pass(command, asked) -> None:
    ended = command(
        "demo", "there", "--steps", 20, "--kills", 1, "--every", 4, "--seed", 7, "--keep-files", "--json", "--part", "one"
    )
    assert ended.code == 5
    assert asked == [(("there", 20, 1, 7, True), {"every": 4, "as_json": True, "parts": ["one"]})]


def test_the_defaults_are_those_of_the_demo(command, asked) -> None:
    from holdfast.demo import show

    command("demo")
    assert asked == [
        ((None, show.STEPS, show.KILLS, show.SEED, False), {"every": show.EVERY, "as_json": False, "parts": show.PARTS})
    ]
