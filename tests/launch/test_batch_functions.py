"""The shell functions of batch scripts, and the Python that reads what they leave, agree in names and codes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from submitit.core.utils import JobPaths

from hpc_train.config.compose import compose
from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.launch.callables.calls import ELEMENT_VARIABLE, SHARED_CALL_VARIABLE
from hpc_train.launch.callables.stop_signals import SIGNAL_SECONDS_VARIABLE, requeue_marker_name
from hpc_train.launch.local.node_sharing import SHARE_VARIABLE
from hpc_train.launch.rank_entrypoint import ATTEMPT_VARIABLE
from hpc_train.launch.recovery.failures import SRUN_ERRORS, STOP_ASKED, find_first_error
from hpc_train.launch.slurm.batch_script import shell_functions
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.sbatch import render_script
from hpc_train.launch.slurm.supervisor.agent_reports import RANKS
from hpc_train.launch.state.attempts import ATTEMPT_MARKER, RESULT_MARKER, cancel_marker_path
from hpc_train.launch.submit import default_to_slurm
from hpc_train.runtime.rendezvous import RENDEZVOUS_VARIABLE
from hpc_train.training.records.run_records import LOSS_ALLOWED, REQUEUE_MARKER
from hpc_train.training.run_directory import RunDirectory


def run_functions(lines: str) -> str:
    done = subprocess.run(["bash", "-c", f"{shell_functions()}\n{lines}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_exit_codes_are_those_of_python() -> None:
    shown = run_functions('echo "$exit_requeue $exit_no_requeue $stopped_early_usr2 $stopped_early_term"')
    codes = (EXIT_REQUEUE, EXIT_NO_REQUEUE, 128 + signal.SIGUSR2, 128 + signal.SIGTERM)
    assert shown == " ".join(str(int(code)) for code in codes)


@pytest.mark.parametrize("name", [ATTEMPT_MARKER, RESULT_MARKER, SRUN_ERRORS])
def test_files_of_an_attempt_have_the_names_that_python_reads(name: str) -> None:
    assert f"$logs/{name}" in shell_functions() or f"write_marker {name} " in shell_functions()


def test_variables_and_the_cancel_marker_have_the_names_that_python_reads() -> None:
    for variable in (SHARE_VARIABLE, ATTEMPT_VARIABLE, RENDEZVOUS_VARIABLE):
        assert f"{variable}=" in shell_functions()
    assert str(cancel_marker_path(Path("$run"), "$job")) in shell_functions()


def test_variables_and_files_of_callables_have_the_names_that_python_reads() -> None:
    functions = shell_functions("callables")
    for variable in (ELEMENT_VARIABLE, SIGNAL_SECONDS_VARIABLE, SHARED_CALL_VARIABLE):
        assert f"{variable}=" in functions
    assert f'"$calls/{requeue_marker_name("${job}")}"' in functions
    result = JobPaths("calls", "${job}").result_pickle.name
    assert result.replace("_0_", '_"*"_') in functions
    submitted = JobPaths("calls", "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}").submitted_pickle.name
    assert f'"$calls/{submitted}"' in functions


def test_the_functions_stand_whole_in_the_script_that_is_submitted(tmp_path: Path) -> None:
    folder = RunDirectory(tmp_path / "it's a run", tmp_path / "checkpoints")
    script = render_script(folder, make_request(compose(default_to_slurm([])), folder))
    assert shell_functions() in script
    assert f"--job-name={RANKS} " in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_result_is_written_once(tmp_path: Path) -> None:
    lines = f'logs="{tmp_path}" why=first; write_result 3; why=second; write_result 4; cat "$logs/result.json"'
    assert '"exit_code": 3, "then": "", "why": "first"' in run_functions(lines)


def test_a_controller_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    """Three answers of Slurm 22.05 in a row: two while its controller is away, and one when it is back.

    Meanwhile the clock of the node is set forward by a day, which the shell's own seconds follow.
    """
    calls = tmp_path / "calls"
    squeue = f"""squeue() {{
      echo x >>{calls}
      case $(wc -l <{calls}) in
        1) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; return 1 ;;
        2) echo "slurm_load_jobs error: Socket timed out on send/recv operation" >&2; return 1 ;;
        *) echo "RUNNING None" ;;
      esac
    }}"""
    tomorrow = "sleep() { SECONDS=90000; }"
    assert run_functions(f'{tomorrow}; {squeue}; job=1; echo "<$(read_job_state)>"') == "<RUNNING None>"
    assert calls.read_text().count("x") == 3


def test_what_the_controller_refuses_is_not_asked_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    refuses = f'scontrol() {{ echo x >>{calls}; echo "Invalid job id specified" >&2; return 1; }}'
    assert run_functions(f"{refuses}; ask_slurm scontrol requeue 1; echo $?") == "1"
    assert calls.read_text() == "x\n"
    waits = 'squeue() { echo "Socket timed out" >&2; return 1; }; slurm_patience=-1'
    assert run_functions(f'{waits}; ask_slurm squeue 2>&1; echo "$?"') == "Socket timed out\n1"


def test_a_decision_is_made_again_where_the_process_that_makes_it_was_killed(tmp_path: Path) -> None:
    settings = f"sleep() {{ :; }}; run={tmp_path} attempt=0 code=137 logs={tmp_path}"
    killed_once = f"echo $* >>{tmp_path}/calls; [ $(wc -l <{tmp_path}/calls) -gt 1 ] || kill -9 $$; exit 75"
    assert run_functions(f"{settings}; hpc_restart=(bash -c '{killed_once}' _); decide node2; echo $?") == "75"
    assert (tmp_path / "calls").read_text() == f"{tmp_path} 0 137 node2\n" * 2
    assert run_functions(f"{settings}; hpc_restart=(bash -c 'kill -9 $$'); decide; echo $?") == "137"


def test_a_decision_is_told_in_characters_that_a_json_string_can_hold(tmp_path: Path) -> None:
    (tmp_path / "decision").write_text('step 20 failed; "3" times \\ on node-1 (rank #2)\n')
    assert run_functions(f"logs={tmp_path}; read_decision") == "step 20 failed; 3 times  on node-1 (rank #2)"


def test_a_decision_that_was_not_made_is_no_decision_to_end(tmp_path: Path) -> None:
    """Python exits with 1 after an error of its own, as of a file system that does not answer for a moment."""
    settings = f"sleep() {{ :; }}; run={tmp_path} attempt=0 code=137 logs={tmp_path}"
    failed_once = f"echo x >>{tmp_path}/calls; [ $(wc -l <{tmp_path}/calls) -gt 1 ] || exit 1; exit 0"
    assert run_functions(f"{settings}; hpc_restart=(bash -c '{failed_once}'); decide; echo $?") == "0"
    decided = f"echo x >>{tmp_path}/calls; echo why >{tmp_path}/decision; exit 1"
    assert run_functions(f"{settings}; hpc_restart=(bash -c '{decided}'); decide; echo $?") == "1"
    assert (tmp_path / "calls").read_text() == "x\n" * 3
    failed = f"echo x >>{tmp_path}/calls; exit 1"
    assert run_functions(f"{settings}; hpc_restart=(bash -c '{failed}'); decide; echo $?") == "1"
    assert (tmp_path / "calls").read_text() == "x\n" * 6


def test_nothing_starts_again_on_a_node_that_the_job_has_lost_once(tmp_path: Path) -> None:
    """The job outlives its nodes, even if Slurm takes minutes to notice, or if the node is back by then."""
    lines = [
        f"hpc_spares=2 SLURM_JOB_NODELIST=n[1-4] run={tmp_path} attempt=0 code=137 logs={tmp_path}",
        f"hpc_restart=(bash -c 'echo $4 >>{tmp_path}/decided' _)",
        'decide_after_fault "n3 n2"; decide_after_fault ""; decide_after_fault n4',
        f"cat {tmp_path}/decided",
    ]
    assert run_functions("\n".join(lines)).splitlines() == ["n2 n3", "n2 n3", "n2 n3 n4"]


def test_a_job_that_goes_back_to_the_queue_leaves_out_nodes_with_strikes_also_where_its_ranks_stopped_on_purpose(
    tmp_path: Path,
) -> None:
    fit = f"echo fitted >>{tmp_path}/calls; echo node2 >$1/exclude; echo 3 >$1/requeue-nodes"
    settings = f"hpc_nodes=2 hpc_ranks=4 job=7 run={tmp_path} logs={tmp_path}/logs; hpc_fit=(bash -c '{fit}' _)"
    requeue = f'scontrol() {{ echo "$*"; }}; mkdir -p {tmp_path}/logs; {settings}; requeue_job'
    assert run_functions(requeue) == "requeue 7", "no node has a strike"
    (tmp_path / "nodes.jsonl").write_text("{}\n")
    asked = ["requeue 7", "update jobid=7 ExcNodeList=node2 NumNodes=3 NumTasks=6"]
    assert run_functions(requeue).splitlines() == asked
    assert run_functions(requeue).splitlines() == asked, "what was decided stands"
    assert (tmp_path / "calls").read_text() == "fitted\n"


def test_a_decision_waits_until_the_run_directory_can_be_written(tmp_path: Path) -> None:
    """Not where the disk is full, which can last."""
    logs = tmp_path / "logs"
    restart = f"hpc_restart=(bash -c 'echo x >>{tmp_path}/calls; test -d {logs}')"
    settings = f"run={tmp_path} attempt=0 code=137 logs={logs} probe_pause=0.1; {restart}"
    run_functions(f"{settings}; (sleep 0.5; mkdir {logs}) & decide")
    assert (tmp_path / "calls").read_text() == "x\n"
    full = "mkdir() { echo 'mkdir: cannot create directory: No space left on device' >&2; return 1; }"
    run_functions(f"{settings}; {full}; decide")
    assert (tmp_path / "calls").read_text() == "x\n" * 2
    assert list(logs.iterdir()) == []
    (logs / ".probe").mkdir()  # of a script that was killed between the two
    run_functions(f"{settings}; decide")
    assert list(logs.iterdir()) == []


def test_the_next_attempt_removes_what_a_killed_script_left(tmp_path: Path) -> None:
    (tmp_path / "logs/0/.probe").mkdir(parents=True)
    run_functions(f"run={tmp_path}; make_attempt; make_attempt")
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "logs",
        "logs/0",
        "logs/1",
        "logs/2",
    ]


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        ("COMPLETING None", "update jobid=7 ExcNodeList=node2 NumNodes=3 NumTasks=6"),
        ("RUNNING None", ""),
        ("COMPLETING TimeLimit", ""),
    ],
)
def test_a_job_that_slurm_itself_puts_back_leaves_out_nodes_with_strikes(
    tmp_path: Path, state: str, asked: str
) -> None:
    """After preemption it may otherwise get the node again that was lost."""
    fit = "echo node2 >$1/exclude; echo 3 >$1/requeue-nodes"
    settings = f"hpc_nodes=2 hpc_ranks=4 job=7 run={tmp_path} logs={tmp_path}/logs; hpc_fit=(bash -c '{fit}' _)"
    (tmp_path / "logs").mkdir()
    (tmp_path / "nodes.jsonl").write_text("{}\n")
    change = f'scontrol() {{ echo "$*"; }}; state="{state}"; {settings}; change_requeued_job'
    assert run_functions(change) == asked
    (tmp_path / "logs/cancel-7").touch()
    assert run_functions(change) == ""


def test_a_job_that_was_cancelled_does_not_wait_until_it_can_be_changed(tmp_path: Path) -> None:
    """squeue says of it what it says of one that was preempted. Here the words of Slurm 22.05 for both."""
    cases = {"Requested operation is presently disabled": 50, "Job has already finished for job 7": 1}
    for said, times in cases.items():
        calls = tmp_path / said.replace(" ", "-")
        scontrol = f'scontrol() {{ echo x >>{calls}; echo "{said}" >&2; return 1; }}; sleep() {{ :; }}'
        assert run_functions(f"{scontrol}; job=7 changes=(ExcNodeList=node2); change_job; echo $?") == "1"
        assert calls.read_text().count("x") == times


def test_ranks_do_not_start_again_where_the_script_was_asked_to_stop(tmp_path: Path) -> None:
    """Also where the signal comes as the decision is made."""
    settings = f"hpc_chain=1 hpc_max_attempts=3 job=7 run={tmp_path} logs={tmp_path}; decide() {{ decision; }}"
    settings += "; squeue() { echo RUNNING; }; timeout() { :; }; pass_stop_signals_on"
    shown = 'decide_after_fault ""; echo "$next $why"'
    assert run_functions(f"decision() {{ return 0; }}; {settings}; {shown}") == "restart"
    assert run_functions(f"decision() {{ kill -TERM $$; }}; {settings}; {shown}") == "requeue asked to stop"
    assert not (tmp_path / STOP_ASKED).exists()
    told = f"decision() {{ ls {tmp_path}; }}; {settings}; kill -TERM $$; {shown}"
    assert run_functions(told).splitlines() == [STOP_ASKED, "requeue asked to stop"]


def test_where_a_full_disk_has_no_room_for_the_chosen_nodes_lost_ones_are_not_taken(tmp_path: Path) -> None:
    slurm = "scontrol() { printf 'node%s\\n' 1 2 3 4; }; SLURM_JOB_NODELIST=node[1-4]"
    choose = f'{slurm} hpc_spares=2 hpc_nodes=2 hpc_ranks=4; choose_nodes {tmp_path}/none; echo "$step_nodes"'
    for lost, chosen in (("", "node1,node2"), ("node2", "node1,node3"), ("node1 node3", "node2,node4")):
        assert run_functions(f'lost_nodes="{lost}"; {choose}') == chosen


@pytest.mark.parametrize(
    ("code", "said", "failed"),
    [
        (75, "srun: error: node1: tasks 0-1: Exited with exit code 75\n", False),
        (75, "srun: error: node1: task 0: Exited with exit code 75\nsrun: error: node2: task 1: Terminated\n", False),
        (
            75,
            "srun: error: n1: task 0: Exited with exit code 75\nsrun: error: n2: task 1: Exited with exit code 3\n",
            True,
        ),
        (137, "", True),
        (140, "", False),
        (1, "", True),
    ],
)
def test_a_task_that_fails_while_the_others_stop_is_seen(tmp_path: Path, code: int, said: str, failed: bool) -> None:
    (tmp_path / SRUN_ERRORS).write_text(said)
    answer = run_functions(f"logs={tmp_path}; failed_while_stopping {code} && echo failed || echo stopped")
    assert answer == ("failed" if failed else "stopped")


@pytest.mark.parametrize(
    ("said", "then", "fault"),
    [
        ("srun: forcing job termination\nsrun: error: node1: task 0: Killed\n", "requeue", False),
        ("srun: error: node1: task 0: Killed\nsrun: forcing job termination\n", "restart", True),
        ("srun: error: node1: task 0: Killed\n", "restart", True),
    ],
)
def test_ranks_that_srun_kills_as_it_is_asked_to_stop_are_not_to_blame(
    tmp_path: Path, said: str, then: str, fault: bool
) -> None:
    """As by `scancel --full --signal=TERM`, which signals the processes of the batch script, too."""
    (tmp_path / "srun.err").write_text(said)
    lines = f"""
    logs={tmp_path} run={tmp_path} job=7 hpc_chain=1 hpc_max_attempts=3 hpc_restart=(decide)
    find_lost_nodes() {{ :; }}
    read_job_state() {{ echo RUNNING; }}
    report_end() {{ :; }}
    decide_after_fault() {{ touch {tmp_path}/decided; next=restart; }}
    settle_attempt 137
    echo "$next"
    """
    assert run_functions(lines) == then
    assert (tmp_path / "decided").exists() == fault


def test_a_supervisor_that_is_killed_or_stopped_is_started_again_as_long_as_there_are_ranks(tmp_path: Path) -> None:
    """Fifteen are killed, and the next one is stopped."""
    calls = tmp_path / "calls"
    watcher = f"""echo x >>{calls}
      case $(wc -l <{calls}) in
        16) kill -STOP $$ ;;
        17) exit 0 ;;
        *) kill -9 $$ ;;
      esac"""
    quick = "sleep() { command sleep 0.02; }"
    words = f"logs={tmp_path} hpc_watch=(bash -c '{watcher}')"
    assert run_functions(f"{quick}; {words}; keep_watching $$ 2>/dev/null; wc -l <{calls}") == "17"
    script = run_functions(f"logs={tmp_path} hpc_watch=(echo); echo $$; sleep 9 & keep_watching $! & wait $!; kill %1")
    shell, watched = script.splitlines()
    assert watched.split()[2] == shell, "the supervisor learns which process the script is"
    calls.unlink()
    gone = f"{quick}; logs={tmp_path} hpc_watch=(bash -c 'echo x >>{calls}; kill -9 $$'); (exit 0) & wait"
    assert run_functions(f"{gone}; keep_watching $! 2>/dev/null; ls {tmp_path}") == ""


def test_an_srun_that_outlives_its_ranks_is_left_and_ended_before_the_job_is(tmp_path: Path) -> None:
    """The script goes on at once; in the end it waits for an srun that may still be told how a rank ended."""
    begin = f"run={tmp_path} logs={tmp_path} job=1 step=()"
    begin += "; mkdir $run/logs; hpc_watch=(bash -c 'echo $2 >$1/left-srun' _); run_ranks sleep 600; echo $?"
    began = time.monotonic()
    said = run_functions(f"{begin}; touch $logs/lost-nodes; end_left_sruns; wait; echo ended")
    assert said == "137\nended"
    (tmp_path / "left-srun").unlink()
    (tmp_path / "lost-nodes").unlink()
    (tmp_path / "logs").rmdir()
    slow = begin.replace("sleep 600", "bash -c 'sleep 2; echo told >&2'")
    assert run_functions(f"{slow}; end_left_sruns") == "137"
    assert (tmp_path / SRUN_ERRORS).read_text() == "told\n"
    assert time.monotonic() - began < 15, "nobody waits longer than for the end"


def test_a_node_that_srun_cannot_reach_is_lost_though_slurm_does_not_say_so_yet(tmp_path: Path) -> None:
    """As Slurm 22.05 says it where the node has lost its power; the rank on node3 is no culprit."""
    (tmp_path / SRUN_ERRORS).write_text(
        "srun: error: Task launch for StepId=13.2 failed on node node5: Communication connection failure\n"
        "srun: error: Application launch failed: Communication connection failure\n"
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
        "srun: error: node3: task 0: Killed\n"
    )
    slurm = 'sinfo() { :; }; squeue() { echo "node[3-5]"; }; scontrol() { printf "node%s\\n" 3 4 5; }; job=13'
    job = f"{slurm}; logs={tmp_path} hpc_spares=1 SLURM_JOB_NODELIST=node[3-5]"
    assert run_functions(f"{job}; find_lost_nodes") == "node5"


@pytest.mark.parametrize(("spares", "nodes", "lost"), [(2, "n1,n2", "n2"), (2, "n1,n4", ""), (0, "n[1-4]", "n2 n3")])
def test_spare_nodes_that_are_lost_are_not_why_an_attempt_has_failed(spares: int, nodes: str, lost: str) -> None:
    assert run_functions(f'hpc_spares={spares} step_nodes={nodes}; select_step_nodes "n2 n3"; true') == lost


def test_a_node_that_slurm_itself_has_taken_is_named_and_not_a_rank_that_it_killed_then(tmp_path: Path) -> None:
    (tmp_path / SRUN_ERRORS).write_text("srun: error: node1: task 0: Killed\n")
    lines = f"""
    find_lost_nodes() {{ echo "node4 node5"; }}; squeue() {{ echo RUNNING None; }}; decide_after_fault() {{ :; }}
    hpc_report=(true) hpc_restart=(true) hpc_spares=1 step_nodes=node1,node4 job=7 run={tmp_path} logs={tmp_path}
    settle_attempt 137
    """
    run_functions(lines)
    error = find_first_error(tmp_path)
    assert error is not None
    assert (error.host, error.text) == ("node4", "node4: does not answer any more"), "node5 is a spare"


def test_ranks_that_start_again_do_not_wait_for_the_report_of_the_last_end(tmp_path: Path) -> None:
    report = f"hpc_report=(bash -c 'sleep 0.3; echo $3 >>{tmp_path}/reports' _) run={tmp_path} attempt=0 code=137"
    assert run_functions(f"{report} next=restart; report_end; cat {tmp_path}/reports 2>/dev/null; wait") == ""
    assert run_functions(f"{report} next=; report_end; cat {tmp_path}/reports").splitlines() == ["137", "137"]
    assert run_functions(f"{report} code=0 next=; report_end; wc -l <{tmp_path}/reports") == "2"


@pytest.mark.parametrize(
    ("name", "state", "code"), [("TERM", "RUNNING", 75), ("USR2", "SIGNALING", 75), ("TERM", "COMPLETING", 3)]
)
def test_a_signal_that_comes_to_the_script_alone_asks_the_ranks_to_stop(
    tmp_path: Path, name: str, state: str, code: int
) -> None:
    """As by `scancel --batch`; the script goes on waiting for the ranks, which end when they have saved.

    Where Slurm requeues the job, scancel would signal the ranks of the job that comes back.
    """
    ranks = "trap 'exit 75' USR2; touch $0.ready; for _ in {1..20}; do sleep 0.05; done; exit 3"
    (tmp_path / "ranks").write_text(ranks)
    lines = f"""
    squeue() {{ echo {state}; }}
    timeout() {{ [ "$*" = "5 scancel --quiet --signal=USR2 7" ] && kill -USR2 "$ranks"; }}
    job=7
    pass_stop_signals_on
    bash {tmp_path}/ranks &
    ranks=$!
    until [ -e {tmp_path}/ranks.ready ]; do sleep 0.01; done
    (sleep 0.1; kill -{name} $$) &
    wait_for "$ranks"
    echo "the ranks ended with $?"
    """
    assert run_functions(lines) == f"the ranks ended with {code}"


@pytest.mark.parametrize(("marker", "code"), [("done", 0), (REQUEUE_MARKER, EXIT_REQUEUE), ("", 137)])
def test_a_copy_that_was_lost_is_not_how_the_run_ended(tmp_path: Path, marker: str, code: int) -> None:
    """Ranks that may lose some of them (parallel.sync.lost_after_seconds) are done, have stopped, or have failed."""
    for name in filter(None, (LOSS_ALLOWED, marker)):
        (tmp_path / name).touch()
    (tmp_path / SRUN_ERRORS).write_text("srun: error: node2: task 1: Killed\n")
    lines = f"""
    squeue() {{ echo RUNNING None; }}; sinfo() {{ :; }}
    decide_after_fault() {{ echo "a fault"; }}; continue_after_stop() {{ echo "a stop"; }}
    hpc_report=(true) hpc_restart=(true) job=7 run={tmp_path} logs={tmp_path}
    settle_attempt 137
    echo $code
    """
    what = {"done": "", REQUEUE_MARKER: "a stop\n", "": "a fault\n"}[marker]
    assert run_functions(lines) == f"{what}{int(code)}"
