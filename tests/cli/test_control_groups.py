"""Whether `holdfast doctor` says that the agent is in the control group of its job: versions 1 and 2, containers, unknown."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.agent.client import status_of
from holdfast.cli.control_groups import check_control_group, groups_of
from holdfast.run.status import RankStatus, Status

MACHINE, CONTAINER = "cgroup:[4026531835]", "cgroup:[4026532999]"
JOB = "/system.slice/slurmstepd.scope/job_7"
SLURM_1 = "4:memory:/slurm/job_7/step_0\n3:freezer:/slurm/job_7/step_0\n1:name=systemd:/system.slice/slurmd.service\n0::/\n"
AGENT, TRAINER = 41, 42
Proc = Callable[..., Path]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """`proc({"self": ...}, namespace)`: what /proc says of the control groups of some processes; 41 is an agent."""

    def make(groups: Mapping[int | str, str], namespace: str = MACHINE) -> Path:
        for pid, text in groups.items():
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cgroup").write_text(text)
            (tmp_path / str(pid) / "cmdline").write_bytes(b"python\0-m\0holdfast.agent.serve" if pid == AGENT else b"python")
        (tmp_path / "self" / "ns").mkdir(parents=True, exist_ok=True)
        (tmp_path / "self" / "ns" / "cgroup").symlink_to(namespace)
        return tmp_path

    return make


def running(*trainers: int) -> Status:
    ranks = tuple(RankStatus(rank, pid) for rank, pid in enumerate(trainers))
    return Status(pid=AGENT, ranks=ranks, arena_bytes=6_000_000_000)


@pytest.mark.parametrize(
    "groups",
    [f"0::{JOB}/step_0/user/task_0\n", SLURM_1, "12:cpu,cpuacct:/\n5:memory:/docker/ab\n0::/\n"],
    ids=["version 2", "version 1", "memory only"],
)
def test_an_agent_in_the_group_of_its_trainer_is_a_warning_with_what_to_do(proc: Proc, groups: str) -> None:
    finding = check_control_group("/runs/gpt", running(TRAINER), proc({AGENT: groups, TRAINER: groups}))
    assert finding.status == "warning"
    assert f"as trainer {TRAINER} is: a limit on the job's memory counts that of the agent" in finding.detail
    assert ("what ends the group ends the agent" in finding.detail) == ("docker" not in groups)
    assert "its versions take 6 GB" in finding.detail
    assert "`holdfast agent serve /runs/gpt` in a service outside of the job" in finding.detail
    assert finding.facts["inside"] is True


@pytest.mark.parametrize(
    ("agent", "trainer"),
    [
        ("0::/system.slice/holdfast.service\n", f"0::{JOB}/step_0\n"),
        (f"0::{JOB}0/step_0\n", f"0::{JOB}\n"),
        (f"0::{JOB}\n", f"0::{JOB}/step_0\n"),
        (SLURM_1.replace("/slurm/job_7/step_0", "/").replace("slurmd", "holdfast"), SLURM_1),
    ],
    ids=["version 2", "a name that begins alike", "above the trainer", "version 1"],
)
def test_an_agent_outside_is_fine(proc: Proc, agent: str, trainer: str) -> None:
    finding = check_control_group("/runs/gpt", running(TRAINER), proc({AGENT: agent, TRAINER: trainer}))
    assert (finding.status, finding.facts["inside"]) == ("ok", False)
    assert "outlives them" in finding.detail


def test_an_agent_that_is_in_the_group_of_one_of_several_trainers_is_a_warning(proc: Proc) -> None:
    first, second = f"0::{JOB}/step_0/task_0\n", f"0::{JOB}/step_0/task_1\n"
    found = check_control_group("/runs/gpt", running(TRAINER, 43), proc({AGENT: second, TRAINER: first, 43: second}))
    assert (found.status, "as trainer 43 is" in found.detail) == ("warning", True)


def test_where_no_agent_saves_it_is_told_of_one_that_would_be_started_from_here(proc: Proc) -> None:
    finding = check_control_group(None, None, proc({"self": f"0::{JOB}/step_0\n"}))
    assert finding.status == "warning"
    assert f"an agent that is started from here is in {JOB}/step_0, with its job" in finding.detail
    assert "`holdfast agent serve RUN`" in finding.detail


def test_a_machine_without_control_groups_has_nothing_to_warn_of(proc: Proc) -> None:
    finding = check_control_group(None, None, proc({"self": "4:memory:/\n1:name=systemd:/\n0::/\n"}))
    assert (finding.status, finding.facts["inside"]) == ("ok", False)


def test_the_root_of_a_container_is_a_group(proc: Proc) -> None:
    finding = check_control_group(None, None, proc({"self": "0::/\n"}, CONTAINER))
    assert (finding.status, finding.facts["inside"]) == ("warning", True)
    assert "is in that of this container" in finding.detail


def test_an_agent_outside_of_the_container_of_its_trainer_is_fine(proc: Proc) -> None:
    finding = check_control_group(
        "/r", running(TRAINER), proc({AGENT: "0::/../holdfast.service\n", TRAINER: "0::/\n"}, CONTAINER)
    )
    assert (finding.status, finding.facts["inside"]) == ("ok", False)


def test_a_login_is_no_job(proc: Proc) -> None:
    finding = check_control_group(None, None, proc({"self": "0::/user.slice/user-1000.slice/session-3.scope\n"}))
    assert (finding.status, finding.facts["inside"]) == ("ok", True)


def test_what_cannot_be_told_is_said_to_be_unknown(proc: Proc) -> None:
    root = proc({TRAINER: f"0::{JOB}\n", "self": "not a line of the kernel\n"})
    for status in (None, running(TRAINER)):
        finding = check_control_group("/runs/gpt", status, root)
        assert (finding.status, finding.facts["inside"]) == ("ok", None)
        assert finding.detail.startswith("unknown")


def test_another_process_that_has_the_number_of_the_agent_is_not_taken_for_it(proc: Proc) -> None:
    root = proc({AGENT: f"0::{JOB}\n", TRAINER: f"0::{JOB}\n"})
    (root / str(AGENT) / "cmdline").write_bytes(b"/bin/bash")
    assert check_control_group("/runs/gpt", running(TRAINER), root).facts["inside"] is None


@pytest.mark.usefixtures("in_background")
def test_of_a_job_that_runs_it_compares_its_real_processes(command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with holdfast.Checkpointer(run, {"w": torch.ones(3000)}, save=holdfast.Every(steps=1)) as ckpt:
        ckpt.resume()
        ckpt.step(1).wait("durable", 30)
        status = status_of(str(run))
        [finding] = [f for f in command("doctor", run, "--quick", "--json").json["findings"] if f["name"] == "cgroup"]
    mine = groups_of("self")
    facts = finding["facts"]
    if mine is None:
        pytest.skip("this system does not tell the control groups of processes")
    assert (facts["agent_pid"], facts["trainer_pids"]) == (status.pid, [os.getpid()])
    assert (facts["agent"], facts["inside"]) == (mine.name, mine.ends_with(mine) or mine.counts_for(mine))
    assert finding["status"] == ("warning" if facts["inside"] else "ok")
