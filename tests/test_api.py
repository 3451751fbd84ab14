"""The Python API: lazy, results in place of prints, errors that can be caught; and the page that shows it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_train

SMALL = ("launch.ranks=1", "train.steps=3", "train.sequence_length=32", "train.global_batch=4", "train.micro_batch=4")
FAST = ("train.eval_every=0", "checkpoint.every=0", "train.tensorboard=false")
DOCS = Path(__file__).parents[1] / "docs"


def test_importing_costs_nothing_heavy() -> None:
    code = "import hpc_train, sys; print(sorted({'torch', 'hydra', 'numpy', 'submitit'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert {"Checkpointer", "Preemption", "Run", "SampleOrder", "init", "place", "plan"} < set(hpc_train.__all__)
    assert all(callable(getattr(hpc_train, name)) for name in hpc_train.__all__)
    completed = "import hpc_train, sys; print({*hpc_train.__all__} <= {*dir(hpc_train)}, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", completed], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = hpc_train.trian  # type: ignore[attr-defined]


def test_a_run_is_trained_looked_at_and_found_again(tmp_path: Path) -> None:
    config = hpc_train.compose([*SMALL, *FAST, f"run_dir={tmp_path / 'run'}"])
    run = hpc_train.train(config)
    again = hpc_train.Run(tmp_path / "run")
    for found in (run, again):
        assert found.path == tmp_path / "run"
        assert [line["step"] for line in found.metrics()] == [1, 2, 3]
        status = found.wait(timeout=60)
        assert (status.state, status.step, status.exit_code) == ("DONE", 3, 0)
        assert status.loss == found.metrics()[-1]["loss"]
        assert {"start", "end"} <= {event["event"] for event in found.events()}
        assert found.config.train.steps == 3
    assert repr(run) == f"Run('{tmp_path / 'run'}')"


def test_errors_are_raised_and_say_what_the_command_says(tmp_path: Path) -> None:
    with pytest.raises(hpc_train.UserError, match=r"no key 'trian'; did you mean 'train'\?"):
        hpc_train.compose(["trian.lr=1"])
    with pytest.raises(hpc_train.UserError, match="use submit"):
        hpc_train.train(hpc_train.compose(["launch=slurm"]))
    with pytest.raises(hpc_train.UserError, match="use `hpc-train train`"):
        hpc_train.submit(hpc_train.compose([]))
    with pytest.raises(hpc_train.UserError, match="no such run directory"):
        hpc_train.Run(tmp_path / "none")


def test_a_run_that_fails_raises_its_first_error(tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text(
        "from torch import nn\nfrom hpc_train.models import register\n\n\n"
        "@register('broken')\ndef broken() -> nn.Module:\n    raise RuntimeError('no such luck')\n"
    )
    model = ("model=custom", f"model.module={tmp_path / 'broken_model.py'}", "model.name=broken")
    code = (
        "import sys, hpc_train\n"
        "try:\n    hpc_train.train(hpc_train.compose(sys.argv[1:]))\n"
        "except hpc_train.RunFailed as error:\n    print('caught', 'no such luck' in str(error))\n"
    )
    words = [*SMALL, *FAST, *model[:1], "model.module=broken_model", model[2], f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["caught True"], 0), done.stderr


def test_a_plan_keeps_what_is_given_and_recommends_a_config() -> None:
    words = ["cluster=dgx_a100", "cluster.nodes=1", "model=llama_1b", "precision=bf16", "train.global_batch=64"]
    answer = hpc_train.plan(hpc_train.compose([*words, "parallel.tp=2", "parallel.pp=1"]))
    assert answer.best is not None
    assert answer.best.config.parallel.tp == 2
    assert answer.best.memory is not None


@pytest.mark.parametrize("page", ["python_api.md", "parts.md"])
def test_the_page_runs_as_written(tmp_path: Path, page: str) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))
    assert code.count("hpc_train.") >= 3
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
