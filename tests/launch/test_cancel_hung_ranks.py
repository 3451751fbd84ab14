"""`hpc-train cancel` ends what does not answer, names the ranks that hang, and leaves other points alone."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from jobs import COMMAND, FAULTY, Workshop, processes, saved_steps, wait_for

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_REQUEUE

ENDLESS = (*FAULTY, "train.steps=100000", "checkpoint.every=50000", "launch.cancel_seconds=1")
HOLD = "0:train:3:hold"


def status(run: object, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["status", "--json", str(run)]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


@pytest.mark.long
def test_a_rank_that_is_stopped_is_named_and_the_run_ends(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    job = workshop.start("run", *ENDLESS, faults="1:train:3:listen")
    workshop.wait_for_fault("1:train:3:listen", job)
    job.task(1).send(signal.SIGSTOP)
    assert main(["cancel", "--yes", str(job.run_dir)]) == 0
    output = capsys.readouterr().out
    assert "rank 1 (task 1 on " in output
    assert "did not answer" in output
    assert "rank 0" not in output
    job.ended()
    assert processes(job.run_dir) == []
    (row,) = status(job.run_dir, capsys)
    assert row["state"] == "CANCELLED"
    assert "did not end within 1 s and was ended: rank 1" in row["reason"]


def test_a_rank_in_an_endless_loop_is_named_by_the_line_it_is_in(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C during the wait leaves the run asked to end; the next cancel waits again, and ends it."""
    job = workshop.start("run", *ENDLESS, "launch.cancel_seconds=60", faults=HOLD)
    workshop.wait_for_fault(HOLD, job)
    words = [COMMAND[0], "cancel", str(job.run_dir)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as cancel:
        assert cancel.stderr is not None
        assert "waiting up to 60 s" in cancel.stderr.readline()
        cancel.send_signal(signal.SIGINT)
        assert "the run still saves and ends" in cancel.stderr.readline()
    assert cancel.returncode == 130
    (row,) = status(job.run_dir, capsys)
    assert (row["state"], row["reason"]) == ("RUNNING", "asked to stop and save")
    spec = job.run_dir / "job.json"
    spec.write_text(spec.read_text().replace('"cancel_seconds": 60', '"cancel_seconds": 1'))
    assert main(["cancel", "--yes", str(job.run_dir)]) == 0
    output = capsys.readouterr().out.splitlines()[-1]
    assert "was ended: rank 0 (task 0 on " in output
    assert "faulty_model.py:" in output
    assert output.index("rank 0") < output.index("rank 1"), "the odd one first, then those that wait for it"
    job.ended()
    assert processes(job.run_dir) == []


def test_a_point_of_a_sweep_here(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    faults = "0:train:3:hold"
    words = (*ENDLESS, "launch.ranks=1", "optim.lr=1e-3,2e-3", "launch.parallel_points=1")
    job = workshop.start("sweep", *words, faults=faults, command=(*COMMAND, "-m"))
    workshop.wait_for_fault(faults, job)
    assert main(["cancel", "--yes", str(job.run_dir)]) == 0
    assert "was ended: rank 0 (task 0" in capsys.readouterr().out
    job.ended()
    rows = {row["state"] for row in status(job.run_dir, capsys)}
    assert rows == {"CANCELLED"}
    assert processes(workshop.folder) == []


@pytest.mark.long
def test_a_run_that_answers_is_only_waited_for(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    job = workshop.start("run", *ENDLESS, "launch.cancel_seconds=100", faults="0:train:3:listen")
    workshop.wait_for_fault("0:train:3:listen", job)
    assert main(["cancel", "--yes", str(job.run_dir)]) == 0
    (row,) = status(job.run_dir, capsys)
    assert (row["state"], row["exit_code"]) == ("CANCELLED", EXIT_REQUEUE)
    assert "killed" not in row["reason"]
    assert len(saved_steps(job.run_dir)) == 1
    assert wait_for(lambda: processes(job.run_dir) == [])
    job.ended()
