"""Commands that only look at checkpoints, or remove them, start without torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoint_helpers import save_alone, state

import hpc_train.checkpoint

PROGRAM = """
import contextlib, io, json, sys
from hpc_train.cli.main import main
for words in json.loads(sys.argv[1]):
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = main(["checkpoint", *words])
    loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "hydra", "scipy", "matplotlib"})
    print(json.dumps([code, error.getvalue().splitlines(), loaded]))
"""


def run(commands: Sequence[Sequence[object]]) -> list[tuple[int, list[str]]]:
    """Run commands in one new interpreter, which none of them has import torch; return (exit code, stderr) of each."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", PROGRAM, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [loaded for _, _, loaded in found] == [[] for _ in commands]
    return [(code, said) for code, said, _ in found]


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2, 3):
        save_alone(directory, step, state(step))
    (directory / "step-9.tmp-elsewhere.1.ab").mkdir()
    return directory


COMMANDS = (
    ("ls",),
    ("ls", "--json"),
    ("inspect",),
    ("inspect", "--tensors", "--json"),
    ("mark", "--step", 1, "--bad", "a reason"),
    ("mark", "--step", 1, "--good"),
    ("prune", "--keep", 2, "--dry-run"),
    ("prune", "--keep", 2),
)


def test_commands_that_read_no_tensor_import_no_torch(steps: Path) -> None:
    assert run([(*words, steps.parent) for words in COMMANDS]) == [(0, [])] * len(COMMANDS)


def test_a_wrong_path_is_one_line_without_torch() -> None:
    commands = [("ls",), ("inspect",), ("mark", "--bad", "x"), ("prune", "--keep", 1)]
    for code, said in run([(*command, where) for command in commands for where in ("nowhere", "")]):
        assert (code, len(said)) == (2, 1)
        assert said[0].startswith("hpc-train: ")


def test_a_damaged_manifest_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4/manifest.json").write_text("{")
    listed, (code, said) = run([("ls", tmp_path), ("inspect", tmp_path)])
    assert listed == (0, [])
    assert code != 0
    assert len(said) == 1


def test_names_are_imported_as_they_are_asked_for() -> None:
    found = {name: getattr(hpc_train.checkpoint, name) for name in hpc_train.checkpoint.__all__}
    assert all(callable(value) for value in found.values()), found
    for modules in hpc_train.checkpoint._MODULES:
        assert modules not in hpc_train.checkpoint.__all__, "a module would hide the name"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hpc_train.checkpoint.nothing  # noqa: B018
