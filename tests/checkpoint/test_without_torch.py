"""Commands that only look at checkpoints, or remove them, start without torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_helpers import save_alone, state

import hpc_train.checkpoint

COMMAND = """
import sys
from hpc_train.cli.main import main
code = main(sys.argv[1:])
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "hydra", "scipy", "matplotlib"})
print(f"loaded {loaded}", file=sys.stderr)
sys.exit(code)
"""


def run(*words: object) -> tuple[int, list[str]]:
    command = [sys.executable, "-c", COMMAND, "checkpoint", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("run") / "checkpoints"
    for step in (1, 2, 3):
        save_alone(directory, step, state(step))
    (directory / "step-9.tmp-elsewhere.1.ab").mkdir()
    return directory


@pytest.mark.parametrize(
    "words",
    [
        ("ls",),
        ("ls", "--json"),
        ("inspect",),
        ("inspect", "--tensors", "--json"),
        ("mark", "--step", 1, "--bad", "a reason"),
        ("mark", "--step", 1, "--good"),
        ("prune", "--keep", 2, "--dry-run"),
        ("prune", "--keep", 2),
    ],
)
def test_a_command_that_reads_no_tensor_imports_no_torch(steps: Path, words: tuple[object, ...]) -> None:
    assert run(*words, steps.parent) == (0, ["loaded []"])


@pytest.mark.parametrize("command", [("ls",), ("inspect",), ("mark", "--bad", "x"), ("prune", "--keep", 1)])
@pytest.mark.parametrize("where", ["nowhere", ""])
def test_a_wrong_path_is_one_line_without_torch(command: tuple[object, ...], where: str) -> None:
    code, said = run(*command, where)
    assert (code, said[1:]) == (2, ["loaded []"])
    assert said[0].startswith("hpc-train: ")


def test_a_damaged_manifest_is_told_without_torch(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4/manifest.json").write_text("{")
    assert run("ls", tmp_path) == (0, ["loaded []"])
    code, said = run("inspect", tmp_path)
    assert code != 0
    assert said[1:] == ["loaded []"]


def test_names_are_imported_as_they_are_asked_for() -> None:
    found = {name: getattr(hpc_train.checkpoint, name) for name in hpc_train.checkpoint.__all__}
    assert all(callable(value) for value in found.values()), found
    for modules in hpc_train.checkpoint._MODULES:
        assert modules not in hpc_train.checkpoint.__all__, "a module would hide the name"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hpc_train.checkpoint.nothing  # noqa: B018
