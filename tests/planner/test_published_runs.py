"""The accuracy that is reached on the tables of published runs, where they lie beside the checkout; with a margin."""

from __future__ import annotations

from pathlib import Path

import pytest
from published_columns import fill_columns

from hpc_train.planner.calibration.fit import HeldOutFit, assign_fold, fit_leaving_out
from hpc_train.planner.calibration.fit_report import measure_errors_by_kind, predict_calibrated
from hpc_train.planner.calibration.run_table import RunTable, read_runs
from hpc_train.planner.calibration.validate import (
    ErrorStatistics,
    PredictedRun,
    measure_band,
    predict_runs,
    summarize_errors,
    validate_predictions,
)
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.inputs import FSDP

FOLDER = Path(__file__).parents[2].parent / "shared/data"
HERE = FOLDER.is_dir()
SAMPLE = Path(__file__).with_name("published_sample.csv")
"""In a checkout by itself the same is asked of the sample, which has a few rows of each family."""
ALL = pytest.param(
    True, id="all", marks=(pytest.mark.long, pytest.mark.skipif(not HERE, reason="the tables are not here"))
)
TABLES = [pytest.param(False, id="sample"), ALL]
LONG_TABLES = [pytest.param(False, id="sample", marks=pytest.mark.long), ALL]


@pytest.fixture(scope="module")
def sample() -> RunTable:
    return read_runs(SAMPLE)


@pytest.fixture(scope="module")
def published(sample: RunTable, tmp_path_factory: pytest.TempPathFactory) -> RunTable:
    if not HERE:
        return sample
    filled = tmp_path_factory.mktemp("tables") / "published.csv"
    fill_columns(FOLDER / "published_runs.csv", filled)
    return read_runs(filled)


@pytest.fixture(scope="module")
def clusters(whole: bool, sample: RunTable, published: RunTable) -> tuple[HeldOutFit, ...]:
    """The constants without each cluster in turn, which take half a minute to fit to all published runs."""
    return fit_leaving_out((published if whole else sample).runs, lambda run: run.cluster)


def of(parts: tuple[HeldOutFit, ...], calibrated: bool = False) -> dict[str, ErrorStatistics]:
    """By family and kind, predicted by constants that were fitted without them."""
    if calibrated:
        return measure_errors_by_kind(predict_calibrated(parts))
    return measure_errors_by_kind([row for part in parts for row in predict_runs(part.runs, part.constants)])


@pytest.mark.parametrize("whole", TABLES)
def test_step_time_by_cross_validation_over_groups(sample: RunTable, published: RunTable, whole: bool) -> None:
    runs = (published if whole else sample).runs
    found = of(fit_leaving_out(runs, lambda run: assign_fold(run.group, 5)))
    most = {"A100 GPT": 0.085, "FSDP": 0.1, "H100": 0.12, "GB200": 0.12} if whole else {"A100 GPT": 0.11, "FSDP": 0.3}
    for kind, limit in most.items():
        assert found[kind].mape < limit, (kind, found[kind])


@pytest.mark.parametrize("whole", LONG_TABLES, scope="module")
def test_step_time_with_each_cluster_left_out(clusters: tuple[HeldOutFit, ...], whole: bool) -> None:
    found = of(clusters)
    assert found["A100 GPT"].mape < (0.12 if whole else 0.18)
    assert found["FSDP"].mape < (0.12 if whole else 0.5)


@pytest.mark.parametrize("whole", LONG_TABLES, scope="module")
def test_step_time_after_calibration_with_three_runs(clusters: tuple[HeldOutFit, ...], whole: bool) -> None:
    """In the sample most clusters have no fourth run; what is left is vtrain's and zb's."""
    assert of(clusters, calibrated=True)["A100 GPT"].mape < (0.075 if whole else 0.15)


def test_memory_and_regret(published: RunTable) -> None:
    found = validate_predictions(published, default_constants())
    assert found.memory.mape < (0.046 if HERE else 0.07)
    assert found.memory.oom_missed == 0
    assert found.memory.false_oom == 0
    assert found.memory.maybe < 0.1
    assert found.regret.mean < (0.014 if HERE else 0.025)
    assert found.overall.mape < (0.07 if HERE else 0.1)


def test_every_row_is_accounted_for(published: RunTable) -> None:
    assert len(published.runs) + len(published.refused) == (630 if HERE else 24)
    assert all(it.why for it in published.refused)


def test_held_out_runs_of_pytorch() -> None:
    """Tensor parallelism and FSDP of sources that nothing was fitted to."""
    rows = held_out_rows("published_pytorch.csv")
    tensor = summarize_errors(row.ratio for row in rows if row.run.columns["tp"] > 1)
    assert (tensor.n, len(rows)) == (30, 42)
    assert tensor.mape < 0.095
    assert summarize_errors(row.ratio for row in rows).mape < 0.085
    assert 0.75 < measure_band(rows).inside < 0.85


def held_out_rows(name: str) -> list[PredictedRun]:
    """Return the rows of a table that nothing was fitted to."""
    table = read_runs(Path(__file__).with_name(name))
    return [row for row in predict_runs(table.runs, default_constants()) if row.run.held_out]


def test_held_out_runs_of_experts() -> None:
    rows = [*held_out_rows("published_experts.csv"), *held_out_rows("published_dgxc.csv")]
    megatron, pytorch = (
        summarize_errors(row.ratio for row in rows if row.run.columns["experts"] and is_fsdp(row) == flag)
        for flag in (False, True)
    )
    assert (megatron.n, pytorch.n) == (19, 5)
    assert megatron.mape < 0.105
    assert pytorch.mape < 0.1


def test_runs_with_adapters() -> None:
    """Nothing was fitted to runs with adapters, nor to these of fine-tuning and context parallelism."""
    rows = held_out_rows("published_adapters.csv")
    assert len(rows) == 17
    families = {name: [row for row in rows if row.run.family == name] for name in ("automodellora", "bridgelora")}
    assert [len(some) for some in families.values()] == [6, 5]
    assert summarize_errors(row.ratio for row in families["automodellora"]).mape < 0.1
    assert summarize_errors(row.ratio for row in families["bridgelora"]).mape < 0.035
    assert summarize_errors(row.ratio for row in rows).mape < 0.08
    assert 0.75 < measure_band(rows).inside < 0.9


def test_runs_with_windows() -> None:
    """GPT-OSS: PyTorch's are inside the band; docs/planner.md says that Megatron's are not, and by how much."""
    rows = held_out_rows("published_gptoss.csv")
    pytorch = [row for row in rows if is_fsdp(row)]
    assert (len(pytorch), len(rows)) == (2, 33)
    assert all(row.inside for row in pytorch)
    megatron = summarize_errors(row.ratio for row in rows if not is_fsdp(row))
    assert 0.25 < megatron.mape < 0.3
    assert megatron.bias < -0.25
    biased = [row for row in rows if row.run.columns["expert_biases"]]
    assert len(biased) == 25
    assert summarize_errors(row.ratio for row in biased).mape < 0.25


def is_fsdp(row: PredictedRun) -> bool:
    return row.run.columns["stack"] == FSDP


def test_held_out_runs_of_models_on_dgx_cloud() -> None:
    """Nemotron-4 and mixtures of experts, of which nothing was fitted to."""
    rows = held_out_rows("published_dgxc.csv")
    assert len(rows) == 50
    assert summarize_errors(row.ratio for row in rows).mape < 0.08
    nemotron = [row.ratio for row in rows if "Nemotron" in row.run.model]
    assert len(nemotron) == 42
    assert summarize_errors(nemotron).mape < 0.076
    assert measure_band(rows).inside > 0.75


def test_held_out_runs_in_8_bits() -> None:
    rows = held_out_rows("published_float8.csv")
    nvidia = [row for row in rows if not row.run.cluster.endswith("MI300X")]
    nvidia = [row for row in nvidia if not row.run.cluster.endswith("B200")]
    assert (len(rows), len(nvidia)) == (25, 16)
    assert summarize_errors(row.ratio for row in nvidia).mape < 0.105
    amd = [row for row in rows if row.run.cluster.endswith("MI300X")]
    assert len(amd) == 4
    assert summarize_errors(row.ratio for row in amd).mape < 0.21


def test_gains_of_8_bits_on_b200() -> None:
    """torchao's table is of B200s with limited power, by how much it does not say: estimates are a third too fast.

    What 8 bits gain is estimated well for scales of blocks (20 and 16 % measured).
    """
    rows = {row.run.id.removeprefix("torchaob200-8B-"): row for row in held_out_rows("published_float8.csv")}
    wide = rows["bf16"]
    errors = {
        name: wide.seconds / rows[name].seconds / (wide.run.seconds / rows[name].run.seconds) - 1
        for name in ("mxfp8-rceil", "mxfp8-floor", "tensorwise", "rowwise")
    }
    assert abs(errors["mxfp8-rceil"]) < 0.03
    assert abs(errors["mxfp8-floor"]) < 0.05
    assert 0.05 < errors["tensorwise"] < 0.1
    assert 0.08 < errors["rowwise"] < 0.13, "slow on Blackwell in August 2025: 4 % measured"
    assert -0.4 < wide.ratio - 1 < -0.3
