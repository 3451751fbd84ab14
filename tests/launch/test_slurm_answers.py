"""What Slurm's commands print, recorded from real ones (22.05) and as other versions differ, read as plain data."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpc_train.launch.slurm import job_records
from hpc_train.launch.slurm.job_records import JobRecord, parse_exit_code
from hpc_train.launch.slurm.polling import Backoff, poll_jobs
from hpc_train.launch.slurm.slurm_cli import Answer, client_environment
from hpc_train.launch.state.state_names import State, from_slurm_state

SQUEUE = """\
7|7|COMPLETED|node[1-2]|None
24|24|CANCELLED||DependencyNeverSatisfied
19|19|COMPLETING|node1|NonZeroExitCode
52_1|54|FAILED|node1|NonZeroExitCode
52_2|55|FAILED|node1|JobLaunchFailure
26|26|NODE_FAIL|node4|NodeDown
51|51|PENDING||Dependency
2_2|2|PENDING||JobArrayTaskLimit
52_4|52|RUNNING|node2|None
16|16|PENDING||BeginTime
25|25|TIMEOUT|node1|TimeLimit
"""
OTHER_SQUEUE = """\
8_[4-9%2]|8|PENDING||Resources
9|9|PENDING||ReqNodeNotAvail, UnavailableNodes:gpu[07,09]
10|10|CONFIGURING|gpu[0001-0002,0007]|None
"""
SACCT = """\
1|1|RUNNING|0:0|node[1-2]
8|8|CANCELLED by 0|0:0|None assigned
9|9|NODE_FAIL|0:0|node1
28|28|FAILED|0:9|node1
52_1|54|FAILED|4:0|node1
16|16|REQUEUED|0:0|node1
25|25|TIMEOUT|0:0|node1
2_[2-3%2]|2|PENDING|0:0|None assigned
"""
SCONTROL = (
    "JobId=55 ArrayJobId=52 ArrayTaskId=2 ArrayTaskThrottle=3 JobName=arr.sh UserId=root(0) GroupId=root(0) "
    "MCS_label=N/A Priority=4294901711 Nice=0 Account=dev QOS=normal JobState=FAILED Reason=JobLaunchFailure "
    "Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:9 RunTime=00:00:01 TimeLimit=00:10:00 "
    "TimeMin=N/A SubmitTime=2026-11-21T14:45:04 EligibleTime=2026-11-21T14:45:04 AccrueTime=Unknown "
    "StartTime=2026-11-21T14:45:04 EndTime=2026-11-21T14:45:05 Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
    "Scheduler=Backfill Partition=batch AllocNode:Sid=localhost:32477 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=node1 BatchHost=node1 NumNodes=1 NumCPUs=1 NumTasks=1 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=1,mem=1G,node=1,billing=1 Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=* MinCPUsNode=1 "
    "MinMemoryCPU=1G MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 "
    "Licenses=(null) Network=(null) Command=/data/a run/x.sh 3 WorkDir=/data/a run StdErr=/data/a run/logs/job-55.log "
    "StdIn=/dev/null StdOut=/data/a run/logs/job-55.log Power= \n"
)
# 23.11 and later: SubmitLine, TresPerTask, OOMKillStep, no Power=; 24.05 and later: licenses apart.
NEWER_SCONTROL = (
    "JobId=4711 JobName=hpc_train UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1 Nice=0 Account=a QOS=q "
    "JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 "
    "ExitCode=0:125 RunTime=00:10:01 NodeList=gpu[01-04] BatchHost=gpu01 NumNodes=4 StepMgrEnabled=Yes "
    "ReqTRES=cpu=8,mem=8G,node=4,billing=8,gres/gpu=16 AllocTRES=cpu=8,mem=8G,node=4,billing=8,gres/gpu=16 "
    "LicensesAlloc=(null) Command=/data/run/.submitit/s.sh SubmitLine=sbatch --export=A=b /data/run/.submitit/s.sh "
    "WorkDir=/data StdErr= StdIn=/dev/null StdOut=/data/run/logs/job-%j.log TresPerNode=gres/gpu:4 OOMKillStep=0 \n"
)


def test_squeue() -> None:
    found = {record.job_id: record for record in job_records.parse_squeue(SQUEUE + OTHER_SQUEUE)}
    assert found["7"] == JobRecord("7", "7", "COMPLETED", "squeue", ("node1", "node2"))
    assert found["52_2"] == JobRecord("52_2", "55", "FAILED", "squeue", ("node1",), "JobLaunchFailure")
    assert found["52_4"].raw_id == "52"
    assert found["51"] == JobRecord("51", "51", "PENDING", "squeue", (), "Dependency")
    assert found["9"].reason == "ReqNodeNotAvail, UnavailableNodes:gpu[07,09]"
    assert found["10"].nodes == ("gpu0001", "gpu0002", "gpu0007")
    assert "8_[4-9%2]" not in found


def test_sacct() -> None:
    found = {record.job_id: record for record in job_records.parse_sacct(SACCT)}
    assert sorted(found) == ["1", "16", "25", "28", "52_1", "8", "9"]
    assert found["28"] == JobRecord("28", "28", "FAILED", "sacct", ("node1",), "", 137)
    assert found["52_1"].exit_code == 4
    assert found["8"].nodes == ()
    assert from_slurm_state(found["8"].state) is State.CANCELLED


def test_scontrol() -> None:
    element, newer = job_records.parse_scontrol(SCONTROL + NEWER_SCONTROL)
    assert element == JobRecord("52_2", "55", "FAILED", "scontrol", ("node1",), "JobLaunchFailure", 137)
    assert newer.job_id == "4711"
    assert newer.nodes == ("gpu01", "gpu02", "gpu03", "gpu04")
    assert (newer.state, newer.reason, newer.exit_code) == ("OUT_OF_MEMORY", "OutOfMemory", 253)
    assert job_records.parse_scontrol_fields(SCONTROL)["StdOut"] == "/data/a run/logs/job-55.log"
    assert job_records.parse_scontrol_fields(SCONTROL)["WorkDir"] == "/data/a run"


@pytest.mark.parametrize(
    ("text", "code"), [("0:0", 0), ("3:0", 3), ("0:15", 143), ("1:9", 137), ("", None), ("x", None)]
)
def test_exit_codes(text: str, code: int | None) -> None:
    assert parse_exit_code(text) == code


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 1000", State.CANCELLED),
        ("CANCELLED+", State.CANCELLED),
        ("OUT_OF_MEMORY", State.OUT_OF_MEMORY),
        ("REQUEUE_HOLD", State.REQUEUED),
        ("COMPLETING", State.RUNNING),
        ("RUNNING,COMPLETING", State.RUNNING),
        ("DEADLINE", State.TIMEOUT),
        ("BOOT_FAIL", State.NODE_FAIL),
        ("PREEMPTED", State.PREEMPTED),
        ("SOMETHING_NEW", State.UNKNOWN),
        ("", State.UNKNOWN),
    ],
)
def test_words(word: str, state: State) -> None:
    assert from_slurm_state(word) is state


class Slurm:
    """Answers from a script, and remembers what it was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers, self.asked = answers, list[str]()

    def __call__(self, command: Sequence[str]) -> Answer:
        self.asked.append(" ".join(command))
        return self.answers.get(command[0], Answer(127, err=f"{command[0]} is not on the PATH"))


FORGOTTEN = Answer(1, err="slurm_load_jobs error: Invalid job id specified\n")
NO_ACCOUNTING = Answer(1, err="Slurm accounting storage is disabled\n")
DOWN = Answer(1, err="slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")


def test_a_thousand_elements_are_one_question() -> None:
    lines = "".join(f"12_{index}|{13 + index}|RUNNING|node1|None\n" for index in range(1000))
    slurm = Slurm(squeue=Answer(0, lines))
    polled = poll_jobs([f"12_{index}" for index in range(1000)], slurm)
    assert len(polled.records) == 1000
    assert [line.split()[0] for line in slurm.asked] == ["squeue"]
    assert "--jobs=12 " in slurm.asked[0]


def test_what_slurm_still_knows_of_an_end_is_asked_of_scontrol_and_not_of_accounting() -> None:
    slurm = Slurm(squeue=Answer(0, SQUEUE), scontrol=Answer(0, SCONTROL))
    polled = poll_jobs(["52_2", "7"], slurm)
    assert polled.records["52_2"].exit_code == 137
    assert [line.split()[0] for line in slurm.asked] == ["squeue", "scontrol"]


def test_what_slurm_has_forgotten_accounting_may_know() -> None:
    slurm = Slurm(squeue=FORGOTTEN, sacct=Answer(0, SACCT))
    polled = poll_jobs(["28", "999"], slurm)
    assert polled.slurm_error is None
    assert list(polled.records) == ["28"]
    assert [line.split()[0] for line in slurm.asked] == ["squeue", "sacct"]


def test_without_accounting_what_slurm_has_forgotten_nobody_knows() -> None:
    polled = poll_jobs(["28"], Slurm(squeue=FORGOTTEN, sacct=NO_ACCOUNTING))
    assert (polled.records, polled.slurm_error) == ({}, None)


def test_a_controller_that_is_down_is_no_answer() -> None:
    polled = poll_jobs(["28"], Slurm(squeue=DOWN, sacct=NO_ACCOUNTING))
    assert polled.slurm_error == "Slurm does not answer: Unable to contact slurm controller (connect failure)"
    assert poll_jobs(["28"], Slurm(squeue=DOWN, sacct=Answer(0, SACCT))).records["28"].exit_code == 137


def test_no_job_is_no_question() -> None:
    slurm = Slurm()
    assert poll_jobs([], slurm).records == {}
    assert slurm.asked == []


def test_slurm_is_asked_rarer_and_rarer_until_something_changes() -> None:
    backoff = Backoff(2, 60)
    assert [backoff.seconds(False) for _ in range(7)] == [2, 4, 8, 16, 32, 60, 60]
    assert backoff.seconds(True) == 2


def test_clients_do_not_inherit_a_job_or_a_taste() -> None:
    passed_on = {"SLURM_CONF": "/etc/x", "PATH": "/bin", "MYSLURM": "1"}
    dropped = {"SLURM_JOB_ID": "1", "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "x", "SBATCH_ACCOUNT": "a", "PMI_RANK": "0"}
    assert client_environment(passed_on | dropped) == passed_on
