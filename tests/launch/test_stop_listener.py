"""The listener of a job hears the stop signals that come while no rank is there, and no rank starts after one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpc_train.launch.slurm.batch_script import shell_functions
from hpc_train.launch.slurm.supervisor.supervise import STOP_WORD, is_stop_recorded
from hpc_train.training.records.run_records import REQUEUE_MARKER

SCRIPT = """
run={folder} logs={folder} job=7 SLURMD_NODENAME=node1 hpc_max_attempts=3 hpc_chain=1 hpc_report=(true)
hpc_restart=(touch {folder}/decided) guard_ping_seconds=0.05
hpc_watch=(bash -c 'grep -s . /dev/fd/$4 >{folder}/seen; until grep -qs stop /dev/fd/$4; do sleep 0.05; done' _)
squeue() {{ echo RUNNING None; }}
sinfo() {{ :; }}
srun() {{
  echo "${{*:1:11}}" >>{folder}/sruns
  while [ "$1" != bash ]; do shift; done
  env --default-signal=TERM,USR2 "$@" <&0 & # as slurmstepd starts a task, whatever its srun ignores
  echo $! >{folder}/.task && mv {folder}/.task {folder}/task
  wait
}}
signal_listener() {{
  until [ -s {folder}/task ]; do sleep 0.02; done
  sleep 0.1
  kill -$1 $(cat {folder}/task)
}}
wait_for_stop() {{ until is_stop_asked; do sleep 0.02; done; }}
"""


def run_script(folder: Path, lines: str) -> list[str]:
    """Run lines of a batch script, and return what they print."""
    text = f"{shell_functions()}\n{SCRIPT.format(folder=folder)}\n{lines}"
    done = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True, timeout=20)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["TERM", "USR2"])
def test_a_signal_to_the_steps_of_a_job_is_heard_while_no_rank_is_there(tmp_path: Path, name: str) -> None:
    """And twice: the listener stays. It ends with the script."""
    lines = f"""
    start_listener
    is_stop_asked && echo "asked too early"
    signal_listener {name}
    wait_for_stop
    signal_listener {name}
    sleep 0.2
    grep -c . "/dev/fd/$stop_record"
    end_guards
    jobs -pr
    """
    assert run_script(tmp_path, lines) == ["2"]
    (step,) = (tmp_path / "sruns").read_text().splitlines()
    assert {"--overlap", "--nodelist=node1", "--job-name=listener"} < set(step.split())


def test_nobody_listens_where_nobody_watches(tmp_path: Path) -> None:
    assert run_script(tmp_path, 'hpc_watch=(); start_listener; is_stop_asked || echo "not asked"; end_guards') == [
        "not asked"
    ]
    assert not (tmp_path / "sruns").exists()


def test_no_rank_starts_after_the_signal_and_the_job_is_requeued(tmp_path: Path) -> None:
    lines = """
    start_listener
    signal_listener TERM
    wait_for_stop
    run_ranks ranks_srun
    settle_attempt $?
    echo "$code $requeue $next"
    end_guards
    """
    why = "asked to stop before the ranks had started"
    assert run_script(tmp_path, lines) == [f"75 {why} requeue"]
    assert (tmp_path / REQUEUE_MARKER).exists()
    assert not (tmp_path / "decided").exists(), "it is no fault"


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
@pytest.mark.parametrize(("log", "then"), [("", "requeue"), ("task-0.log", "restart")])
def test_ranks_that_the_signal_has_ended_before_they_had_begun_are_no_fault(
    tmp_path: Path, log: str, then: str, state: str
) -> None:
    """slurmstepd has ended them with exit code 1, before they could do anything about the signal.

    SIGNALING: not all nodes have passed the signal on yet.
    """
    (tmp_path / "srun.err").write_text("srun: error: node1: task 0: Exited with exit code 1\n")
    if log:
        (tmp_path / log).touch()
    lines = f"squeue() {{ echo {state} None; }}; "
    lines += "decide_after_fault() { next=restart; }; stop_asked=1; settle_attempt 1; echo $next $code"
    assert run_script(tmp_path, lines) == [f"{then} 1"]


def test_the_supervisor_gets_the_record(tmp_path: Path) -> None:
    lines = """
    ranks() { until [ -e $logs/seen ]; do sleep 0.02; done; record_stop; sleep 0.2; }
    step=()
    start_listener
    run_ranks ranks
    end_guards
    """
    run_script(tmp_path, lines)
    assert (tmp_path / "seen").read_text() == ""


def test_a_record_is_read_as_it_is_written(tmp_path: Path) -> None:
    with (tmp_path / "record").open("w+") as record:
        assert not is_stop_recorded(record.fileno())
        shown = subprocess.run(
            ["bash", "-c", f"{shell_functions()}\nstop_record={record.fileno()}; record_stop"],
            pass_fds=[record.fileno()],
            check=True,
        )
        assert shown.returncode == 0
        assert is_stop_recorded(record.fileno())
        assert (tmp_path / "record").read_bytes() == STOP_WORD + b"\n"
    assert not is_stop_recorded(None)
