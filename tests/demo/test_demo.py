"""The demo does what it says, with real processes and kills; and it can fail: each of its checks is shown a fault."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.demo import run_demo
from holdfast.demo.data import Text, standard_library
from holdfast.demo.drive import Kill, Plan, Storm, TrainingFailed, aims, run_storm
from holdfast.demo.journal import Loss, Reader, Story, Writer
from holdfast.demo.model import Shape, Transformer
from holdfast.demo.plot import NoMatplotlib, plot
from holdfast.demo.verdict import judge


@pytest.mark.slow
def test_a_training_that_is_killed_ends_bit_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path, steps=40, kills=2, every=4, keep_files=True, as_json=True, parts=["one"]) == 0
    told = capsys.readouterr()
    result = json.loads(told.out)
    assert result["equal"]
    assert result["layouts"] is None
    one = result["one_process"]
    assert len(one["kills"]) == 2
    assert len(one["resumed"]) == 2
    assert one["differences"] == []
    assert one["losses_compared"] == 40 + one["steps_repeated"]
    assert told.err.count("killed at step") == 2
    assert "bit-equal" in told.err
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    latest = holdfast.Run(tmp_path / "work" / "run").latest()
    assert latest is not None
    assert latest.step == 40


@pytest.mark.slow
def test_a_training_process_that_fails_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run should be")
    with pytest.raises(TrainingFailed, match="run"):
        run_storm(Plan(4, 0, 2, 0), tmp_path / "journal", tmp_path / "run", lambda _: None, lambda _: None)


def test_files_of_an_earlier_demo_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work").mkdir()
    assert run_demo(tmp_path) == 2
    assert "earlier demo" in capsys.readouterr().err
    assert (tmp_path / "work").exists()


@pytest.mark.parametrize("asked", [{"steps": 0}, {"kills": -1}, {"every": 0}])
def test_a_demo_of_nothing_is_refused(asked: dict[str, int], tmp_path: Path) -> None:
    assert run_demo(tmp_path, **asked) == 2  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# --- the verdict ------------------------------------------------------------------------------------------------------


def story(*losses: float, starts: tuple[int, ...] = (0,), digest: str | None = "d") -> Story:
    done = [Loss(step, loss.hex(), 100.0 + step) for step, loss in enumerate(losses, 1)]
    return Story([(step, 100.0) for step in starts], done, digest, len(losses))


def test_equal_runs_have_no_differences() -> None:
    assert judge(story(3.0, 2.0), Storm(story(3.0, 2.0), []), 2).differences == ()


def test_one_bit_of_one_loss_is_a_difference() -> None:
    nearly = float.fromhex("0x1.0000000000001p+1")
    (line,) = judge(story(3.0, 2.0), Storm(story(3.0, nearly), []), 2).differences
    assert line.startswith("step 2: the loss is 0x1.0000000000001p+1")


def test_a_repeated_step_must_repeat_its_loss() -> None:
    again = story(3.0, 2.0)
    again.losses.insert(1, Loss(1, (3.5).hex(), 0.0))
    verdict = judge(story(3.0, 2.0), Storm(again, []), 2)
    assert (verdict.compared, verdict.repeated, len(verdict.differences)) == (3, 1, 1)


def test_a_missing_step_is_a_difference() -> None:
    (line,) = judge(story(3.0, 2.0), Storm(story(3.0), []), 2).differences
    assert line == "the interrupted run has no loss for step 2"


def test_another_final_state_is_a_difference() -> None:
    assert len(judge(story(3.0), Storm(story(3.0, digest="e"), []), 1).differences) == 1
    assert len(judge(story(3.0, digest=None), Storm(story(3.0, digest=None), []), 1).differences) == 1


def test_a_lost_commit_is_a_difference_even_when_all_losses_are_equal() -> None:
    kill = Kill(step=2, time=0.0, cut_save=None, committed=2)
    (line,) = judge(story(3.0, 2.0), Storm(story(3.0, 2.0, starts=(0, 1)), [kill]), 2).differences
    assert line.startswith("step 2 was committed")


# --- its parts --------------------------------------------------------------------------------------------------------


def test_the_kills_are_spread_over_the_run() -> None:
    for seed in range(20):
        plan = aims(Plan(steps=300, kills=5, every=10, seed=seed))
        steps = [aim.after_step for aim in plan]
        assert steps == sorted(steps)
        assert steps[0] > 0
        assert steps[-1] < 280
        assert sum(aim.inside_save for aim in plan) == 3


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader = Reader(path)
    assert reader.read().starts == []
    with Writer(path) as journal:
        journal.start(5)
        journal.loss(6, 0.1)
        with path.open("a") as file:
            file.write("loss 7 0x1.")
        assert reader.read().step == 6
        with path.open("a") as file:
            file.write("8p+0 1.5\n")
        assert reader.read().losses[-1] == Loss(7, "0x1.8p+0", 1.5)


def text(seed: int = 0) -> Text:
    return Text(bytes(range(256)) * 3, context=8, batch_size=5, seed=seed)


def test_the_data_goes_on_where_it_was_across_epochs() -> None:
    one = text()
    for _ in range(len(one) // 5 - 1):
        one.batch()
    two = text(seed=9)
    two.batch()
    two.load_state_dict(one.state_dict())
    for _ in range(4):
        assert torch.equal(torch.stack(one.batch()), torch.stack(two.batch()))
    assert one.consumed > len(one)


def test_an_epoch_has_each_sample_once() -> None:
    data = text()
    data.batch_size = len(data)
    epochs = [data.batch()[0] for _ in range(2)]
    assert not torch.equal(*epochs)
    assert sorted(map(tuple, epochs[0].tolist())) == sorted(map(tuple, epochs[1].tolist()))


def test_reading_data_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    text().batch()
    assert torch.equal(before, torch.get_rng_state())


def test_a_position_in_another_text_is_refused() -> None:
    other = Text(b"another text, long enough for a window", context=8, batch_size=1, seed=0)
    with pytest.raises(ValueError, match="another text"):
        other.load_state_dict(text().state_dict())


def test_the_text_is_the_standard_library() -> None:
    assert b"import" in standard_library(100_000)
    assert len(standard_library(100_000)) == 100_000


def test_the_model_looks_at_no_later_token() -> None:
    model = Transformer(Shape(context=16, width=24, heads=2, layers=2)).eval()
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 10:] += 1
    ours, theirs = model(tokens)[0], model(changed)[0]
    assert torch.equal(ours[:10], theirs[:10])
    assert not torch.equal(ours[10:], theirs[10:])


def test_the_picture_without_matplotlib_is_an_error_that_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NoMatplotlib, match="pip install"):
        plot(tmp_path / "losses.png", (story(3.0), Storm(story(3.0), [])))


def test_the_picture_shows_both_kinds_of_kill(tmp_path: Path) -> None:
    kills = [Kill(2, 102.0, None, 1), Kill(3, 103.0, 3, 1)]
    storm = Storm(dataclasses.replace(story(3.0, 2.5, 2.0), starts=[(0, 100.0), (1, 102.5), (1, 104.0)]), kills)
    plot(tmp_path / "losses.png", (story(3.0, 2.5, 2.0), storm))
    assert (tmp_path / "losses.png").stat().st_size > 10_000
