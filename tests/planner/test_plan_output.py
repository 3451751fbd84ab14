"""`hpc-train plan` prints a command to paste, equals shown as equal, familiar layouts, in 40 lines."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.launch.submit import default_to_slurm
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.output.plan_table import MAX_COLUMNS, MAX_LINES, format_plan
from hpc_train.planner.plan import Plan, PlanOptions, _note_unmeasured, plan_overrides
from hpc_train.planner.ranking import rank_candidates
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE

SHAPE = ("precision=bf16", "train.sequence_length=1024", "train.global_batch=32")
ONE = ("cluster=dgx_a100", "model=llama_1b", *SHAPE, "cluster.nodes=1")
TWO = ("parallel.pipeline.schedule=1f1b", "cluster=dgx_h100", "model=llama_8b", *SHAPE, "cluster.nodes=2")
"""Only one schedule, to make the search smaller."""
README = (
    "model=llama_70b", "cluster=dgx_h100", "precision=bf16", "train.global_batch=512", "train.sequence_length=4096",
)  # fmt: skip


@cache
def asked(*given: str) -> Plan:
    return plan_overrides(given)


def text(plan: Plan, show_all: bool = False) -> list[str]:
    return [it.plain for it in format_plan(plan, show_all)]


def pasted(lines: list[str]) -> list[str]:
    """Return the printed command's words as a shell splits them."""
    start = next(number for number, line in enumerate(lines) if line.startswith("hpc-train "))
    end = next(number for number in range(start, len(lines)) if not lines[number].endswith("\\"))
    script = "hpc-train() { printf '%s\\0' hpc-train \"$@\"; }\n" + "\n".join(lines[start : end + 1])
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    return said.split("\0")[:-1]


def alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether two are the same except for who starts them and for choices left open."""
    both = [
        replace(it, launch=one.launch, parallel=replace(it.parallel, auto=False, fixed=None)) for it in (one, other)
    ]
    return both[0] == both[1]


@pytest.mark.parametrize(
    "given",
    [
        ONE,
        (*TWO, "parallel.tp=2", "train.micro_batch=1"),
        (*TWO[:-1], "parallel=auto", "parallel.recompute.mode=full"),
        (*ONE, "parallel=fsdp"),
        (*TWO[:-1], "plan.nodes=[1,2]", "plan.tokens=1e10", "+launch.extra.comment='a b; $(date)'", "launch=slurm"),
        (*TWO, "parallel.pp=2", "parallel.cp=2", "launch=slurm", '+launch.extra.comment="it\'s"'),
    ],
    ids=["searched", "fixed", "auto", "whole", "quoted", "apostrophe"],
)
def test_the_command_can_be_pasted(given: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = asked(*given)
    assert found.best is not None
    program, command, *overrides = pasted(text(found))
    assert (program, command) == ("hpc-train", "submit")
    assert "..." not in overrides
    keys = [word.partition("=")[0] for word in overrides]
    assert len(keys) == len(set(keys)), "nothing is said twice"
    assert alike(compose(default_to_slurm(overrides)), found.best.config)
    assert main(["submit", "--dry-run", *overrides, f"run_dir={tmp_path}"]) == 0
    assert f"--nodes={found.best.nodes}" in capsys.readouterr().out


def test_this_machine_is_trained_on_and_a_folder_of_groups_stays(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mine.yaml").write_text("name: mine\nnode: {gpus: 4}\ngpu: {memory_gib: 24}\n")
    here = plan_overrides(("model=llama_tiny", "launch.ranks=2"))
    assert pasted(text(here))[:2] == ["hpc-train", "train"]
    there = plan_overrides(("cluster=mine", "cluster.nodes=1", "model=llama_tiny"), str(tmp_path))
    assert pasted(text(there))[:4] == ["hpc-train", "submit", "--config-dir", str(tmp_path)]


def test_json_has_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *ONE, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert shlex.split(told["command"]) == pasted(text(asked(*ONE)))
    assert told["best"] == told["candidates"][0]


def _with(it: Candidate, step: float, points: float, **changes: Any) -> Candidate:
    assert it.step is not None
    assert it.projection is not None
    band = replace(it.step, p10=step * 0.9, p50=step, p90=step * 1.1)
    market = replace(it.projection.demand, days=None)
    return replace(it, step=band, complexity=points, projection=replace(it.projection, demand=market), **changes)


def test_of_equals_the_simplest_is_first_and_of_others_the_quickest() -> None:
    one = plan_overrides(ONE, options=PlanOptions(top=1, baselines=False)).candidates[0]
    equal, slower = 1 + EQUAL_TIME_TOLERANCE * 0.9, 1 + EQUAL_TIME_TOLERANCE * 1.1
    quick, simple, late = _with(one, 1.0, 6.0), _with(one, equal, 2.0), _with(one, slower, 0.0)
    assert rank_candidates([late, quick, simple], "time") == [simple, quick, late]
    doubtful = _with(one, 1.0, 0.0, fits="maybe")
    assert rank_candidates([doubtful, quick], "time") == [quick, doubtful], "what fits for sure is no equal of what may"
    more = _with(one, 1.001, 0.0, ranks=16)
    assert rank_candidates([more, quick], "time")[0] is quick, "another number of ranks is another job"


def test_what_no_run_has_measured_must_be_faster_by_the_error() -> None:
    one = plan_overrides(ONE, options=PlanOptions(top=1, baselines=False)).candidates[0]
    known = _with(one, 1.0, 2.0)
    claims = {"unmeasured": ("zbv",), "handicap": 1.12}
    little, much = _with(one, 0.95, 1.0, **claims), _with(one, 0.85, 1.0, **claims)
    assert rank_candidates([little, known], "time") == [known, little]
    assert rank_candidates([much, known], "time") == [much, known]
    assert "zbv is 5.0% faster by estimate" in _note_unmeasured([known, little], "time")[0]
    assert _note_unmeasured([much, known], "time") == _note_unmeasured([known], "time") == []


def test_plain_data_parallelism_is_taken_where_others_are_as_quick() -> None:
    """8B at 8k tokens on 64 H100: context parallelism of 2, 4 and 8 is within one per cent of FSDP."""
    job = ("cluster=dgx_h100", "model=llama_8b", "precision=bf16", "train.global_batch=512")
    found = plan_overrides((*job, "train.sequence_length=8192", "cluster.nodes=8"))
    assert found.best is not None
    parallel = found.best.config.parallel
    assert (parallel.pp, parallel.cp, parallel.tp) == (1, 1, 1)
    assert found.ties > 1
    equals = [it for it in found.candidates if found.equals_best(it)]
    assert found.best.complexity == min(it.complexity for it in equals)
    assert equals == found.candidates[: len(equals)]
    assert sum(line.startswith("= ") for line in text(found, show_all=True)) > len(equals)


@pytest.mark.parametrize("objective", ["time", "cost"])
def test_the_best_does_not_depend_on_how_many_are_told(objective: str) -> None:
    flat = (*TWO, "parallel.cp=1", "parallel.pp=1")
    bests = [
        plan_overrides(flat, options=PlanOptions(top=top, by=objective, baselines=False)).candidates[0].settings
        for top in (1, 40)
    ]
    assert bests[0] == bests[1]


@pytest.mark.parametrize(
    "given",
    [
        README,
        TWO,
        *(pytest.param((*TWO, it), marks=pytest.mark.long) for it in ("parallel.tp=4", "train.global_batch=24")),
    ],
    ids=str,
)
def test_familiar_layouts_always_have_a_row(given: tuple[str, ...]) -> None:
    found = asked(*given)
    names = [it.name for it in found.baselines]
    assert names == ["plain dp", "FSDP", "HSDP", "TP in the node x PP"]
    assert all(it.why for it in found.baselines)
    best = found.best
    assert best is not None
    assert best.step is not None
    shown = "\n".join(text(found))
    for it in found.baselines:
        assert f"{it.name}" in shown
        way = it.candidate
        if way is None or way.step is None:
            continue
        assert (way.ranks, way.global_batch) == (best.ranks, best.global_batch)
        if way.fits == "yes":
            assert way.step.p50 >= best.step.p50 * (1 - EQUAL_TIME_TOLERANCE), "or it would be the best"
            assert it.why == "recommended" or "slower" in it.why or "equal" in it.why
        else:
            assert "fit" in it.why


def test_where_nothing_fits_the_familiar_layouts_say_what_they_need() -> None:
    found = asked(*ONE, "model=llama_70b", "parallel.offload.parameters=none", "parallel.offload.optimizer=none")
    assert found.best is None
    assert all("does not fit" in it.why for it in found.baselines)
    assert len(found.baselines) == 3
    assert all(any(line.endswith(it.why) for line in text(found)) for it in found.baselines)


def test_one_node_has_its_familiar_layouts_too() -> None:
    assert [it.name for it in asked(*ONE).baselines] == ["plain dp", "FSDP", "TP in the node"]


JOBS = [
    README,
    ONE,
    TWO,
    (*TWO, "parallel=fsdp"),
    (*TWO[:-1], "plan.nodes=[2,4]", "plan.tokens=2e12", "plan.price_per_gpu_hour=2", "plan.spot_price_per_gpu_hour=1",
     "plan.spot_interruptions_per_1000_node_days=20"),
    (*ONE, "model=gpt3_1t"),
    (*TWO, *(f"launch.{name}" for name in ("account=m1234", "time_minutes=360", "max_attempts=3", "signal_seconds=99")),
     "run_dir=/scratch/project_4711/somebody/experiments/llama/2026/a-long-name/" + "x" * 40),
    ("model=llama_tiny", "launch.ranks=2"),
    ("cluster=dgx_a100", "cluster.nodes=1", "model=vit_large", "data=digits", "train.global_batch=256"),
]  # fmt: skip


@pytest.mark.parametrize("given", JOBS, ids=range(len(JOBS)))
def test_it_is_forty_lines_of_a_hundred_columns(given: tuple[str, ...]) -> None:
    lines = text(asked(*given))
    assert len(lines) <= MAX_LINES
    assert max(len(line) for line in lines if "/scratch/" not in line) <= MAX_COLUMNS


def test_all_of_it_says_more_and_begins_with_the_same() -> None:
    found = asked(*README)
    short, long = text(found), text(found, show_all=True)
    assert len(long) > MAX_LINES
    assert short[:4] == long[:4]
    assert max(len(line) for line in long) <= MAX_COLUMNS
    for name in found.best.memory if found.best else ():
        assert any(line.startswith(name) for line in long), name


def test_the_front_begins_with_what_is_recommended() -> None:
    found = asked(*README)
    best, *others = found.front
    assert best is found.best
    assert others
    assert [it.total for it in found.front] == sorted((it.total for it in found.front), reverse=True)
    assert best.step is not None
    for it in others:
        assert it.step is not None
        assert it.step.p50 > best.step.p50 or found.equals_best(it) or it.unmeasured, "nothing on it is quicker, unsaid"


def test_days_are_told_only_where_somebody_said_how_long_the_run_is() -> None:
    for more, said in (((), False), (("train.steps=5000",), True), (("plan.tokens=1e10",), True)):
        found = asked(*ONE, "parallel=fsdp", *more)
        assert found.best is not None
        assert found.best.projection is not None
        assert (found.best.projection.demand.days is not None) is said
        assert any("days" in line for line in text(found)) is said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan.nodes=[]",), "plan.nodes=[]: nothing to compare"),
        (("plan.global_batches=[]",), "plan.global_batches=[]: nothing to compare"),
        (("plan.nodes=[-1]",), "plan.nodes=[-1]: must be >= 1"),
        (("plan.nodes=[8,0]",), "plan.nodes=[0]: must be >= 1"),
        (("plan.nodes=[1000000000]",), "plan.nodes=1000000000: more nodes than any machine has"),
        (("plan.nodes=[100000000000000000000000]",), "plan.nodes"),
        (("plan.nodes=8",), "plan.nodes=8"),
        (("plan.nodes=[a]",), "plan.nodes=[a]"),
        (("cluster.nodes=1000000000",), "cluster.nodes=1000000000: more nodes than any machine has"),
        (("plan.global_batches=[1000000000000000000]",), "plan.global_batches=1000000000000000000: sequences"),
        (("train.global_batch=1000000000000",), "train.global_batch=1000000000000: must be <= 1073741824"),
        (("plan.deadline_days=3",), "plan.deadline_days=3: how long the run is must be known"),
        (("plan.budget=3", "plan.price_per_gpu_hour=1"), "plan.budget=3: how long the run is must be known"),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_impossible_numbers_are_one_line(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *TWO[:-1], *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"hpc-train: {said}")
    assert error.count("\n") == 1


def test_dropout_needs_memory_and_time() -> None:
    given = (
        "model=llama_1b",
        "cluster=dgx_h100",
        "cluster.nodes=1",
        "train.global_batch=8",
        "parallel=zero3",
        "train.sequence_length=4096",
    )
    without, dropped = (plan_overrides((*given, f"model.dropout={p}")).candidates[0] for p in (0, 0.1))
    assert dropped.stages[0] > without.stages[0]
    assert dropped.step.p50 > without.step.p50
