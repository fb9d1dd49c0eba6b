"""`holdfast pin`."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast


def test_a_pinned_step_has_a_name_and_survives_pruning(command, run: Path) -> None:
    ended = command("pin", f"{run}@10", "paper")
    assert (ended.code, ended.out) == (0, f"step 10 is now {run}@paper\n")
    command("prune", run, "--last", 1)
    assert command("ls", f"{run}@paper", "--json").json["steps"][0]["step"] == 10


def test_without_a_step_the_latest_is_pinned(command, run: Path) -> None:
    found = command("pin", run, "newest", "--json").json
    assert found["pinned"] == "newest"
    assert found["pins"] == [{"name": "newest", "step": 30, "attempt": 1}]


def test_without_a_name_the_pins_are_listed(command, run: Path) -> None:
    assert command("pin", run).out == f"{run} has no pins\n"
    command("pin", f"{run}@10", "a")
    command("pin", f"{run}@10", "b")
    command("pin", f"{run}@20", "c")
    assert [line.split()[:2] for line in command("pin", run).out.splitlines()[1:]] == [["a", "10"], ["b", "10"], ["c", "20"]]


def test_a_pin_is_taken_off_by_its_name(command, run: Path) -> None:
    command("pin", f"{run}@10", "paper")
    ended = command("pin", run, "--remove", "paper", "--json")
    assert (ended.code, ended.json["removed"], ended.json["pins"]) == (0, "paper", [])
    assert command("ls", f"{run}@paper").code == 3


def test_pinning_a_step_twice_by_one_name_is_no_error(command, run: Path) -> None:
    assert command("pin", f"{run}@10", "paper").code == command("pin", f"{run}@10", "paper").code == 0


def test_a_name_of_another_step_is_refused(command, run: Path) -> None:
    command("pin", f"{run}@10", "paper")
    ended = command("pin", f"{run}@20", "paper")
    assert ended.code == 6
    assert "already names step 10" in ended.err
    assert holdfast.Run(run).find("paper").step == 10


@pytest.mark.parametrize("name", ["20", "latest", "best", "a/b", "naïve", ""])
def test_a_name_that_could_be_mistaken_is_refused(command, run: Path, name: str) -> None:
    assert command("pin", f"{run}@20", name).code == 6


def test_a_pin_that_is_not_there_cannot_be_taken_off(command, run: Path) -> None:
    ended = command("pin", run, "--remove", "paper")
    assert ended.code == 3
    assert "no pin paper" in ended.err


@pytest.mark.parametrize("words", [["{run}@10"], ["{run}@10", "--remove", "a"], ["{run}", "a", "--remove", "b"]])
def test_an_unclear_wish_is_a_usage_error(command, run: Path, words) -> None:
    assert command("pin", *(word.format(run=run) for word in words)).code == 2
