"""A submission leaves all of its directory or nothing, is alone in it, and keeps code no longer than its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_train.errors import UserError
from hpc_train.launch.slurm.sbatch import explain_refusal
from hpc_train.launch.snapshot import code_snapshot, snapshot_files
from hpc_train.launch.snapshot.snapshot_files import SnapshotEntry, hash_entries
from hpc_train.launch.submit import lock_submissions, transact_submission

OTHER = """
import sys
from pathlib import Path
from hpc_train.launch.submit import transact_submission as submission
with submission(Path(sys.argv[1])):
    print("alone", flush=True)
    sys.stdin.read()
"""


def refused(run: Path, files: dict[str, str]) -> None:
    """A submission that fails when it has written these files."""
    with pytest.raises(ZeroDivisionError), transact_submission(run):
        write(run, files)


def write(run: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    raise ZeroDivisionError


def test_what_is_refused_leaves_nothing_not_even_the_folders_above(tmp_path: Path) -> None:
    run = tmp_path / "runs/2026-01-01/10-00"
    refused(run, {"job.json": "{}", "logs/0/log": "text"})
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs/2026-01-01").mkdir(parents=True)
    (tmp_path / "runs/other").touch()
    refused(run, {})
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["2026-01-01", "other"]


def test_a_run_that_was_there_keeps_what_it_had(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.json").write_text("as it was")
    (run / "metrics.jsonl").write_text("results")
    refused(run, {"job.json": "as it is asked for now", "plan.json": "a reason", ".submitit/script.sh": ""})
    assert {path.name: path.read_text() for path in run.iterdir()} == {
        "job.json": "as it was",
        "metrics.jsonl": "results",
    }
    with transact_submission(run):
        (run / "job.json").write_text("as it is asked for now")
    assert (run / "job.json").read_text() == "as it is asked for now"


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(UserError, match=r"run_dir=.*/file/run: .*; choose a dir"),
        transact_submission(tmp_path / "file/run"),
    ):
        pass
    with (
        pytest.raises(UserError, match=r"run_dir=.*/run: No space left on device; c"),
        transact_submission(tmp_path / "run"),
    ):
        Path("/dev/full").write_text("no disk is large enough")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_of_two_at_the_same_time_the_second_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", OTHER, str(run)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "alone\n"
        with (
            pytest.raises(UserError, match="run: another command submits from it right now"),
            transact_submission(run),
        ):
            pass
        with pytest.raises(UserError, match="another command"), lock_submissions(run):
            pass
        assert run.is_dir()
        other.stdin.close()
        assert other.wait() == 0
    assert list(run.iterdir()) == []
    with transact_submission(run), pytest.raises(UserError, match="another command"), lock_submissions(run):
        pass


def test_the_lock_of_a_command_that_was_killed_holds_nobody_back(tmp_path: Path) -> None:
    words = [sys.executable, "-c", OTHER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        other.kill()
    assert (tmp_path / ".lock").exists()
    with lock_submissions(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_a_controller_that_answers_too_late_has_perhaps_taken_the_job() -> None:
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
    assert str(explain_refusal(late)).startswith("sbatch got no answer: Batch job submission failed: Socket timed out")
    flag = "sbatch: option '--hold' doesn't allow an argument\nTry \"sbatch --help\" for more information\n"
    assert str(explain_refusal(flag)).endswith("argument; leave its value empty (launch.extra.<option>=)")


Stored = Callable[[str, Path], Path]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """Store a text as a snapshot for a run, as long ago as a job may wait."""

    def keep(text: str, run: Path, age: float = 7 * 86400) -> Path:
        entries = [SnapshotEntry("0/code.py", text.encode())]
        path = tmp_path / "code" / hash_entries(entries)
        code_snapshot.add_reference(path, run)
        line = {"event": "use", "time": time.time() - age, "code": path.name, "run": str(run)}
        lines = (path.parent / code_snapshot.REFERENCES_FILE).read_text().splitlines()[:-1]
        (path.parent / code_snapshot.REFERENCES_FILE).write_text(
            "".join(f"{text}\n" for text in [*lines, json.dumps(line)])
        )
        snapshot_files.store_snapshot(path, entries)
        return path

    return keep


def frozen_run(run: Path, code: Path) -> Path:
    run.mkdir()
    (run / "job.json").write_text(json.dumps({"code": str(code)}))
    return run


def test_code_goes_when_no_run_names_it_any_more(tmp_path: Path, stored: Stored) -> None:
    gone, edited, named, swept = (stored(name, tmp_path / name) for name in ("gone", "edited", "named", "swept"))
    elsewhere = stored("elsewhere", tmp_path / "not mounted here/run")
    unknown = stored("unknown", tmp_path / "x").rename(tmp_path / "code" / ("f" * 40))
    frozen_run(tmp_path / "edited", named)
    frozen_run(tmp_path / "named", named)
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept/points.jsonl").touch()
    code_snapshot.remove_unused_snapshots(tmp_path / "code")
    assert not gone.exists()
    assert not edited.exists()
    left = {path for path in (tmp_path / "code").iterdir() if path.name != code_snapshot.REFERENCES_FILE}
    assert left == {named, swept, elsewhere, unknown}
    assert snapshot_files.hash_folder(named) == named.name
    code_snapshot.remove_unused_snapshots(tmp_path / "nowhere")


def test_code_of_a_submission_that_has_no_directory_yet_stays(tmp_path: Path, stored: Stored) -> None:
    path = stored("text", tmp_path / "gone")
    code_snapshot.add_reference(path, tmp_path / "of a submission under way")
    code_snapshot.remove_unused_snapshots(path.parent)
    assert path.is_dir()


def test_code_that_is_asked_for_while_it_is_removed_is_there(tmp_path: Path, stored: Stored) -> None:
    """One thread removes what the other stores: whoever has written down its run, and looked then, has its code."""
    entries = [SnapshotEntry("0/code.py", b"text")]
    path = stored("text", tmp_path / "gone")
    ended = threading.Event()

    def remove() -> None:
        while not ended.is_set():
            code_snapshot.remove_unused_snapshots(path.parent)

    helper = threading.Thread(target=remove)
    helper.start()
    try:
        for number in range(60):
            (path.parent / code_snapshot.REFERENCES_FILE).write_text(
                json.dumps({"event": "use", "time": 0.0, "code": path.name, "run": str(tmp_path / "gone")}) + "\n"
            )
            while path.exists():
                os.sched_yield()
            run = frozen_run(tmp_path / str(number), path)
            code_snapshot.add_reference(path, run)
            snapshot_files.store_snapshot(path, entries)
            for _ in range(20):
                assert snapshot_files.hash_folder(path) == path.name
    finally:
        ended.set()
        helper.join()


def test_a_store_that_a_refused_submission_began_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "code" / ("a" * 40)
    code_snapshot.add_reference(path, tmp_path / "refused")
    code_snapshot.drop_reference(path.parent, tmp_path / "refused")
    assert list(tmp_path.iterdir()) == []
    code_snapshot.add_reference(path, tmp_path / "refused")
    code_snapshot.add_reference(path, tmp_path / "other")
    code_snapshot.drop_reference(path.parent, tmp_path / "refused")
    assert (path.parent / code_snapshot.REFERENCES_FILE).exists()
