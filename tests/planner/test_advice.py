"""Advice: each lint speaks where it should, what it says to write silences it, and good runs get no warning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_runs import run

from hpc_train.errors import UserError
from hpc_train.models.shape import check_shape
from hpc_train.parallel.rules.check import check_support
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.advice.facts import (
    Advice,
    RunEstimate,
    advice_to_json,
    collect_facts,
    estimate_for_advice,
    format_advice,
)
from hpc_train.planner.advice.layout import compute_stage_imbalance
from hpc_train.planner.advice.lints import LINTS, run_lints
from hpc_train.planner.advice.model_shape import choose_vocab_padding
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.memory import NO, estimate_memory
from hpc_train.planner.reliability.failure_rate import Percentiles
from hpc_train.planner.reliability.projection import ProjectedJob
from hpc_train.traffic.stages import BlockCosts, split_blocks

GPU = ["model=llama_1b", "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "train.sequence_length=2048"]
PIPELINE = [*GPU, "parallel=pp", "parallel.pp=4", "parallel.dp_replicate=2", "train.global_batch=128"]
PIPELINE += ["train.micro_batch=1", "model.layers=16", "model.vocab_size=32768"]
LARGE = ["model=llama_70b", "cluster=dgx_h100", "cluster.nodes=128", "precision=bf16", "parallel=zero3"]
LARGE += ["train.global_batch=1024", "train.micro_batch=1", "train.sequence_length=8192", "plan.tokens=15e12"]
JOB = ProjectedJob(1024, 128, Percentiles(9.0, 10.0, 11.0), 1024 * 8192, 70.6e9)
BIG = RunEstimate(job=JOB)
GIB = float(1 << 30)


@dataclass(frozen=True)
class Case:
    """A configuration that one lint speaks about."""

    about: str
    overrides: list[str]
    says: str
    """In the reason."""
    fixed: list[str]
    """Overrides that the fix tells of, with which it is silent."""
    severity: str = "warning"
    figures: RunEstimate = field(default_factory=RunEstimate)
    names_value: bool = True
    """The fix names the very values of `fixed`."""

    def ask(self, lint: str, *more: str) -> Advice | None:
        by_name = {it.__name__: it for it in LINTS}
        return by_name[lint.split(",")[0]](collect_facts(run(*self.overrides, *more), self.figures))


CASES = {
    "check_head_width": Case(
        "model.heads",
        [*GPU, "model.hidden=2112", "model.heads=16", "model.kv_heads=16"],
        "head_dim 132",
        ["model.heads=12"],
    ),
    "check_head_width, given": Case(
        "model.head_dim", [*GPU, "model.head_dim=100"], "head_dim 100", ["model.head_dim=104"]
    ),
    "check_hidden_width": Case(
        "model.hidden",
        [*GPU, "model.hidden=2000", "model.heads=10", "model.kv_heads=10"],
        "27 %",
        ["model.hidden=1920"],
    ),
    "check_feed_forward_width": Case(
        "model.feed_forward",
        [*GPU, "parallel=tp", "parallel.tp=8", "model.feed_forward=8200"],
        ": 1025 per rank is not a multiple of 128",
        ["model.feed_forward=8192"],
        "hint",
    ),
    "check_vocabulary": Case(
        "model.vocab_size", [*GPU, "model.vocab_size=50257"], "is not a multiple of 128", ["model.vocab_size=50304"]
    ),
    "check_adapter_base": Case(
        "adapter.base", [*GPU, "precision=bf16", "adapter=lora"], "rounded to bf16", ["adapter.base=bf16"], "hint"
    ),
    "check_precision": Case("precision", [*GPU, "precision=fp32"], "bf16 at 15 times that", ["precision=bf16"]),
    "check_tensor_divides": Case(
        "parallel.tp",
        [*GPU, "parallel=tp", "parallel.tp=8", "model.hidden=1536", "model.heads=12", "model.kv_heads=12"],
        "does not divide heads 12",
        ["parallel.tp=4"],
        "error",
    ),
    "check_kv_head_sharing": Case(
        "parallel.tp",
        [*GPU, "parallel=tp", "parallel.tp=8", "model.kv_heads=4"],
        "does not divide kv_heads 4",
        ["parallel.tp=4"],
        "hint",
    ),
    "check_tensor_domain": Case(
        "parallel.tp",
        [*GPU, "cluster.nodes=2", "parallel=tp", "parallel.tp=16", "model.kv_heads=16", "parallel.dp_replicate=-1"],
        "more than the 8 GPUs of a node",
        ["parallel.tp=8"],
    ),
    "check_uneven_stages": Case("parallel.pp", [*PIPELINE, "model.layers=18"], "18 layers over 4", ["model.layers=19"]),
    "check_uneven_stages, head": Case(
        "parallel.pp",
        [*PIPELINE, "model.vocab_size=512000"],
        "the head weighs",
        ["parallel.pp=1", "parallel.dp_replicate=8"],
    ),
    "check_interleaving_rounds": Case(
        "train.global_batch",
        [*PIPELINE, "parallel.pipeline.schedule=interleaved_1f1b", "train.global_batch=124", "model.layers=16"],
        "62 micro-batches over pp=4",
        ["train.global_batch=128"],
        "error",
    ),
    "check_bubble": Case(
        "parallel.pipeline",
        [*PIPELINE, "train.global_batch=32"],
        "16 micro-batches: the pipeline idles 16%",
        ["train.global_batch=54"],
    ),
    "check_bubble, told": Case(
        "parallel.pipeline",
        PIPELINE,
        "idles 20%",
        ["parallel.pp=1", "parallel.dp_replicate=8"],
        figures=RunEstimate(bubble=0.2),
    ),
    "check_launch_bound": Case(
        "train.micro_batch",
        [
            *GPU,
            "model.hidden=1024",
            "model.heads=8",
            "model.kv_heads=8",
            "train.micro_batch=1",
            "train.global_batch=64",
        ],
        "the GPU waits for the host",
        ["train.micro_batch=8", "parallel.compile=false"],
    ),
    "check_needless_recompute": Case(
        "parallel.recompute.mode",
        [*GPU, "parallel.recompute.mode=full"],
        "a rank needs 40.0 of 80 GiB",
        ["parallel.recompute.mode=none"],
        figures=RunEstimate(memory_without_recompute=40 * GIB),
    ),
    "check_needless_offload": Case(
        "parallel.offload",
        [*GPU, "parallel=zero3", "parallel.offload.optimizer=cpu"],
        "a rank needs 60.0 of 80 GiB",
        ["parallel.offload.optimizer=none"],
        figures=RunEstimate(memory_without_offload=60 * GIB),
    ),
    "check_critical_batch": Case(
        "train.global_batch",
        [*GPU, "plan.tokens=20e9", "train.global_batch=2048"],
        "times the critical batch",
        ["train.global_batch=431"],
    ),
    "check_critical_batch, measured": Case(
        "train.global_batch",
        [*GPU, "plan.critical_batch_tokens=1e5", "train.global_batch=2048"],
        "1e+05, measured",
        ["train.global_batch=97"],
    ),
    "check_scaling_warmup": Case(
        "optim.schedule.warmup_steps",
        [*GPU, "optim.lr_scaling=sqrt", "optim.base_batch=8", "optim.schedule.warmup_steps=0"],
        "for 2 times the batch, with 0 steps",
        ["optim.schedule.warmup_steps=100"],
    ),
    "check_scaling_rule": Case(
        "optim.lr_scaling",
        [*GPU, "optim.lr_scaling=linear", "optim.base_batch=8"],
        "linear scaling is for SGD",
        ["optim.lr_scaling=sqrt"],
    ),
    "check_warmup": Case(
        "optim.schedule.warmup_steps",
        [*GPU, "optim.schedule.warmup_steps=0"],
        "without warm-up",
        ["optim.schedule.warmup_steps=100"],
        "hint",
    ),
    "check_learning_rate": Case(
        "optim.lr", [*LARGE, "optim.lr=0.01"], "the Step Law's", ["optim.lr=3e-4"], "hint", BIG, names_value=False
    ),
    "check_never_saves": Case(
        "checkpoint.every", [*LARGE, "checkpoint.every=0"], "nothing is saved", ["checkpoint.every=59"], figures=BIG
    ),
    "check_save_interval": Case(
        "checkpoint.every",
        [*LARGE, "checkpoint.every=2000", "plan.checkpoint_seconds=60"],
        "more time than the optimum",
        ["checkpoint.every=59"],
        figures=BIG,
    ),
    "check_save_interval, too often": Case(
        "checkpoint.every",
        [*LARGE, "checkpoint.every=1", "plan.checkpoint_seconds=60"],
        "a save every 1 steps",
        ["checkpoint.every=59"],
        figures=BIG,
    ),
    "check_blocking_saves": Case(
        "checkpoint.background",
        [*LARGE, "checkpoint.background=false", "plan.checkpoint_seconds=60"],
        "training waits 60 s",
        ["checkpoint.background=true"],
        figures=BIG,
    ),
    "check_spares": Case(
        "plan.spare_nodes", LARGE, "128 nodes and no spare node", ["plan.spare_nodes=4"], "hint", BIG, False
    ),
    "check_spares, repairs": Case(
        "plan.spare_nodes",
        [*LARGE, "plan.repair_hours=48"],
        "waits 51.9% of the time",
        ["plan.spare_nodes=5"],
        figures=BIG,
    ),
    "check_deadline": Case(
        "plan.deadline_days",
        [*LARGE, "plan.deadline_days=100"],
        "; 100 are allowed",
        ["plan.deadline_days=1000"],
        "error",
        BIG,
        names_value=False,
    ),
    "check_budget": Case(
        "plan.budget",
        [*LARGE, "plan.price_per_gpu_hour=2", "plan.budget=1e6"],
        "the budget is 1e+06",
        ["plan.budget=1e9"],
        "error",
        BIG,
        names_value=False,
    ),
    "check_spot_price": Case(
        "plan.spot_price_per_gpu_hour",
        [
            *LARGE,
            "plan.price_per_gpu_hour=2",
            "plan.spot_price_per_gpu_hour=1.9",
            "plan.spot_interruptions_per_1000_node_days=100",
        ],
        "times as much",
        ["plan.spot_price_per_gpu_hour=0.5"],
        figures=BIG,
        names_value=False,
    ),
}


def test_every_lint_has_a_case() -> None:
    assert {name.split(",")[0] for name in CASES} == {lint.__name__ for lint in LINTS}


@pytest.mark.parametrize("name", CASES)
def test_it_speaks_and_what_it_says_to_write_silences_it(name: str) -> None:
    case = CASES[name]
    told = case.ask(name)
    assert told is not None
    assert (told.about, told.severity) == (case.about, case.severity)
    assert case.says in told.why
    assert "\n" not in told.why + told.fix
    assert case.fixed[0].split("=")[1] in told.fix or not case.names_value
    assert case.ask(name, *case.fixed) is None


QUIET = {
    "llama_3_405b": [
        *["model=llama_405b", "cluster=meta_roce_24k", "cluster.nodes=2048", "precision=bf16", "parallel=3d"],
        *["parallel.tp=8", "parallel.pp=16", "parallel.dp_shard=-1", "train.global_batch=2048", "train.micro_batch=1"],
        *["train.sequence_length=8192", "plan.tokens=15.6e12", "optim.lr=8e-5"],
    ],
    "gpt3_175b": [
        *["model=gpt3_175b", "cluster=dgx_a100", "cluster.nodes=128", "precision=bf16", "parallel=3d", "parallel.tp=8"],
        *["parallel.pp=8", "parallel.dp_shard=-1", "train.global_batch=1536", "train.micro_batch=1"],
        *["train.sequence_length=2048", "plan.tokens=300e9", "optim.lr=6e-5"],
    ],
    "llama_7b": [
        *["model=llama_7b", "cluster=dgx_h100", "cluster.nodes=4", "precision=bf16", "parallel=zero3"],
        *["train.global_batch=1024", "train.micro_batch=2", "train.sequence_length=2048", "plan.tokens=1e12"],
    ],
}


@pytest.mark.parametrize("name", QUIET)
def test_runs_that_others_have_done_get_no_error_and_no_warning_but_of_their_bubble(name: str) -> None:
    loud = [it for it in run_lints(run(*QUIET[name])) if it.severity != "hint" and it.about != "parallel.pipeline"]
    assert loud == []


def test_the_default_run_gets_no_advice() -> None:
    assert run_lints(run()) == []


@pytest.mark.parametrize(
    "model", ["llama_1b", "llama_7b", "llama_8b", "llama_13b", "llama_70b", "llama_405b", "gpt3_175b"]
)
def test_models_that_are_in_use_have_no_wrong_shape(model: str) -> None:
    config = run(f"model={model}", *GPU[1:], "train.sequence_length=1024", "train.micro_batch=4")
    assert [it for it in run_lints(config) if it.about.startswith("model.")] == []


def test_without_a_described_gpu_nothing_is_said_of_tensor_cores() -> None:
    odd = ["model=llama_1b", "model.vocab_size=50257", "model.head_dim=100", "precision=bf16"]
    assert [it for it in run_lints(run(*odd)) if it.about.startswith("model.")] == []


def test_errors_come_first_and_print_in_two_lines() -> None:
    case = CASES["check_tensor_divides"]
    told = run_lints(run(*case.overrides, "model.vocab_size=50257"))
    assert [it.severity for it in told] == sorted((it.severity for it in told), key=["error", "warning", "hint"].index)
    assert len(format_advice(told)) == 2 * len(told)
    assert advice_to_json(told)[0]["about"] == "parallel.tp"


def test_degrees_that_do_not_fit_the_world_are_refused() -> None:
    with pytest.raises(UserError, match="but the world has 12 ranks"):
        run_lints(run(*GPU, "parallel.dp_replicate=8"), world=12)


def test_a_deadline_that_is_met_only_with_more_nodes_tells_how_many() -> None:
    case = CASES["check_deadline"]
    slower = replace(case, figures=RunEstimate(job=replace(JOB, step_seconds=Percentiles(19.0, 20.0, 21.0))))
    more = [
        int(told.fix.split()[2])
        for told in (case.ask("check_deadline"), slower.ask("check_deadline"))
        if told is not None
    ]
    assert more[1] == pytest.approx(2 * more[0], rel=0.05)


@given(st.integers(64, 300_000), st.sampled_from([1, 2, 4, 8, 16]))
def test_padding_adds_little_or_next_to_nothing_of_the_smallest_unit(vocab: int, tp: int) -> None:
    told = choose_vocab_padding(vocab, tp)
    assert told.padded >= vocab
    assert told.padded % (told.multiple * tp) == 0
    assert told.waste <= 0.01 or (told.multiple == 8 and told.padded - vocab < 8 * tp)
    assert told.waste == pytest.approx((told.padded - vocab) / vocab)


@given(st.integers(1, 6), st.integers(0, 20), st.floats(0, 3), st.floats(0, 6))
def test_layers_are_weighed_as_they_will_be_split(stages: int, more: int, before: float, after: float) -> None:
    layers = stages + more
    told = BlockCosts(before, (1.0,) * layers, after)
    times = [float(len(part)) for part in split_blocks(told, stages)]
    times[0] += before
    times[-1] += after
    expected = max(times) * stages / sum(times) - 1
    assert compute_stage_imbalance(layers, stages, (before, after)) == pytest.approx(expected, abs=1e-6)


def _jobs() -> Iterator[tuple[str, ...]]:
    """Yield every case's run that is fully known, and runs in which one suggestion would break another rule."""
    for case in CASES.values():
        yield tuple(case.overrides)
    split = [*PIPELINE, "parallel.pipeline.schedule=zbv", "model.vocab_size=50257"]
    yield (*split, "model.hidden=1024", "model.heads=8", "model.kv_heads=8")
    yield (*GPU, "parallel=tp", "parallel.tp=8", "parallel.dp_replicate=1", "model.kv_heads=4")
    yield (*GPU, "cluster.nodes=2", "parallel=tp", "parallel.tp=16", "model.kv_heads=16", "parallel.dp_replicate=1")
    yield (*PIPELINE, "parallel.pipeline.schedule=interleaved_zero_bubble", "train.global_batch=32")
    full = ("model=llama_8b", "train.micro_batch=2", "parallel=zero3", "train.global_batch=512", "model.hidden=1024")
    yield (*GPU, *full, "train.sequence_length=32768", "model.max_positions=32768", "train.micro_batch=1")


JOBS = tuple(dict.fromkeys(_jobs()))


@pytest.mark.parametrize("overrides", JOBS, ids=range(len(JOBS)))
def test_every_setting_that_is_suggested_can_be_run(overrides: tuple[str, ...]) -> None:
    """Each suggestion composes, passes accept it on these ranks, and it fits in memory if the run itself does."""
    config = run(*overrides)
    world = count_nodes(config) * count_ranks_per_node(config)
    try:
        found = run_lints(config, estimate_for_advice(config, world, default_constants()))
    except UserError:
        pytest.fail("the cases are runs that can be planned")
    before = float(estimate_memory(jobs_from_config(config, world), default_constants()).fits)
    for told in found:
        settings = {word.partition("=")[0] for alternative in told.overrides for word in alternative}
        assert set(re.findall(r"([a-z_]+(?:\.[a-z_]+)+)=", told.fix)) == settings, told
        for alternative in told.overrides:
            changed = run(*overrides, *alternative)
            check_shape(changed.model)
            check_support(changed, world)
            after = float(estimate_memory(jobs_from_config(changed, world), default_constants()).fits)
            assert after > NO or before == NO, (told, alternative)


def test_what_another_rule_refuses_is_not_suggested() -> None:
    small = ("model.hidden=1024", "model.heads=8", "model.kv_heads=8")
    plain, split = (*PIPELINE, *small), (*PIPELINE, *small, "parallel.pipeline.schedule=zbv")
    fixes = [[it.fix for it in run_lints(run(*words)) if it.about == "train.micro_batch"] for words in (plain, split)]
    assert "parallel.compile=true" in fixes[0][0]
    assert "parallel.compile" not in fixes[1][0], "it does not go with a backward that is split"


def test_a_degree_that_is_changed_gives_its_ranks_to_data_parallelism() -> None:
    words = (*GPU, "parallel=tp", "parallel.tp=8", "parallel.dp_replicate=1", "model.kv_heads=4")
    (told,) = [it for it in run_lints(run(*words)) if it.about == "parallel.tp"]
    assert told.overrides == (("parallel.tp=4", "parallel.dp_replicate=2"),)
    assert "parallel.tp=4 parallel.dp_replicate=2" in told.fix
