"""Each example is a whole program: it runs in a process of its own, and does what its first lines say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import holdfast

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def run_example(name: str, *argv: object) -> str:
    """What it printed; it must succeed."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(name: str, ranks: int, *argv: object) -> list[str]:
    """The torchrun of an example."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, str(EXAMPLES / name), *map(str, argv)]


def run_ranks(command: list[str]) -> str:
    """What the ranks printed; all must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ONE_THREAD)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def kill_ranks(command: list[str], when: str) -> str:
    """SIGKILL for one rank once a line matches `when`; torchrun ends the others. What was printed until all were gone."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ONE_THREAD) as torchrun:
        assert torchrun.stdout is not None
        assert torchrun.stderr is not None
        told = ""
        for line in torchrun.stdout:
            told += line
            if re.match(when, line):
                psutil.Process(torchrun.pid).children()[-1].send_signal(signal.SIGKILL)
                told += torchrun.communicate(timeout=60)[0]
                return told
        raise AssertionError(f"nothing printed matches {when}:\n{told}\n{torchrun.stderr.read()[-6000:]}")


def losses_of(told: str, prefix: str = "") -> dict[int, float]:
    """The loss by step."""
    found = re.findall(rf"^{prefix}step (\d+) loss (-?[\d.]+)", told, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def latest_step(run: Path) -> int:
    latest = holdfast.Run(run).latest()
    assert latest is not None
    return latest.step


def test_every_example_is_tested_here() -> None:
    tested = set(re.findall(r"""(?:run_example|launch)\("(\w+\.py)\"""", Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_train_goes_on_where_it_was_and_ends_as_if_never_stopped(tmp_path: Path) -> None:
    whole = run_example("train.py", tmp_path / "whole", "--steps", 90)
    assert "starting at step 0 of 90" in whole
    run_example("train.py", tmp_path / "parts", "--steps", 50)
    parts = run_example("train.py", tmp_path / "parts", "--steps", 90)
    assert "starting at step 50 of 90" in parts
    assert parts.splitlines()[-1] == whole.splitlines()[-1]
    assert latest_step(tmp_path / "parts") == 90


def test_train_survives_sigkill(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, str(EXAMPLES / "train.py"), str(run), "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            committed = holdfast.Run(run).wait(after=100, timeout=40).step
            time.sleep(0.3)
        finally:
            process.send_signal(signal.SIGKILL)
    resumed_at = latest_step(run)
    assert resumed_at >= committed
    assert f"starting at step {resumed_at} of" in run_example("train.py", run, "--steps", resumed_at + 1)


def test_lora_begins_with_the_base_and_stores_it_once(tmp_path: Path) -> None:
    told = run_example("lora.py", tmp_path / "run")
    assert "starting at step 0: 12 names filled, 12 waived" in told
    megabytes = [float(size) for size in re.findall(r"([\d.]+) MB written", told)]
    assert len(megabytes) == 4
    assert megabytes[0] > 6
    assert max(megabytes[1:]) < megabytes[0] / 10
    assert "0.bias, 0.lora_a, 0.lora_b, 0.weight" in told
    assert latest_step(tmp_path / "run") == 40


def test_evaluate_scores_new_steps_and_notes_them(tmp_path: Path) -> None:
    told = run_example("evaluate.py", tmp_path / "run")
    scored = [int(step) for step in re.findall(r"^step (\d+): 4 tensors loaded", told, re.MULTILINE)]
    assert scored == sorted(set(scored))
    assert scored[-1] == 60
    assert len(scored) >= 3
    assert "held_out" in holdfast.Run(tmp_path / "run").steps()[-1].metrics
    assert "the best of the steps still there" in told


@pytest.mark.timeout(300)
def test_fsdp_tp_is_killed_on_four_ranks_and_two_ranks_go_on_with_the_same_losses(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = kill_ranks(launch("fsdp_tp.py", 4, run, "--steps", 1000), "step 12 ")
    assert "resumed from step 0 of 1000 on 2 x 2 ranks, at sample 0" in before
    assert latest_step(run) >= 10
    assert holdfast.open(run).verify() == []

    holdfast.Run(run).rollback(5)  # to see the same steps again
    after = run_ranks(launch("fsdp_tp.py", 2, run, "--steps", 12))
    assert "resumed from step 5 of 12 on 2 x 1 ranks, at sample 120" in after
    assert "finished at step 12, at sample 288" in after
    again, first = losses_of(after), losses_of(before)
    assert sorted(again) == list(range(6, 13))
    assert again == pytest.approx({step: first[step] for step in again}, rel=1e-4)


@pytest.mark.timeout(300)
def test_pipeline_goes_on_with_other_numbers_of_ranks_as_if_never_stopped(tmp_path: Path) -> None:
    whole = losses_of(run_example("pipeline.py", tmp_path / "whole", "--steps", 20))
    run = tmp_path / "run"
    first = kill_ranks(launch("pipeline.py", 2, run, "--steps", 1000), "step 8 ")
    assert "rank 0 of 2 resumed from step 0 of 1000 with the layers 0 1 4 5" in first
    assert "rank 1 of 2 resumed from step 0 of 1000 with the layers 2 3 6 7" in first

    at = latest_step(run)
    assert at >= 5
    second = run_ranks(launch("pipeline.py", 4, run, "--steps", at + 3))
    assert f"rank 2 of 4 resumed from step {at} of {at + 3} with the layers 4 5" in second
    third = run_example("pipeline.py", run, "--steps", at + 6)
    assert f"rank 0 of 1 resumed from step {at + 3} of {at + 6} with the layers 0 1 2 3 4 5 6 7" in third
    for told in map(losses_of, (first, second, third)):
        assert told == pytest.approx({step: whole.get(step, loss) for step, loss in told.items()}, rel=1e-4)
    assert sorted({n.split(".")[2] for n in holdfast.open(run).names if n.startswith("model.layers.")}) == list("01234567")


@pytest.mark.timeout(300)
def test_rl_actor_and_critic_with_one_optimizer_play_the_same_games_after_a_kill(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = kill_ranks(launch("rl.py", 2, run, "--steps", 1000), "step 12 ")
    assert latest_step(run) >= 10
    holdfast.Run(run).rollback(5)  # to see the same steps again
    after = run_ranks(launch("rl.py", 2, run, "--steps", 12))
    assert "rank 0 of 2 resumed from step 5 of 12" in after
    again, first = losses_of(after), losses_of(before)
    assert sorted(again) == list(range(6, 13))
    assert again == {step: first[step] for step in again}
    names = holdfast.open(run).names
    assert {"optimizer.actor.0.weight.exp_avg", "optimizer.critic.0.weight.exp_avg", "games.rank.1.at"} <= set(names)


@pytest.mark.timeout(300)
def test_rl_apart_resumes_at_a_step_that_both_have(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = kill_ranks(launch("rl.py", 3, run, "--apart", "--steps", 1000), "critic step 12 ")
    assert min(latest_step(run / "actor"), latest_step(run / "critic")) >= 5
    holdfast.Run(run / "critic").rollback(5)  # now the actor is ahead
    after = run_ranks(launch("rl.py", 3, run, "--apart", "--steps", 12))
    assert "rank 0 of 3 resumed the actor from step 5 of 12" in after
    assert "rank 2 of 3 resumed the critic from step 5 of 12" in after
    for model in ("actor ", "critic "):
        again, first = losses_of(after, model), losses_of(before, model)
        assert sorted(again) == list(range(6, 13))
        assert {step: loss for step, loss in again.items() if step in first} == {s: first[s] for s in again if s in first}
    assert "games.rank.1.at" in holdfast.open(run / "actor").names
