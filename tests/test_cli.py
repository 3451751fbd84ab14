"""The command as a whole: help, version, --cfg, what it imports, and the order of its words."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc_train import __version__
from hpc_train.cli.main import main, make_parser
from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict

HEAVY = "{'torch', 'hydra', 'omegaconf', 'numpy', 'h5py', 'submitit', 'rich', 'tensorboard'}"


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, (*path, name))


def python(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("command", list(commands(make_parser())), ids=" ".join)
def test_help_of_every_command(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.err) == (0, "")
    assert printed.out.startswith(f"usage: {' '.join(('hpc-train', *command))} ")
    assert "--debug" in printed.out


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from hpc_train.cli.main import main
for command in {list(commands(make_parser()))}:
    try:
        main([*command, "--help"])
    except SystemExit:
        pass
print(sorted({HEAVY} & set(sys.modules)))
"""
    assert python(code).splitlines()[-1] == "[]"


def test_composing_a_run_does_not_import_torch() -> None:
    code = "import sys; from hpc_train.cli.main import main; main(['submit', '--cfg']); print('torch' in sys.modules)"
    assert python(code).splitlines()[-1] == "False"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=vit_tiny", "data=digits", "train.epochs=1.5", "optim.lr=1e-3"],
        ["model=custom", "model.name=mine", "+model.args.width=3", "launch.setup=['module load cuda']"],
        ["cluster=frontier", "parallel=hsdp", "parallel.tp=4", "launch.name='a name: with # signs'"],
    ],
)
def test_what_cfg_prints_is_the_same_config_again(
    overrides: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--cfg", *overrides]) == 0
    printed = OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out))
    assert config_from_dict(printed) == compose(overrides)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_overrides_stand_before_and_after_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "optim.lr=1", "--cfg", "optim.lr=0.5", "--json", "train.seed=7"]) == 0
    mixed = capsys.readouterr().out
    assert main(["submit", "--cfg", "optim.lr=0.5", "train.seed=7"]) == 0
    assert capsys.readouterr().out == mixed


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hpc_train", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{__version__}\n"


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", "a\x1b[2J\nb"]) == 2
    assert capsys.readouterr().err.startswith("hpc-train: no token store at a\\x1b[2J\\nb: build one with ")


def test_a_process_without_standard_streams_gives_its_files_other_descriptors(tmp_path: Path) -> None:
    """With `>&-`, a file would be opened as descriptor 1, and output of children would go into it."""
    code = "import sys; from hpc_train.cli.main import main; code = main(sys.argv[2:]); seen = open(sys.argv[1], 'w')"
    command = f'{code}; print(code, file=seen); print(seen.fileno(), file=seen); print("nowhere", flush=True)'
    closed = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", command]
    subprocess.run([*closed, str(tmp_path / "seen"), "explain", "optim.lr"], check=True)
    code_line, descriptor = (tmp_path / "seen").read_text().split()
    assert code_line == "0"
    assert int(descriptor) > 2


def test_a_current_directory_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "hpc-train: the current directory no longer exists; cd to one that does\n"
