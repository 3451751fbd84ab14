"""What the report says that the planner expects is what the planner expects, and no more than it knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import write_run

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.report.advice import Setting
from hpc_train.report.pages.page import make_report, render_page
from hpc_train.report.pages.run_charts import draw_charts
from hpc_train.report.prediction import MEMORY_PARTS, predict_gain, predict_memory, rate_advice
from hpc_train.report.run_summary import summarise_run

KNOWN = (
    "model=llama_1b",
    "cluster=dgx_h100",
    "precision=bf16",
    "parallel.strategy=zero3",
    "train.micro_batch=1",
    "train.global_batch=64",
    "train.sequence_length=4096",
)


def rate(override: str, config: RunConfig, ranks: int = 8) -> list[Setting]:
    return list(rate_advice([Setting(override, "because")], config, ranks))


def test_a_change_that_the_planner_knows_has_its_gain() -> None:
    config = compose(list(KNOWN))
    (compiled,) = rate("parallel.compile=true", config)
    assert compiled.planned_gain is not None
    assert compiled.planned_gain > 0.02


def test_what_the_planner_expects_to_be_slower_is_left_out() -> None:
    config = compose(list(KNOWN))
    loss = predict_gain(config, compose([*KNOWN, "parallel.recompute.mode=full"]), 8)
    assert loss is not None
    assert loss < -0.1
    assert rate("parallel.recompute.mode=full", config) == []


def test_what_the_run_has_already_is_left_out() -> None:
    config = compose([*KNOWN, "parallel.prefetch=2", "launch.exclude=n1"])
    assert rate("parallel.prefetch=2", config) == []
    assert rate("launch.exclude=n1", config) == []
    assert len(rate("parallel.prefetch=2 parallel.compile=true", config)) == 1


@pytest.mark.parametrize("override", ["parallel.prefetch=2", "launch.exclude=n1", "resilience.preflight=full"])
def test_what_its_model_does_not_have_it_does_not_judge(override: str) -> None:
    (setting,) = rate(override, compose(list(KNOWN)))
    assert setting.planned_gain is None


def test_an_unknown_machine_or_model_is_not_judged() -> None:
    (setting,) = rate("train.micro_batch=2", compose([]), 4)
    assert setting.planned_gain is None
    custom = compose([*KNOWN, "model=custom", "model.module=m", "model.name=x"])
    assert predict_gain(custom, replace(custom, train=replace(custom.train, micro_batch=2)), 8) is None
    assert predict_memory(custom, 8) == {}


def test_what_would_not_fit_gets_no_number() -> None:
    config = compose([*KNOWN, "train.global_batch=4096"])
    assert predict_gain(config, compose([*KNOWN, "train.global_batch=4096", "train.micro_batch=512"]), 8) is None


def test_what_would_be_refused_is_left_out() -> None:
    config = compose(list(KNOWN))
    assert rate("train.micro_batch=0", config) == []
    assert rate("parallel.pp=3", config) == []
    assert rate("train.no_such_key=3", config) == []
    assert list(rate_advice([Setting("", "a"), Setting("train.micro_batch=2", "b")], None, 8)) == [Setting("", "a")]


def test_planned_memory_is_the_plan_s(tmp_path: Path) -> None:
    config = compose(list(KNOWN))
    parts = predict_memory(config, 8)
    assert tuple(parts) == MEMORY_PARTS
    more = predict_memory(compose([*KNOWN, "train.micro_batch=2"]), 8)
    assert more["activations"] == pytest.approx(2 * parts["activations"], rel=0.05)
    assert more["parameters"] == parts["parameters"]
    whole = predict_memory(compose([*KNOWN[:3], "parallel.strategy=ddp", *KNOWN[4:]]), 8)
    assert whole["optimizer"] == pytest.approx(8 * parts["optimizer"], rel=0.01)


def test_the_page_shows_planned_memory_beside_the_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 8, range(1, 31), lambda rank, step: {"allocated": 14_000.0 + rank, "reserved": 15_000.0})
    entries = [{"rank": rank, "process": rank, "host": "n0", "gpu": f"GPU-{rank}"} for rank in range(8)]
    (run / "rankmap.json").write_text(json.dumps({"mesh": {"pp": 1}, "ranks": entries}))
    summary = summarise_run(RunPoint("run", run), run_client)
    known = replace(summary, config=compose(list(KNOWN)), facts=replace(summary.facts, accelerator=True), notes=())
    charts = draw_charts(known)
    (chart,) = [one for one in charts if one.name == "memory_planned"]
    assert "Measured: 14,007." in chart.note
    data = make_report(known, charts)
    assert data["memory"]["planned_mib"].keys() == set(MEMORY_PARTS)
    assert data["memory"]["allocated_mib"] == 14_007.0
    assert "GPU memory, planned and measured" in render_page(known, charts, data)
    assert not [one for one in draw_charts(summary) if one.name == "memory_planned"], "no configuration, no plan"


def test_the_page_says_what_the_planner_expects(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, 2, range(1, 31))
    summary = summarise_run(RunPoint("run", run), run_client)
    advised = replace(summary.verdict, advice=(Setting("parallel.compile=true", "fuses operations", 0.156),))
    judged = replace(summary, verdict=advised)
    page = render_page(judged, [], make_report(judged))
    assert "<code>parallel.compile=true</code>: fuses operations; the planner expects +16% tokens a second" in page
    assert make_report(judged)["verdict"]["advice"][0]["planned_gain"] == 0.156
