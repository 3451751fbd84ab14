"""launch.wrap: words that start each rank's Python, on this machine and in the batch script."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cli.main import main

WRITE = 'echo "$@" > {folder}/words.$$; exec "$@"'


def test_each_rank_starts_with_these_words(tmp_path: Path) -> None:
    script = tmp_path / "wrap"
    script.write_text(f"#!/bin/sh\n{WRITE.format(folder=tmp_path)}\n")
    script.chmod(0o700)
    words = [f"run_dir={tmp_path / 'run'}", "launch.ranks=2", "train.steps=1", "train.eval_every=0"]
    assert main(["train", *words, "checkpoint.every=0", f"launch.wrap=[{script},a b]"]) != 0  # `a b` is no program
    found = sorted(path.read_text() for path in tmp_path.glob("words.*"))
    assert len(found) == 2
    assert all(text.startswith("a b ") and "hpc_train.launch.rank_entrypoint" in text for text in found)
    assert main(["train", *words, "checkpoint.every=0", f"launch.wrap=[{script}]"]) == 0
    assert len(list(tmp_path.glob("words.*"))) == 4


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"run_dir={tmp_path / 'run'}", "launch.wrap=[no-such-program]"]) == 2
    assert "there is no program no-such-program here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_batch_script_has_them_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch.snapshot=off", f"run_dir={tmp_path / 'run'}", "launch.wrap=[nsys,profile,-o,a b]"]
    assert main(["submit", "--dry-run", "cluster.nodes=1", *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "run_ranks srun" in line]
    assert " nsys profile -o 'a b' " in line
    assert line.index("nsys") < line.index("rank_entrypoint")
