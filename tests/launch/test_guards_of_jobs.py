"""The guards of a job, in shell, give it back to the queue where its batch script is gone, and end with the script."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from hpc_train.launch.slurm.batch_script import shell_functions
from hpc_train.launch.slurm.slurm_cli import Answer
from hpc_train.launch.slurm.supervisor import lost_script
from hpc_train.resilience.exclusion import read_strikes

SLURM = """
run={folder}/run job=7 SLURM_JOB_NODELIST=node[1-4] SLURMD_NODENAME=node1 hpc_spares=1 hpc_python_path=
SLURM_NTASKS_PER_NODE=4
mkdir -p $run/logs/0 $run/logs/1
squeue() {{ echo RUNNING; }}
export -f squeue
scontrol() {{ printf 'node%d\\n' 1 2 3 4; }}
srun() {{
  echo "${{*:1:9}} $SLURM_NTASKS_PER_NODE" >>{folder}/sruns
  while [ "$1" != bash ]; do shift; done
  "$@"
}}
wait_for_guards() {{ until [ "$(wc -l <{folder}/sruns)" = 2 ]; do sleep 0.02; done 2>/dev/null; }}
guard_ping_seconds=0.05 guard_silent_seconds=0.3
cat >{folder}/lost_script <<END
echo "\\$1" >>{folder}/asked
exit {code}
END
hpc_guard=(bash {folder}/lost_script)
"""
LEFT = 75
"""Exit code of the command of a guard once the job is requeued."""


def run_guards(folder: Path, lines: str, code: int = LEFT) -> list[str]:
    """Run lines of a batch script with guards, and return which log directories their commands were asked about."""
    text = f"{shell_functions()}\n{SLURM.format(folder=folder, code=code)}\n{lines}"
    subprocess.run(["bash", "-c", text], check=True, capture_output=True, timeout=20)
    asked = folder / "asked"
    return asked.read_text().splitlines() if asked.exists() else []


def test_guards_are_on_the_last_nodes_and_end_with_the_script(tmp_path: Path) -> None:
    lines = f"""
    start_guards
    wait_for_guards
    sleep 0.5
    end_guards
    jobs -pr >{tmp_path}/left
    """
    assert run_guards(tmp_path, lines) == []
    steps = sorted((tmp_path / "sruns").read_text().splitlines())
    assert ["--nodelist=node3" in step for step in steps] == [True, False]
    assert ["--nodelist=node4" in step for step in steps] == [False, True]
    assert not any(step.endswith(" 4") for step in steps), "srun has taken an option of the ranks' step"
    assert (tmp_path / "left").read_text() == ""


def test_guards_that_hear_nothing_of_the_script_ask_about_the_newest_attempt_and_leave(tmp_path: Path) -> None:
    lines = 'start_guards; wait_for_guards; kill -STOP "${guard_pings[@]}"; wait "${guard_keepers[@]}"; end_guards'
    asked = run_guards(tmp_path, lines)
    assert asked == [f"{tmp_path}/run/logs/1"] * 2


@pytest.mark.parametrize(
    ("state", "asks"),
    [("RUNNING", 3), ("SIGNALING", 3), ("", 0), ("SUSPENDED", 0), ("COMPLETING", 0), ("CANCELLED", 0)],
)
def test_a_guard_asks_while_the_job_runs_and_leaves_when_it_ends(tmp_path: Path, state: str, asks: int) -> None:
    """Slurm would wait for it up to KillWait; and a job that ends has given back its script's node before others."""
    lines = f"""
    squeue() {{ echo >>{tmp_path}/looks; [ "$(wc -l <{tmp_path}/looks)" -le 3 ] && echo {state} || echo COMPLETED; }}
    guard_silent_seconds=0.05
    mkfifo {tmp_path}/pipe
    sleep 20 >{tmp_path}/pipe &
    guard_job "${{hpc_guard[@]}}" <{tmp_path}/pipe
    kill $!
    """
    assert len(run_guards(tmp_path, lines, code=0)) == asks
    looks = (tmp_path / "looks").read_text().count("\n")
    assert looks == (1 if state in ("COMPLETING", "CANCELLED") else 4)


def test_guards_leave_when_the_script_is_killed(tmp_path: Path) -> None:
    """Slurm may leave the processes that the script has started alone until KillWait is over."""
    lines = f"""
    bash_functions="$(declare -f); $(declare -p hpc_guard job run hpc_spares SLURM_JOB_NODELIST SLURMD_NODENAME)"
    bash_functions+="; hpc_python_path= guard_ping_seconds=0.05 guard_silent_seconds=5 exit_requeue=75 guard_pings=()"
    bash_functions+='; start_guards; wait_for_guards; echo "${{guard_keepers[@]}}" >{tmp_path}/keepers; kill -KILL $$'
    bash -c "$bash_functions"
    for ((tenth = 0; tenth < 40; tenth++)); do
      kill -0 $(cat {tmp_path}/keepers) 2>/dev/null || exit 0
      sleep 0.1
    done
    exit 1
    """
    assert run_guards(tmp_path, lines) == []


@pytest.mark.parametrize(("setting", "value"), [("hpc_guard", "()"), ("hpc_spares", "0")])
def test_a_job_that_ends_with_its_nodes_has_no_guards(tmp_path: Path, setting: str, value: str) -> None:
    run_guards(tmp_path, f"{setting}={value}; start_guards; end_guards")
    assert not (tmp_path / "sruns").exists()


def test_of_several_nodes_that_miss_the_script_one_requeues_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would record a strike."""
    logs = tmp_path / "logs/0"
    logs.mkdir(parents=True)
    monkeypatch.setattr(lost_script, "run_client", lambda words: Answer(0, "RUNNING|node1|node[2-3]"))
    with (logs / "lost-script.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not lost_script.requeue_without(logs, "7", "node1")
    monkeypatch.setattr(lost_script, "_FIT_SECONDS", 0.001)
    assert lost_script.requeue_without(logs, "7", "node1")
    for answer in ("COMPLETING|node1|node[2-3]", "PENDING||"):
        monkeypatch.setattr(lost_script, "run_client", lambda words, text=answer: Answer(0, text))
        assert not lost_script.requeue_without(logs, "7", "node1")
    assert [strike.host for strike in read_strikes(tmp_path)] == ["node1"]


@pytest.mark.parametrize(("then", "lost"), [("", False), ("requeue", False), ("restart", True), (None, True)])
def test_a_job_whose_script_came_to_its_end_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str | None, lost: bool
) -> None:
    """Slurm takes the script's node from a job that ends; a node without a network for a while may see only that."""
    for attempt in ("0", "1"):
        (tmp_path / "logs" / attempt).mkdir(parents=True)
    (tmp_path / "logs/0/result.json").write_text('{"then": "restart"}')
    if then is not None:
        (tmp_path / "logs/1/result.json").write_text(f'{{"then": "{then}"}}')
    monkeypatch.setattr(lost_script, "run_client", lambda words: Answer(0, "COMPLETING|node1|node[2-3]"))
    monkeypatch.setattr(lost_script, "_FIT_SECONDS", 0.001)
    assert lost_script.requeue_without(tmp_path / "logs/0", "7", "node1") == lost


@pytest.mark.parametrize(("attempts", "command"), [(2, "requeue"), (1, "scancel")])
def test_a_job_that_may_not_run_again_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempts: int, command: str
) -> None:
    """Slurm would refuse to requeue it, and it would keep its nodes without a process."""
    logs = tmp_path / "logs/0"
    logs.mkdir(parents=True)
    (tmp_path / "job.json").write_text(f'{{"config": {{"launch": {{"max_attempts": {attempts}, "exclude": ""}}}}}}')
    called: list[list[str]] = []

    def run_client(words: list[str]) -> Answer:
        called.append(words)
        return Answer(0, "RUNNING|node1|node[2-3]")

    monkeypatch.setattr(lost_script, "run_client", run_client)
    monkeypatch.setattr(lost_script, "_FIT_SECONDS", 0.001)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    assert lost_script.requeue_without(logs, "7", "node1")
    assert command in " ".join(called[-1])
    assert ('"gave_up"' in (tmp_path / "events.jsonl").read_text()) == (command == "scancel")
    assert bool(read_strikes(tmp_path)) == (command == "requeue")
