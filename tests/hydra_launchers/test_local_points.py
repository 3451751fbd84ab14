"""hydra/launcher=hpc_local with real processes: what goes wrong in a point stays there, and nothing is lost or left."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from drawn import draw
from hydra.core.utils import JobStatus
from sweeping import Sweeping, value, wait_for

HERE = Path(__file__).parent


@pytest.fixture
def sweeping(tmp_path: Path) -> Sweeping:
    return Sweeping(tmp_path)


def test_a_point_that_fails_hides_no_other(sweeping: Sweeping) -> None:
    returns = sweeping.launch(
        "hpc_local", ["parallel_points=3"], *([f"do={word}"] for word in ("raise", "value", "exit", "kill", "thread"))
    )
    assert [returned.status is JobStatus.COMPLETED for returned in returns] == [False, True, False, False, False]
    raised, squared, left, killed, lock = map(value, returns)
    assert squared == 1.0
    assert "sweeping.Picky: 3 and 4" in str(raised) + "".join(getattr(raised, "__notes__", ()))
    assert "in _raise" in str(raised) + "".join(getattr(raised, "__notes__", ())), "with the traceback of the point"
    assert "SystemExit: 3" in str(left)
    assert "killed by SIGKILL" in str(killed)
    assert "last words" in str(killed), "with the end of its log"
    assert "cannot be pickled" in str(lock)
    for index, returned in enumerate(returns):
        assert returned.overrides[1].startswith("do=")
        assert returned.cfg.do == returned.overrides[1].removeprefix("do=")
        assert returned.hydra_cfg.hydra.job.num == index


def test_files_are_few_and_their_owners_alone(sweeping: Sweeping) -> None:
    before = os.umask(0o002)  # as on machines where groups share everything
    try:
        sweeping.launch("hpc_local", ["parallel_points=2"], *([f"x={number}"] for number in range(2)))
    finally:
        os.umask(before)
    files = list(sweeping.folder.iterdir())
    assert stat.S_IMODE(sweeping.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert len(files) == 2 + 2 * 2, "what all share, the call, and a result and a log for each"


def test_yaml_that_is_edited_after_submission_changes_nothing(sweeping: Sweeping) -> None:
    returns = sweeping.launch("hpc_local", ["parallel_points=1"], ["do=edit"], ["do=value"])
    assert "999" in (sweeping.place / "conf/config.yaml").read_text()
    assert [value(returned) for returned in returns] == [1.0, 1.0]


def test_no_more_points_run_at_once_than_were_allowed(sweeping: Sweeping) -> None:
    returns = sweeping.launch("hpc_local", ["parallel_points=2"], *(["do=count", f"x={number}"] for number in range(4)))
    counts = [value(returned) for returned in returns]
    assert counts[:2] == [2, 2]
    assert max(counts) == 2


def test_what_points_warn_of_is_said_once_for_all(sweeping: Sweeping, capsys: pytest.CaptureFixture[str]) -> None:
    sweeping.launch("hpc_local", ["parallel_points=2"], ["do=warn", "x=1"], ["do=warn", "x=2"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "has seen something" in line]
    assert line.endswith("\t#0, #1: warning: has seen something")


def test_points_that_run_at_once_have_gpus_of_their_own(sweeping: Sweeping, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("NAMED_IN_THE_CONFIGURATION", "here")
    settings = ["gpus_per_point=1", "parallel_points=2", "threads=1"]
    returns = sweeping.launch("hpc_local", settings, *(["do=seen"] for _ in range(2)))
    seen = [value(returned)["env"]["CUDA_VISIBLE_DEVICES"] for returned in returns]
    assert sorted(seen) == ["4", "5"]
    assert value(returns[0])["variable"] == "here"


def test_all_ranks_run_and_one_that_fails_fails_the_point(sweeping: Sweeping) -> None:
    returns = sweeping.launch("hpc_local", ["ranks=2", "parallel_points=2"], ["do=rank"], ["do=rank_1_raises"])
    assert value(returns[0]) == 0, "what the first rank returned"
    assert returns[1].status is JobStatus.FAILED
    assert "Picky" in str(value(returns[1]))
    logs = sorted(path.name[-9:] for path in sweeping.folder.glob("*_log.out"))
    assert logs == ["0_log.out", "0_log.out", "1_log.out", "1_log.out"]


@pytest.mark.parametrize("number", draw([signal.SIGUSR2, signal.SIGTERM], [signal.SIGUSR2]))
def test_a_point_that_is_told_to_stop_is_run_again(sweeping: Sweeping, number: signal.Signals) -> None:
    stopper = threading.Thread(target=lambda: os.kill(int(wait_for(sweeping.place / "holds-7")), number), daemon=True)
    stopper.start()
    (returned,) = sweeping.launch("hpc_local", [], ["do=once", "x=7"])
    stopper.join()
    assert value(returned) == 2


def test_ctrl_c_ends_every_point_and_starts_no_other(sweeping: Sweeping) -> None:
    script = (
        "from pathlib import Path; from sweeping import Sweeping\n"
        f"Sweeping(Path({str(sweeping.place)!r})).launch('hpc_local', ['parallel_points=2'],"
        " *(['do=hold', f'x={it}'] for it in range(4)))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.DEVNULL)
    numbers = [int(wait_for(sweeping.place / f"holds-{number}")) for number in range(2)]
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert not [number for number in numbers if Path(f"/proc/{number}").exists()]
    assert not (sweeping.place / "holds-2").exists()


def test_a_points_file_that_others_can_write_is_not_read(sweeping: Sweeping, tmp_path: Path) -> None:
    from hpc_train.errors import UserError
    from hydra_plugins.hpc_train_launchers._point import PointsFile, write_points_file

    write_points_file(tmp_path / "points", "shared", [b"", b""])
    (tmp_path / "points").chmod(0o620)
    with pytest.raises(UserError, match="is not yours alone"):
        PointsFile(tmp_path / "points").read_shared()


def test_an_application_that_only_has_the_plugin_installed_imports_nothing_heavy() -> None:
    heavy = "torch", "numpy", "submitit", "hpc_train", "rich"
    script = (
        "import json, sys; from hydra.core.plugins import Plugins; Plugins.instance(); "
        f"print(json.dumps([name for name in {heavy} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
