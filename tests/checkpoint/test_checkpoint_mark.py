"""`hpc-train checkpoint mark`, and what a step says of its code, its config and its times."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoint_commands import Terminal
from checkpoint_helpers import alone, blank, save_alone, state, whole

from hpc_train import __version__
from hpc_train.checkpoint import Saver, list_committed_steps, resume_from_checkpoint
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.manifest import parse_manifest, read_manifest
from hpc_train.checkpoint.provenance import Origin, hash_code, identify_code
from hpc_train.checkpoint.storage.file_system import checksum_bytes

ORIGIN = Origin(*identify_code(), config="c" * 64, model="d" * 64, attempt=3)


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.chdir(tmp_path)
    return Terminal(capsys)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with steps 1 and 2."""
    for step in (1, 2):
        save_alone(tmp_path / "checkpoints", step, state(0))
    return tmp_path


def resumed(run: Path) -> int | None:
    found = resume_from_checkpoint(run / "checkpoints", "auto", blank(whole(state(0))), alone())
    return found.step if found else None


def test_a_marked_step_is_passed_over_until_it_is_good_again(run: Path, terminal: Terminal) -> None:
    step = run / "checkpoints/step-2"
    marked = {"step": 2, "path": str(step), "bad": "is marked bad: the loss diverged"}
    assert terminal.ok("mark", step, "--bad", "the loss\n diverged", "--json").json == marked
    assert resumed(run) == 1
    assert terminal.ok("inspect", step, "--json").json["bad"] == marked["bad"]
    assert "the loss diverged" in terminal.ok("inspect", step).out
    assert "the loss diverged" in terminal.ok("ls", run).out
    assert terminal.ok("mark", run, "--step", 2, "--good", "--json").json == {**marked, "bad": None}
    assert resumed(run) == 2
    assert terminal.ok("inspect", step, "--json").json["bad"] is None
    assert "is good" in terminal.ok("mark", step, "--good").out, "twice is no mistake"


def test_by_number_in_the_current_directory_and_without_a_reason(run: Path, terminal: Terminal) -> None:
    assert "no reason given: checkpoint.resume=auto passes it over" in terminal.ok("mark", 2, "--bad").out
    assert resumed(run) == 1
    terminal.ok("mark", 2, "--good")
    assert resumed(run) == 2


def test_which_step_is_never_guessed(run: Path, terminal: Terminal) -> None:
    step = run / "checkpoints/step-2"
    assert "say which step" in terminal.refused("mark", run, "--bad")
    assert "step 7 is not in" in terminal.refused("mark", run, "--step", 7, "--bad")
    assert "step 7 is not in" in terminal.refused("mark", 7, "--bad")
    assert "is one step already" in terminal.refused("mark", step, "--step", 1, "--bad")
    assert "--bad --good is required" in terminal.refused("mark", step)
    assert "not allowed with" in terminal.refused("mark", step, "--good", "--bad", "x")
    assert resumed(run) == 2


def saved(directory: Path, origin: Origin | None) -> None:
    saver = Saver(directory, alone(), background=False, origin=origin)
    saver.save(len(list_committed_steps(directory)) + 1, whole(state(0)), {})
    (it,) = saver.wait()
    it.wait()


def test_a_step_says_what_made_it_and_how_long_it_took(tmp_path: Path, terminal: Terminal) -> None:
    saved(tmp_path / "checkpoints", ORIGIN)
    manifest = read_manifest(tmp_path / "checkpoints/step-1", 1)
    assert manifest.origin == ORIGIN
    assert manifest.times is not None
    facts = terminal.ok("inspect", tmp_path, "--json").json
    assert facts["origin"] == {
        "version": __version__,
        "code": ORIGIN.code,
        "config": "c" * 64,
        "model": "d" * 64,
        "attempt": 3,
    }
    times = facts["times"]
    assert times.keys() == {"at", "stall", "copy", "prepare", "write", "slowest_rank", "agree"}
    assert all(times[part] >= 0 for part in times)
    shown = terminal.ok("inspect", tmp_path).out
    for word in ("attempt 3", ORIGIN.code, "c" * 64, "write", "slowest rank: 0"):
        assert word in shown
    listed = terminal.ok("ls", tmp_path, "--json").json
    assert [(it["saved_at"], it["attempt"]) for it in listed] == [(manifest.times.at, 3)]


def test_a_resharded_step_is_of_the_same_code(tmp_path: Path, terminal: Terminal) -> None:
    saved(tmp_path / "run/checkpoints", ORIGIN)
    terminal.ok("reshard", tmp_path / "run", tmp_path / "new", "--ranks", 2)
    facts = terminal.ok("inspect", tmp_path / "new", "--json").json
    assert (facts["origin"]["code"], facts["times"]) == (ORIGIN.code, None)


def test_the_clock_does_not_order_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save is on a node whose clock is an hour behind that of the one before."""
    for hour in range(3):
        monkeypatch.setattr("time.time", lambda hour=hour: 1e9 - 3600.0 * hour)
        saved(tmp_path, ORIGIN)
    monkeypatch.undo()
    at = [read_manifest(tmp_path / f"step-{step}", step).times for step in (1, 2, 3)]
    assert all(a is not None and b is not None and a.at > b.at for a, b in pairwise(at))
    assert list_committed_steps(tmp_path) == [1, 2, 3]


def with_body(data: bytes, **changes: Any) -> bytes:
    """The manifest with other fields, and a checksum that is right."""
    body = {key: value for key, value in {**json.loads(data), **changes}.items() if value is not None}
    body.pop("checksum")
    text = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**body, "checksum": checksum_bytes(text)}).encode()


def test_manifests_of_other_releases(tmp_path: Path) -> None:
    """Earlier ones say nothing of this, later ones perhaps more."""
    saved(tmp_path, ORIGIN)
    data = (tmp_path / "step-1/manifest.json").read_bytes()
    earlier = parse_manifest(with_body(data, origin=None, times=None))
    assert (earlier.origin, earlier.times) == (None, None)
    later = parse_manifest(with_body(data, origin={**json.loads(data)["origin"], "planet": "earth"}, weather="fine"))
    assert later.origin == ORIGIN
    for wrong in ({"version": "1"}, [], "x", {"version": "1", "code": "x", "attempt": "third"}):
        with pytest.raises(CheckpointError, match="not a manifest"):
            parse_manifest(with_body(data, origin=wrong))


def test_the_hash_of_code_is_of_names_and_contents(tmp_path: Path) -> None:
    for name, text in (("a/x.py", "1"), ("b/y.py", "2"), ("a/data.bin", "3")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = hashlib.sha256(b"a/x.py\x001\x001" + b"b/y.py\x001\x002").hexdigest()
    assert hash_code.__wrapped__(tmp_path) == expected
    (tmp_path / "a/x.py").rename(tmp_path / "a/z.py")
    assert hash_code.__wrapped__(tmp_path) != expected


def test_what_differs_is_told_in_words() -> None:
    assert ORIGIN.differs(ORIGIN) == []
    assert ORIGIN.differs(replace(ORIGIN, config="e" * 64, attempt=9, model=None)) == []
    told = ORIGIN.differs(replace(ORIGIN, version="0.0.9", code="f" * 64, model="0" * 64))
    assert told == [
        f"hpc_train {__version__} ({ORIGIN.code[:12]}) in place of 0.0.9 (ffffffffffff)",
        "the model's file dddddddddddd in place of 000000000000",
    ]
