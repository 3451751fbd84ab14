"""`plan calibrate`: benchmarks and short runs become one file, and cluster.calibration=FILE makes plans of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from planner_runs import run

from hpc_train.bench.gemm import GemmResult, MatrixProduct
from hpc_train.cli.main import main
from hpc_train.cluster.calibration import Calibration, LevelConstants, read_calibration, write_calibration
from hpc_train.config.plain_config import config_to_dict
from hpc_train.config.run import RunConfig
from hpc_train.planner import constants as stored
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.plan import plan_overrides
from hpc_train.training.records.run_records import MetricsFile

SMALL = ("cluster=local", "launch.ranks=2", "parallel=ddp", "model=llama_tiny", "train.micro_batch=1")
SHAPES = {
    "a": ("model.hidden=256", "train.sequence_length=128", "train.global_batch=8"),
    "b": ("model.hidden=512", "train.sequence_length=256", "train.global_batch=8"),
    "c": ("model.layers=8", "train.sequence_length=256", "train.global_batch=16"),
    "d": ("model.hidden=512", "model.layers=8", "train.sequence_length=128", "train.global_batch=32"),
}
Command = Callable[..., str]


def machine(folder: Path) -> tuple[Path, Path]:
    """Files of the two benchmarks, of a machine of 0.1 TFLOP/s, 20 GB/s and a network of 1 GB/s."""
    gemm, network = folder / "gemm.json", folder / "network.json"
    products = (MatrixProduct("fp32", 1000, 1000, 1000, 2e-2), MatrixProduct("bf16", 1000, 1000, 1000, 1e-2))
    gemm.write_text(GemmResult("cpu", "2025-01-01", 1, 20.0, products).to_json())
    write_calibration(network, Calibration("local", "gloo", "2025-01-01", (LevelConstants("inside", 1e-4, 1e9),)))
    return gemm, network


def ran(folder: Path, config: RunConfig, steps: list[float]) -> None:
    """A run directory as a training leaves it."""
    folder.mkdir()
    OmegaConf.save(OmegaConf.create(config_to_dict(config)), folder / "config.yaml")
    metrics = MetricsFile(folder / "metrics.jsonl", 0)
    for number, seconds in enumerate(steps, 1):
        metrics.write({"step": number, "step_seconds": seconds})
    metrics.close()


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    """Runs as a machine takes them whose products are slower in training than in the benchmark, and which has a
    disturbance now and then."""
    gemm, network = machine(tmp_path)
    assert (
        main(["plan", "calibrate", "--gemm", str(gemm), "--collectives", str(network), "--out", str(_file(tmp_path))])
        == 0
    )
    constants = stored.apply_calibration(stored.default_constants(), read_calibration(_file(tmp_path)))
    truth = replace(constants, gemm_efficiency=0.8, scale=1.25)
    for name, shape in SHAPES.items():
        config = run(*SMALL, *shape, f"cluster.calibration={_file(tmp_path)}")
        seconds = float(estimate_step_time(jobs_from_config(config, 2), truth).step)
        noise = [3.0, 2.0, 1.01, 0.99, 1.0, 1.4, 1.0]
        ran(tmp_path / name, run(*SMALL, *shape), [seconds * it for it in noise])
    return {name: str(tmp_path / name) for name in SHAPES}


def _file(folder: Path) -> Path:
    return folder / "calibration.json"


def test_three_runs_predict_a_fourth(tmp_path: Path, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    gemm, network = machine(tmp_path)
    learnt = [runs[name] for name in "abc"]
    words = ["--gemm", str(gemm), "--collectives", str(network), "--runs", *learnt, "--against", runs["d"]]
    assert main(["plan", "calibrate", *words, "--out", str(_file(tmp_path)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["blind"]["n"], told["calibrated"]["n"]) == (1, 1)
    assert told["blind"]["mape"] > 0.2
    assert told["calibrated"]["mape"] < 0.05
    assert set(told["runs"]) == set(runs.values())
    measured = told["runs"][runs["d"]]["measured"]
    planned = plan_overrides([*SMALL, *SHAPES["d"], f"cluster.calibration={_file(tmp_path)}"]).best
    assert planned is not None
    assert planned.step is not None
    assert planned.step.p50 == pytest.approx(measured, rel=0.05)
    assert planned.step.p50 == pytest.approx(told["runs"][runs["d"]]["calibrated"]), "the file says all that was learnt"
    assert planned.fits == "unknown", "nobody has said how much memory a rank has"


def test_benchmarks_alone_make_a_machine_known(
    tmp_path: Path, runs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """And their figures are taken as reached: no efficiency is applied to them."""
    config = run(*SMALL, f"cluster.calibration={_file(tmp_path)}")
    jobs, constants = jobs_from_config(config, 2), stored.cluster_constants(config.cluster)
    assert float(jobs.peak_flops * jobs.gemm_ceiling) == pytest.approx(0.1e12)
    assert float(jobs.memory_bandwidth) == 20e9
    assert float(jobs.link_bandwidth) == 1e9
    assert (constants.gemm_efficiency, constants.link_efficiency, constants.link_latency) == (1.0, 1.0, 1e-4)
    assert stored.cluster_constants(run(*SMALL).cluster) == stored.default_constants()


def test_a_gpu_that_is_listed_keeps_its_peak(tmp_path: Path, runs: dict[str, str]) -> None:
    config = run("cluster=dgx_a100", "precision=bf16", "model=llama_7b", f"cluster.calibration={_file(tmp_path)}")
    jobs = jobs_from_config(config, 8)
    assert float(jobs.peak_flops) == 312e12
    assert float(jobs.peak_flops * jobs.gemm_ceiling) == pytest.approx(0.2e12)


def test_mistakes_are_one_line(tmp_path: Path, runs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path / "short", run(*SMALL), [1.0, 1.0])
    ran(tmp_path / "elsewhere", run("cluster=dgx_a100", "model=llama_tiny"), [1.0] * 6)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.yaml").write_text("a: [")
    cases = {
        "no measurements": [],
        "2 steps in metrics.jsonl": ["--runs", str(tmp_path / "short")],
        "give the directory of a run": ["--runs", str(tmp_path / "nowhere")],
        "not the configuration of a run": ["--runs", str(tmp_path / "broken")],
        "give those of one cluster": ["--runs", runs["a"], str(tmp_path / "elsewhere")],
        "not products": ["--gemm", runs["a"] + "/config.yaml"],
        "not a calibration": ["--collectives", str(tmp_path / "gemm.json")],
    }
    capsys.readouterr()
    for what, words in cases.items():
        assert main(["plan", "calibrate", *words, "--out", str(tmp_path / "out.json")]) == 2
        error = capsys.readouterr().err
        assert what in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()
    assert list(tmp_path.glob(".*")) == []
