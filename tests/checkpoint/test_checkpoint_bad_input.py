"""Every command on an invalid place, is odd or is damaged: one line, exit code 2 (the user) or 1 (the data)."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_commands import Terminal
from checkpoint_helpers import save_alone, state

from hpc_train.checkpoint.storage.step_directory import find_steps

OF_A_PLACE = {
    "ls": ("ls", "{}"),
    "inspect": ("inspect", "{}"),
    "verify": ("verify", "{}"),
    "reshard": ("reshard", "{}", "new", "--ranks", "2"),
    "export": ("export", "{}", "new", "--format", "safetensors"),
    "prune": ("prune", "{}", "--keep", "9"),
    "mark": ("mark", "{}", "--bad"),
}
OF_ONE_STEP = ("ls", "inspect", "verify", "mark", "reshard")
IMPORTS = ("torch", "safetensors", "dcp", "hf")


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one step, and a link to each."""
    save_alone(tmp_path / "run/checkpoints", 5, state(5))
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "best").symlink_to("run/checkpoints/step-5")
    return tmp_path


def words(command: str, place: str) -> list[str]:
    return [word.format(place) for word in OF_A_PLACE[command]]


@pytest.mark.parametrize("command", OF_A_PLACE)
def test_a_place_without_checkpoints(run: Path, terminal: Terminal, command: str) -> None:
    (run / "file").touch()
    (run / "empty").mkdir()
    (run / "odd").mkdir()
    (run / "odd/step-3").touch()
    (run / "dangling").symlink_to("nowhere")
    (run / "loop").symlink_to("loop")
    for place in ("nowhere", "", "file", "dangling", "loop", "a\x1b[2Jb", "run/checkpoints/step-7"):
        for json in ([], ["--json"]):
            line = terminal.refused(*words(command, place), *json)
            assert ("is not a directory" if place == "file" else "no such directory") in line
            assert "\x1b" not in line
    for place in ("empty", "empty/", "odd", "run/checkpoints/step-5/shards"):
        assert "there is no checkpoint in it" in terminal.refused(*words(command, place))


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
def test_a_name_that_cannot_be_written(tmp_path: Path, run: Path, terminal: Terminal, name: str) -> None:
    line = terminal.refused("export", "run", name, "--format", "safetensors")
    assert ("File name too long" if len(name) == 300 else "is no name for a file or folder") in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "link", "run"]


@pytest.mark.parametrize("command", OF_A_PLACE)
def test_a_sweep_names_its_points(tmp_path: Path, terminal: Terminal, command: str) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/points.jsonl").touch()
    no_point = "hpc-train: sweep: is a sweep, and no point of it has a checkpoint yet; see `hpc-train status sweep`\n"
    assert terminal.refused(*words(command, "sweep")) == no_point
    for name in ("b", "a", "begun"):
        (tmp_path / "sweep/points" / name / "checkpoints").mkdir(parents=True)
    assert terminal.refused(*words(command, "sweep")) == no_point
    for name in ("b", "a"):
        (tmp_path / "sweep/points" / name / "checkpoints/step-5").mkdir()
    for place in ("sweep", "sweep/points"):
        assert terminal.refused(*words(command, place)) == (
            "hpc-train: sweep: is a sweep, not a run; give a point that has a checkpoint: "
            "sweep/points/a, sweep/points/b\n"
        )


@pytest.mark.parametrize("command", OF_ONE_STEP)
@pytest.mark.parametrize("place", ["run/checkpoints/step-5", "run/checkpoints/step-5/", "best", "best/"])
def test_one_step_by_any_path(run: Path, terminal: Terminal, command: str, place: str) -> None:
    told = terminal.ok(*words(command, place), "--json").json
    assert (told[0] if command == "ls" else told)["step"] == 5


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "reshard", "prune"])
@pytest.mark.parametrize("place", ["run", "run/", "run/checkpoints", "run/checkpoints/", "link", "link/"])
def test_a_run_by_any_path(run: Path, terminal: Terminal, command: str, place: str) -> None:
    assert "5" in terminal.ok(*words(command, place), "--json").out


@pytest.mark.parametrize("damage", ["missing", "text", "bytes", "directory", "other"])
def test_a_damaged_manifest(run: Path, terminal: Terminal, damage: str) -> None:
    manifest = run / "run/checkpoints/step-5/manifest.json"
    whole = manifest.read_bytes()
    manifest.unlink()
    if damage == "directory":
        manifest.mkdir()
    elif damage != "missing":
        manifest.write_bytes({"text": b"{", "bytes": b"\xff\xfe\0", "other": whole.replace(b"5", b"6")}[damage])
    for command in ("inspect", "reshard", "export"):
        printed = terminal.call(*words(command, "run"), "--json")
        assert (printed.code, printed.out, printed.err.count("\n")) == (1, "", 1)
        assert "step 5 in" in printed.err
        assert "is damaged: manifest.json: " in printed.err
    printed = terminal.call("verify", "run")
    assert (printed.code, printed.out, printed.err.count("\n")) == (1, "", 1)
    printed = terminal.call("verify", "run", "--json")
    assert (printed.code, printed.err, printed.json["ok"]) == (1, "", False)
    assert terminal.ok("ls", "run", "--json").json[0]["state"] == "damaged"
    assert terminal.ok("prune", "run", "--keep", "9", "--json").json["removed"] == []
    assert "is marked bad: so it is" in terminal.ok("mark", "best", "--bad", "so it is").out


@pytest.mark.parametrize("kind", IMPORTS)
def test_import_of_what_is_none(run: Path, terminal: Terminal, kind: str) -> None:
    (run / "file").write_text("x")
    (run / "empty").mkdir()
    for place in ("nowhere", "file", "empty", "run", "link/", "run/checkpoints/step-5"):
        terminal.refused("import", place, "imported", "--format", kind, "--json")
    assert not (run / "imported").exists()


def test_what_else_lies_in_a_directory_of_checkpoints_is_no_concern(run: Path) -> None:
    """Of the training neither, which looks there for what to go on from."""
    directory = run / "run/checkpoints"
    (directory / "loop").symlink_to("loop")
    (directory / "notes.txt").touch()
    (directory / "step-x").mkdir()
    assert list(find_steps(directory)) == [5]
