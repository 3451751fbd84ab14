"""A job that leaves out nodes asks for no more than Slurm has: when a run is resumed, submitted, or grows again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.launch import submit
from hpc_train.launch.job_spec import make_spec
from hpc_train.launch.slurm import waiting_time
from hpc_train.launch.slurm.request import make_request
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.slurm.waiting_time import fit_request
from hpc_train.launch.submit import default_to_slurm, submit_run
from hpc_train.resilience.exclusion import HARDWARE, LIFE_SECONDS, Strike, append_strike
from hpc_train.training.records.run_records import append_event
from hpc_train.training.run_directory import RunDirectory, locate_run_directory

SBATCH = """#!/bin/sh
# A cluster in which node1 to node4 are up. A job may have as many nodes as are up and not excluded.
echo "$*" >>{folder}/calls
left=4
for word; do
  case "$word" in
    --nodes=*) nodes="${{word#*=}}" ;;
    --exclude=*) left=$((4 - $(echo "${{word#*=}}" | tr , '\\n' | wc -l))) ;;
    --test-only) test=1 ;;
  esac
done
if [ -z "$test" ]; then
  cp "$word" {folder}/submitted
  echo "Submitted batch job 8"
elif [ "$nodes" -gt "$left" ]; then
  echo "allocation failure: Requested node configuration is not available" >&2
  exit 1
else
  echo "sbatch: Job 9 to start at $(date +%Y-%m-%dT%H:%M:%S) using 4 processors on nodes node2 in partition batch" >&2
fi
"""
LINES = ["asks for 1 of 2 spare nodes: Slurm has no others"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with Slurm's clients, of which only sbatch and squeue say anything.

    The others are there as well: where Slurm is installed, its own would answer about a job 7 of its own.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    programs = {"sbatch": SBATCH.format(folder=folder), "squeue": "#!/bin/sh\necho '7|7|FAILED||None'\n"}
    programs |= dict.fromkeys(("scontrol", "sacct"), "#!/bin/sh\nexit 1\n")
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    (folder / "calls").touch()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder


def configure(run: Path, *overrides: str) -> RunConfig:
    words = ["cluster.nodes=2", "cluster.node.ranks=1", "launch.spares=2", "launch.compact_nodes=off"]
    return compose(default_to_slurm([f"run_dir={run}", *words, "launch.snapshot=off", *overrides]))


def freeze_failed_run(run: Path) -> RunDirectory:
    """Leave what a run of one failed job leaves: job 7 on two nodes with two spares, of which node1 was lost."""
    config = configure(run)
    folder = locate_run_directory(config)
    folder.logs(0).mkdir(parents=True)
    make_spec(config, folder, 2, {}).write(folder.job)
    folder.config.touch()
    append_event(folder.events, "submit", -1, job_id="7", nodes=2, ranks=2)
    (folder.logs(0) / "attempt.json").write_text(json.dumps({"host": "node1", "time": 1.0, "job_id": "7"}))
    (folder.logs(0) / "result.json").write_text(json.dumps({"exit_code": 1, "time": 2.0}))
    append_strike(folder.path, Strike("node1", HARDWARE, "does not answer", 0))
    return folder


def test_a_resumed_run_gives_up_spares_that_slurm_does_not_have(
    slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = freeze_failed_run(tmp_path / "run")
    assert main(["resume", str(folder.path)]) == 0
    assert [f"hpc-train: {line}" for line in LINES] == [
        line for line in capsys.readouterr().err.splitlines() if "spare" in line
    ]
    script = (slurm / "submitted").read_text()
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --exclude=node1\n" in script


def test_a_run_that_is_submitted_again_does_so_too_and_a_dry_run_asks_nothing(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("freeze_run", "check_run"):  # what the ranks need is of no interest to Slurm
        monkeypatch.setattr(submit, name, lambda *arguments: None)
    config = configure(freeze_failed_run(tmp_path / "run").path)
    reported: list[str] = []
    assert "#SBATCH --nodes=4\n" in submit_run(config, reported.append, after=[], dry_run=True).script
    assert (slurm / "calls").read_text() == ""
    assert submit_run(config, reported.append, after=[]).jobs == ("8",)
    assert [line for line in reported if "launch.snapshot" not in line] == LINES
    assert "#SBATCH --nodes=3\n" in (slurm / "submitted").read_text()


def test_a_submission_without_strikes_asks_nothing_and_stays_as_it_is(slurm: Path, tmp_path: Path) -> None:
    config = configure(tmp_path / "run")
    folder = locate_run_directory(config)
    request = make_request(config, folder)
    assert fit_request(config, folder, request, pytest.fail, run_client) is request
    append_strike(folder.path.parent, Strike("node1", HARDWARE, "does not answer", 0))
    other = configure(tmp_path, "resilience.act=false", "launch.spares=0")
    unchanged = make_request(other, locate_run_directory(other))
    assert fit_request(other, locate_run_directory(other), unchanged, pytest.fail, run_client) is unchanged
    assert (slurm / "calls").read_text() == ""


@pytest.mark.parametrize(
    ("up", "nodes", "exclude", "lines"),
    [
        (5, 4, "node9,node1", []),
        (3, 2, "node9,node1", ["asks for 0 of 2 spare nodes: Slurm has no others"]),
        (2, 2, "node9", ["asks for 0 of 2 spare nodes: Slurm has no others", "node1 is not left out: Slurm has too "]),
        (1, 4, "node9", ["node1 is not left out: Slurm has too few other nodes"]),
    ],
)
def test_what_a_submission_asks_for_where_so_many_nodes_are_up(
    slurm: Path, tmp_path: Path, up: int, nodes: int, exclude: str, lines: list[str]
) -> None:
    """launch.exclude=node9 is the user's own, and stays: node9 is none of those that are up."""
    config = configure(tmp_path / "run", "launch.exclude=node9")
    sbatch = slurm / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("left=4", f"left={up}").replace("$((4 -", f"$(({up} + 1 -"))
    folder = locate_run_directory(config)
    folder.path.mkdir()
    append_strike(folder.path, Strike("node1", HARDWARE, "does not answer", 0))
    reported: list[str] = []
    request = fit_request(config, folder, make_request(config, folder), reported.append, run_client)
    assert (request.nodes, request.spares) == (2, nodes - 2)
    assert (request.parameters["nodes"], request.parameters["exclude"]) == (nodes, exclude)
    assert len(reported) == len(lines)
    assert all(line.startswith(expected) for line, expected in zip(reported, lines, strict=True))


def test_a_run_that_grows_again_asks_for_no_more_spares_than_there_are(slurm: Path, tmp_path: Path) -> None:
    """Of the two nodes of the ranks it has node2."""
    folder = freeze_failed_run(tmp_path / "run")
    assert waiting_time.main(str(folder.logs(0)), "node2") == 0
    assert read_requeue(folder) == ("node1\n", "3\n")


def read_requeue(folder: RunDirectory) -> tuple[str, str]:
    """Return which nodes a requeue leaves out, and how many it asks for."""
    return (folder.logs(0) / "exclude").read_text(), (folder.logs(0) / "requeue-nodes").read_text()


def test_a_requeue_after_a_stop_leaves_out_nodes_until_their_strikes_expire(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = freeze_failed_run(tmp_path / "run")
    assert waiting_time.main(str(folder.logs(0))) == 0
    assert read_requeue(folder) == ("node1\n", "3\n")
    later = time.time() + LIFE_SECONDS + 1
    monkeypatch.setattr("time.time", lambda: later)
    assert waiting_time.main(str(folder.logs(0))) == 0
    assert read_requeue(folder) == ("\n", "4\n")
