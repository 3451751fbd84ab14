"""parallel=auto: what the planner would take is what is submitted, and why is beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_runs import run

from hpc_train.cli.main import main
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.plain_config import config_from_dict, config_to_dict
from hpc_train.errors import UserError
from hpc_train.launch.freeze import decide_auto_layout, freeze_run
from hpc_train.planner.auto import choose_parallel
from hpc_train.planner.plan import PlanOptions, plan_overrides
from hpc_train.training.run_directory import locate_run_directory

NODE = ("cluster=dgx_a100", "model=llama_1b", "precision=bf16", "train.sequence_length=1024", "train.global_batch=32")
HERE = ("cluster=local", "data=digits", "model=vit_tiny")


def test_it_is_what_plan_says_is_best() -> None:
    decision = choose_parallel(run(*NODE, "parallel=auto", "cluster.nodes=2"), 16)
    best = plan_overrides([*NODE, "cluster.nodes=2"], options=PlanOptions(top=1)).best
    assert best is not None
    assert decision.config.parallel == best.config.parallel
    assert decision.config.train.micro_batch == best.config.train.micro_batch
    assert resolve_degrees(decision.config.parallel, 16).world == 16
    told = json.loads(decision.text)
    assert told["best"]["step_seconds"]["p50"] == pytest.approx(best.step.p50 if best.step else 0)
    assert decision.line.startswith("parallel=auto: ")
    assert "per step" in decision.line
    assert "\n" not in decision.line


def test_what_is_given_stays() -> None:
    config = run(*NODE, "parallel=auto", "parallel.tp=4", "parallel.strategy=zero2", "train.micro_batch=2")
    assert config.parallel.fixed == ["parallel.strategy", "parallel.tp", "train.micro_batch"]
    chosen = choose_parallel(config, 8).config
    assert (chosen.parallel.tp, chosen.parallel.strategy, chosen.train.micro_batch) == (4, "zero2", 2)
    assert not chosen.parallel.auto


def test_a_run_that_is_read_again_still_knows_what_was_given() -> None:
    config = run(*NODE, "parallel=auto", "parallel.tp=2")
    assert config_from_dict(config_to_dict(config)) == config


def test_without_nodes_it_takes_the_fewest_that_fit() -> None:
    flat = (*NODE, "parallel=auto", "parallel.cp=1")
    small, large = (choose_parallel(run(*flat, f"model={model}")).config for model in ("llama_1b", "llama_70b"))
    assert small.cluster.nodes == 1
    assert large.cluster.nodes is not None
    assert large.cluster.nodes > 1


@pytest.mark.parametrize(
    "overrides", [HERE, ("cluster=local", "model=custom", "model.name=mine")], ids=["vit", "custom"]
)
def test_a_machine_that_is_not_described_gets_data_parallelism(overrides: tuple[str, ...]) -> None:
    decision = choose_parallel(run(*overrides, "parallel=auto"), 2)
    assert decision.config.parallel.strategy == "ddp"
    assert resolve_degrees(decision.config.parallel, 2).dp_replicate == 2
    assert decision.config.train == run(*overrides).train
    assert "GiB" not in decision.line


def test_a_machine_without_speeds_gets_the_simplest_that_fits_its_memory() -> None:
    known = ("cluster=slurm", "cluster.node.gpus=8", "cluster.nodes=1", "model=llama_1b", "train.micro_batch=1")
    chosen = {
        size: choose_parallel(run(*known, "parallel=auto", f"cluster.gpu.memory_gib={size}"), 8) for size in (80, 12)
    }
    assert chosen[80].config.parallel.strategy == "ddp"
    assert chosen[12].config.parallel.strategy in ("zero1", "zero2", "zero3")


def test_a_model_that_fits_nowhere_is_refused_in_one_line() -> None:
    with pytest.raises(
        UserError, match=r"parallel=auto: model=gpt3_1t fits on 8 ranks of cluster=dgx_a100 in no layout"
    ):
        choose_parallel(run(*NODE, "parallel=auto", "model=gpt3_1t"), 8)


def test_the_run_directory_holds_the_decision_and_its_reasons(tmp_path: Path) -> None:
    remarks: list[str] = []
    config = run(*HERE, "parallel=auto", f"run_dir={tmp_path / 'run'}")
    spec = freeze_run(config, 2, remarks.append)
    assert spec.run_config().parallel.auto is False
    assert spec.degrees == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1}
    folder = locate_run_directory(config)
    assert "ddp" in json.loads(folder.plan.read_text())["notes"][0]
    assert folder.plan.stat().st_mode & 0o077 == 0
    (remark,) = remarks
    assert "parallel=auto: ddp" in remark


def test_a_run_that_says_all_itself_is_left_alone(tmp_path: Path) -> None:
    config = run(*HERE, f"run_dir={tmp_path / 'run'}")
    assert decide_auto_layout(config, 2, print) == (config, None)
    freeze_run(config, 2, print)
    assert not locate_run_directory(config).plan.exists()


def test_submit_asks_for_the_nodes_that_were_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--dry-run", "--json", *NODE, "parallel=auto", "model=llama_70b", "train.global_batch=128"]
    store = ["data=text", "data.path=/data/corpus.h5", "plan.nodes=[8]", "parallel.cp=1"]
    assert main([*words, *store]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ranks"] == 64
    assert "--nodes=8" in told["script"]


def test_what_does_not_decide_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "place", *NODE, "parallel=auto", "cluster.nodes=2"]) == 2
    assert "parallel=auto" in capsys.readouterr().err
