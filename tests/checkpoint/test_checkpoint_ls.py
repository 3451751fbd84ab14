"""`hpc-train checkpoint ls|inspect|prune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import names, save_alone, sharded, state

from hpc_train.checkpoint import save_step
from hpc_train.checkpoint.storage.retention import make_token
from hpc_train.checkpoint.storage.step_directory import explain_bad_step, mark_bad, mark_weights_only
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with steps 5, 10 and, after a rollback, 7."""
    for step in (5, 10, 7):
        save_alone(tmp_path / "checkpoints", step, state(step), {"consumed_samples": 8 * step})
    return tmp_path


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_ls_tells_the_steps_in_the_order_of_their_commits(run: Path, terminal: Terminal) -> None:
    directory = run / "checkpoints"
    listed = terminal.ok("ls", run, "--json").json
    assert [entry["step"] for entry in listed] == [5, 10, 7]
    shard = directory / "step-5/shards/000/000000.h5"
    expected = {
        "step": 5,
        "committed": True,
        "verified": None,
        "bytes": shard.stat().st_size,
        "path": str(directory / "step-5"),
    }
    assert {key: listed[0][key] for key in expected} == expected
    assert terminal.ok("ls", directory, "--json").json == listed
    assert terminal.ok("ls", directory / "step-5", "--json").json == listed[:1]


def test_ls_verifies_on_request(run: Path, terminal: Terminal) -> None:
    flip(run / "checkpoints/step-10/shards/000/000000.h5", 70_000)
    listed = terminal.ok("ls", run, "--verify", "--json").json
    assert [(entry["step"], entry["verified"], entry["state"]) for entry in listed] == [
        (5, True, "sound"),
        (10, False, "damaged"),
        (7, True, "sound"),
    ]


def test_ls_names_leftovers_weights_and_what_is_bad(run: Path, terminal: Terminal) -> None:
    directory = run / "checkpoints"
    for name in ("step-11.tmp-host.1.ab", "step-3.trash-host.1.ab"):
        (directory / name).mkdir()
        (directory / name / "file").write_bytes(b"12345")
    save_alone(directory / "weights", 6, {"w": torch.ones(3)}, mark_weights_only({}))
    mark_bad(directory, 10, "the loss diverged")
    listed = terminal.ok("ls", run, "--json").json
    seen = [(it["step"], it["committed"], it["state"], it["weights_only"], it["bad"]) for it in listed]
    assert seen == [
        (5, True, "committed", False, None),
        (10, True, "committed", False, explain_bad_step(directory / "step-10", None)),
        (7, True, "committed", False, None),
        (6, True, "committed", True, None),
        (11, False, "unfinished", None, None),
        (3, False, "being deleted", None, None),
    ]
    assert "the loss diverged" in listed[1]["bad"]
    assert [it["bytes"] for it in listed[-2:]] == [5, 5]
    table = terminal.ok("ls", run).out.splitlines()
    assert [line.split()[:2] for line in table[1:]] == [[str(it["step"]), it["state"].split()[0]] for it in listed]
    assert str(directory / "step-11.tmp-host.1.ab") in table[-2]


def test_a_step_without_a_manifest_is_listed_as_damaged(run: Path, terminal: Terminal) -> None:
    (run / "checkpoints/step-5/manifest.json").unlink()
    listed = {entry["step"]: entry for entry in terminal.ok("ls", run, "--json").json}
    assert (listed[5]["state"], listed[5]["weights_only"]) == ("damaged", None)
    assert listed[5]["bytes"] > 1000


@pytest.mark.parametrize("command", [("ls",), ("inspect",), ("verify",), ("prune", "--keep", "1")])
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, terminal: Terminal, command: tuple[str, ...]) -> None:
    assert "no such directory" in terminal.refused(*command, tmp_path / "none")
    assert "there is no checkpoint in it" in terminal.refused(*command, tmp_path)
    file = tmp_path / "file"
    file.touch()
    assert "is not a directory" in terminal.refused(*command, file)


def test_inspect_tells_tensors_and_how_they_are_cut(tmp_path: Path, terminal: Terminal) -> None:
    directory = tmp_path / "checkpoints"

    def rank(world: World) -> None:
        pieces = sharded(state(0), 0, world.rank, world.size)
        save_step(directory, 4, pieces, {"note": "a\x1b[2Jb"}, world).wait()

    run_ranks(rank, 2)
    facts = terminal.ok("inspect", tmp_path, "--tensors", "--json").json
    assert (facts["step"], facts["world_size"], facts["tensor_count"], facts["weights_only"]) == (4, 2, 4, False)
    assert facts["bytes"] == sum(file["bytes"] for file in facts["files"])
    assert [file["file"] for file in facts["files"]] == ["shards/000/000000.h5", "shards/000/000001.h5"]
    assert facts["extra"] == {"note": "a\x1b[2Jb"}
    assert facts["storage"]["file_system"]
    tensors = {tensor["name"]: tensor for tensor in facts["tensors"]}
    assert tensors["blocks.0.weight"] == {
        "name": "blocks.0.weight",
        "dtype": "float32",
        "shape": [7, 5],
        "bytes": 140,
        "files": 2,
        "parts": 2,
        "cuts": [2, 1],
    }
    assert (tensors["optim.step.blocks.0.weight"]["cuts"], tensors["optim.step.blocks.0.weight"]["files"]) == ([], 1)
    shown = terminal.ok("inspect", directory / "step-4", "--tensors").out
    assert "\x1b" not in shown
    assert "2 x 1" in shown
    assert facts["storage"]["file_system"] in shown


def test_inspect_shows_the_newest_and_the_timeline_of_its_run(run: Path, terminal: Terminal) -> None:
    events = [
        {"event": "start", "time": 1.0, "attempt": 0, "step": 0},
        {"event": "checkpoint", "time": 2.0, "attempt": 0, "step": 7, "seconds": 0.5, "stall": 0.25, "bytes": 9},
        {"event": "checkpoint", "time": 3.0, "attempt": 0, "step": 8, "seconds": 0.5, "stall": 0.25, "bytes": 9},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + '{"torn')
    facts = terminal.ok("inspect", run, "--json").json
    assert facts["step"] == 7
    assert facts["timeline"] == events[:2]
    assert "0.25" in terminal.ok("inspect", run).out


def test_inspect_of_a_damaged_manifest_is_the_machines_fault(run: Path, terminal: Terminal) -> None:
    flip(run / "checkpoints/step-7/manifest.json", 40)
    printed = terminal.call("inspect", run / "checkpoints/step-7")
    assert (printed.code, printed.out) == (1, "")
    assert printed.err.startswith("hpc-train: checkpoint step 7 in ")
    assert printed.err.count("\n") == 1


def test_prune_keeps_the_newest_commits(run: Path, terminal: Terminal) -> None:
    directory = run / "checkpoints"
    (directory / "step-3.trash-host.1.ab").mkdir()
    host, _, random, machine = make_token().split(".")
    dead = f"step-4.tmp-{host}.4194305.{random}.{machine}"  # larger than any process id
    (directory / dead).mkdir()
    expected = {"removed": [5], "kept": [10, 7], "leftovers": ["step-3.trash-host.1.ab", dead], "dry_run": True}
    before = names(directory)
    assert terminal.ok("prune", run, "--keep", 2, "--dry-run", "--json").json == expected
    assert names(directory) == before
    told = terminal.ok("prune", run, "--keep", 2, "--json").json
    assert told == {**expected, "dry_run": False}
    assert [name for name in names(directory) if name.startswith("step")] == ["step-10", "step-7"]
    assert terminal.ok("prune", run, "--keep", 2).out == "removed nothing\nkept step 10, step 7\n"


def test_prune_removes_nothing_without_enough_whole_ones(run: Path, terminal: Terminal) -> None:
    (run / "checkpoints/step-7/shards/000/000000.h5").unlink()
    assert terminal.ok("prune", run, "--keep", 3, "--json").json["removed"] == []
    assert terminal.ok("ls", run, "--json").json[0]["step"] == 5


def test_prune_of_one_step_or_of_no_number_is_refused(run: Path, terminal: Terminal) -> None:
    assert "is one step" in terminal.refused("prune", run / "checkpoints/step-5", "--keep", 1)
    assert "not a number of 1 or more" in terminal.refused("prune", run, "--keep", 0)
    assert "--keep" in terminal.refused("prune", run)


def test_a_run_that_saves_weights_only(tmp_path: Path, terminal: Terminal) -> None:
    for step in (3, 6):
        save_alone(tmp_path / "checkpoints/weights", step, {"w": torch.ones(3)}, mark_weights_only({}))
    listed = terminal.ok("ls", tmp_path, "--json").json
    assert [(it["step"], it["weights_only"]) for it in listed] == [(3, True), (6, True)]
    assert terminal.ok("inspect", tmp_path, "--json").json["weights_only"] is True
