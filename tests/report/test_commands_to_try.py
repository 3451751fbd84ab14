"""`report RUN --try` prints commands that the project accepts, and that differ from the run in the advice alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import waits, write_run

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_to_yaml


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train", ["data=text", "data.sources=['a, b.txt']"]),
        ("submit", ["launch=slurm", "cluster=dgx_h100", "cluster.nodes=2", "launch.exclude='n9,m[1-3]'"]),
    ],
)
def test_commands_to_try_are_accepted(
    command: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose([*words, "train.global_batch=64"])
    run = tmp_path / "a run"
    write_run(
        run,
        16,
        range(1, 41),
        lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)},
    )
    (run / "config.yaml").write_text(config_to_yaml(replace(config, run_dir=str(run))))
    entries = [{"rank": rank, "process": rank, "host": f"node{rank // 8}"} for rank in range(16)]
    (run / "rankmap.json").write_text(json.dumps({"mesh": {"pp": 1}, "ranks": entries}))
    assert main(["report", "--try", str(run)]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    for number, (program, verb, *overrides) in enumerate(lines, 1):
        assert (program, verb) == ("hpc-train", command)
        tried = compose(overrides)
        assert tried.run_dir == f"{run}-try{number}"
        assert (
            replace(
                tried,
                run_dir=config.run_dir,
                launch=config.launch,
                resilience=config.resilience,
                profile=config.profile,
            )
            == config
        )
    excluded = compose(lines[0][2:]).launch.exclude
    assert excluded == ("n9,m[1-3],node0" if command == "submit" else "node0")
    assert compose(lines[1][2:]).resilience.preflight == "full"
    profile = compose(lines[2][2:]).profile
    assert (profile.steps, profile.ranks) == ("10:14", [1])
