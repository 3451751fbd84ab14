"""`hpc-train plan`: the JSON that scripts rely on, what stays fixed, what is not known, the table and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planner_runs import run

from hpc_train.cli.main import main
from hpc_train.config.parallel import AXES
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.auto import choose_parallel
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.planner.plan import PlanOptions, plan_overrides

RUN = ("cluster=dgx_a100", "model=llama_1b", "precision=bf16", "train.sequence_length=1024", "train.global_batch=32")
NODE = (*RUN, "cluster.nodes=1")
FLAT = ("parallel.pp=1", "parallel.cp=1", "parallel.tp=1")
PARTS = {"parameters", "gradients", "optimizer", "activations", "logits", "buffers", "fragmentation"}


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert isinstance(told, dict)
    return told


def test_the_json_is_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, *NODE, "--top", "3")
    assert {"best", "candidates", "searched", "seconds"} <= told.keys()
    assert told["best"] == told["candidates"][0]
    assert 1 < len(told["candidates"]) <= 3
    assert told["searched"] > 10_000 > 0
    for it in (*told["candidates"], *told["pareto"]):
        step, memory = it["step_seconds"], it["memory_gib"]
        assert step["p10"] < step["p50"] < step["p90"]
        assert sum(step["parts"].values()) == pytest.approx(step["p50"])
        assert memory["stages"].keys() == {"first", "middle", "last"}
        assert all(stage.keys() >= PARTS for stage in memory["stages"].values())
        assert memory["total"] == pytest.approx(max(sum(stage.values()) for stage in memory["stages"].values()))
        assert sum(memory[part] for part in memory["stages"]["first"]) == pytest.approx(memory["total"])
        assert 0 < it["mfu"] <= it["hfu"] < 1
        assert it["tokens_per_second_per_gpu"] * 8 == pytest.approx(32 * 1024 / step["p50"])
        assert it["fits"] == "yes"


def test_every_candidate_is_a_run_that_the_toolkit_accepts_and_estimates_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its overrides, given back, are the same run."""
    for it in plan(capsys, *NODE, "--top", "6")["candidates"]:
        config = run(*NODE, "parallel=ddp", *it["overrides"])
        degrees = check_support(config, 8)
        assert {axis: it["parallel"][axis] for axis in AXES} == {axis: getattr(degrees, axis) for axis in AXES}
        again = estimate_jobs(jobs_from_config(config, 8), default_constants())
        assert float(again.time.step) == pytest.approx(it["step_seconds"]["p50"], rel=1e-9)
        assert float(again.memory.total) / 2**30 == pytest.approx(it["memory_gib"]["total"], rel=1e-9)


def test_what_is_given_stays(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, *NODE, "parallel.tp=2", "train.micro_batch=4", "parallel.recompute.mode=full")
    assert {it["parallel"]["tp"] for it in told["candidates"]} == {2}
    assert {it["parallel"]["micro_batch"] for it in told["candidates"]} == {4}
    assert {it["parallel"]["recompute"]["mode"] for it in told["candidates"]} == {"full"}
    assert len({it["parallel"]["pp"] for it in told["candidates"]}) > 1


@pytest.mark.parametrize(
    "given",
    [
        ("parallel=fsdp",),
        ("parallel.tp=2", "parallel.pp=2", "parallel.dp_replicate=2", "train.micro_batch=2"),
    ],
    ids=["an option", "all degrees"],
)
def test_a_run_that_is_given_whole_is_only_estimated(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    told = plan(capsys, *NODE, *given)
    assert (told["searched"], len(told["candidates"]), told["best"]["overrides"]) == (1, 1, [])
    again = estimate_jobs(jobs_from_config(run(*NODE, *given), 8), default_constants())
    assert told["best"]["step_seconds"]["p50"] == pytest.approx(float(again.time.step))


def test_a_run_that_is_given_whole_and_does_not_fit_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, *NODE, "model=llama_70b", "parallel=ddp")
    assert told["best"]["fits"] == "no"
    assert told["best"]["memory_gib"]["total"] > 80


def test_without_nodes_it_takes_the_fewest_that_the_model_fits_on(capsys: pytest.CaptureFixture[str]) -> None:
    few = plan(capsys, *RUN, "--top", "1")["best"]
    large = (*RUN, "model=llama_70b", "parallel.cp=1", "--top", "1")
    many = plan(capsys, *large)["best"]
    assert (few["nodes"], few["ranks"]) == (1, 8)
    assert many["nodes"] > 1
    assert f"cluster.nodes={many['nodes']}" in many["overrides"]
    assert many["parallel"]["offload"] == {"optimizer": "none", "parameters": "none"}
    here = ("parallel.offload.optimizer=none", "parallel.offload.parameters=none")
    half = plan(capsys, *large, *here, f"cluster.nodes={many['nodes'] // 2}")["best"]
    assert half is None or half["fits"] != "yes"


def test_numbers_of_nodes_and_batches_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    batches = ("plan.nodes=[1,4]", "plan.global_batches=[32,256]", "plan.tokens=1e10", "plan.price_per_gpu_hour=2")
    both = (*RUN, *FLAT, *batches)
    fast, cheap, loss = (plan(capsys, *both, "--top", "8", "--by", by)["best"] for by in ("time", "cost", "loss"))
    assert (fast["nodes"], cheap["nodes"]) == (4, 1)
    assert fast["outlook"]["demand"]["days"]["p50"] < cheap["outlook"]["demand"]["days"]["p50"]
    assert fast["outlook"]["demand"]["money"]["p50"] > cheap["outlook"]["demand"]["money"]["p50"]
    assert fast["global_batch"] == 256
    assert loss["global_batch"] in (32, 256)


def test_a_budget_and_a_deadline_leave_out_what_breaks_them(capsys: pytest.CaptureFixture[str]) -> None:
    shared = (*RUN, *FLAT, "plan.tokens=1e10", "plan.price_per_gpu_hour=2", "train.global_batch=128", "--top", "1")
    both = (*shared, "plan.nodes=[1,4]")
    ends = {n: plan(capsys, *shared, f"cluster.nodes={n}")["best"]["outlook"]["demand"] for n in (1, 4)}
    money = (ends[1]["money"]["p50"] + ends[4]["money"]["p50"]) / 2
    days = (ends[1]["days"]["p50"] + ends[4]["days"]["p50"]) / 2
    assert plan(capsys, *both)["best"]["nodes"] == 4
    assert plan(capsys, *both, f"plan.budget={money}")["best"]["nodes"] == 1
    assert plan(capsys, *both, "--by", "cost")["best"]["nodes"] == 1
    assert plan(capsys, *both, "--by", "cost", f"plan.deadline_days={days}")["best"]["nodes"] == 4
    inside = plan(capsys, *both[:-1], "--top", "9", f"plan.budget={money}")
    assert {it["nodes"] for it in inside["candidates"]} == {1}
    cheapest = min(ends[1]["money"]["p50"], ends[4]["money"]["p50"])
    none = plan(capsys, *both, f"plan.budget={money}", f"plan.deadline_days={days}")
    assert (none["best"], none["candidates"], none["pareto"]) == (None, [], [])
    assert any(f"the cheapest costs {cheapest:,.4g} (8 ranks)" in note for note in none["notes"]), none["notes"]
    with pytest.raises(UserError, match=r"plan.budget=.* no candidate that fits meets it"):
        choose_parallel(
            run(*RUN, *FLAT, "parallel=auto", "plan.tokens=1e10", "plan.price_per_gpu_hour=2", "plan.budget=1"), 8
        )


def test_without_nodes_a_deadline_takes_more_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    shared = (*RUN, *FLAT, "plan.tokens=1e10", "train.global_batch=128", "--top", "1")
    days = plan(capsys, *shared)["best"]["outlook"]["demand"]["days"]["p50"]
    sooner = plan(capsys, *shared, f"plan.deadline_days={days / 2.5}")["best"]
    assert sooner["nodes"] == 4
    assert sooner["outlook"]["demand"]["days"]["p50"] < days / 2.5


def test_an_accelerator_that_is_not_described_has_memory_but_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, "cluster=local", "model=llama_1b")
    best = told["best"]
    assert (best["fits"], best["step_seconds"], best["mfu"], best["outlook"]) == ("unknown", None, None, None)
    assert best["memory_gib"]["total"] > 10
    assert best["memory_gib"]["device"] is None
    assert best["parallel"]["strategy"] == "ddp"
    assert any("peak_tflops" in note for note in told["notes"])


def test_a_known_memory_says_what_fits_even_where_the_speed_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    more = ("cluster=slurm", "cluster.node.gpus=4", "cluster.gpu.memory_gib=24", "cluster.nodes=1", "model=llama_1b")
    best = plan(capsys, *more, "precision=bf16", "train.micro_batch=1")["best"]
    assert (best["fits"], best["step_seconds"]) == ("yes", None)


def test_nothing_that_fits_is_an_answer_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(capsys, *NODE, "model=gpt3_1t")
    assert (told["best"], told["candidates"]) == (None, [])
    assert told["searched"] > 1000
    assert main(["plan", *NODE, *FLAT, "model=gpt3_1t"]) == 0
    assert "Nothing fits" in capsys.readouterr().out


def test_no_layout_at_all_says_what_degrees_must_do(capsys: pytest.CaptureFixture[str]) -> None:
    for more in ((), ("--json",)):
        assert main(["plan", "cluster=dgx_a100", "model=llama_7b", "cluster.nodes=4", "parallel.tp=3", *more]) == 2
        told = capsys.readouterr()
        assert told.out == ""
        assert told.err.startswith("hpc-train: plan: no layout has 32 ranks with tp 3; degrees must divide the ranks")
        assert told.err.count("\n") == 1


def test_the_table_tells_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = (*RUN, "cluster.nodes=2", "parallel.cp=1", "plan.tokens=1e10", "plan.price_per_gpu_hour=2")
    words = ("optimizer", "p10 - p90", "MFU", "tokens/s", "goodput", "days", "GPU-hours", "cost", "baselines")
    more = ("HFU", "fragmentation", "context", "optimal checkpoint.every", "Pareto front")
    for options, expected in (((), words), (("--all",), (*words, *more))):
        assert main(["plan", *given, *options]) == 0
        told = capsys.readouterr().out
        assert [word for word in expected if word not in told] == []


def test_a_vision_transformer_is_planned_too(capsys: pytest.CaptureFixture[str]) -> None:
    told = plan(
        capsys, "cluster=dgx_a100", "cluster.nodes=1", "model=vit_large", "data=digits", "train.global_batch=256"
    )
    assert {it["parallel"]["cp"] for it in told["candidates"]} == {1}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"plan.{suffix}"
    assert main(["plan", *NODE, "parallel.pp=4", "--plot", str(file), "--json"]) == 0
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert content.count(b"<path") > 60  # bars of memory, of time and of the pipeline


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=custom", "model.name=mine"), "custom"),
        (("--top", "0"), "--top 0"),
        (("plan.nodes=[0]",), "plan.nodes=[0]"),
        (("cluster=karolina", "cluster.nodes=100"), "cluster.nodes=100: karolina has 72"),
        (("plan.budget=10",), "plan.price_per_gpu_hour"),
        (("parallel.pipeline.schedule=mine.csv",), "mine.csv"),
        (("parallel=fsdp", "parallel.tp=3"), "3"),
        (("--plot", "/nowhere/plan.png"), "/nowhere/plan.png"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert main(["plan", *NODE, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hpc-train: ")
    assert error.count("\n") == 1
    assert said in error


def test_more_nodes_than_there_are_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"plan\.nodes"):
        plan_overrides(["cluster=karolina", "plan.nodes=[99999]"], options=PlanOptions())
