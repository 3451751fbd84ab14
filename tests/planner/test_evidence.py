"""A search prefers techniques that measured runs had, unless others are faster by the error of estimates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_runs import run

from hpc_train.cluster.calibration import Calibration, read_calibration, write_calibration
from hpc_train.planner.calibration.fit import count_run_evidence
from hpc_train.planner.calibration.run_table import read_runs
from hpc_train.planner.constants import Constants, apply_calibration, default_constants, read_constants, write_constants
from hpc_train.planner.evidence import NEEDED_RUNS, find_techniques, handicap, list_unmeasured, unmeasured_techniques
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import job_columns
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.search import SearchBase, search_space
from hpc_train.planner.search.space import FixedColumns, SearchSpace
from hpc_train.planner.settings import make_single_rank_config

SAMPLE = Path(__file__).with_name("published_sample.csv")
ULYSSES = ("cluster=dgx_h100", "model=llama_1b", "parallel.cp=2", "parallel.context.method=ulysses", "cluster.nodes=1")


def test_runs_of_a_table_are_counted() -> None:
    counts = count_run_evidence(read_runs(SAMPLE).runs)
    assert counts["interleaved_zero_bubble"] == 1
    assert counts["1f1b"] > NEEDED_RUNS
    assert counts["ulysses"] == 0
    assert {"interleaved_zero_bubble", "ulysses", "zbv"} <= list_unmeasured(counts)
    assert list_unmeasured({}) == frozenset(), "constants without evidence say nothing of techniques"


def test_the_shipped_constants_say_what_was_measured() -> None:
    unmeasured = list_unmeasured(default_constants().evidence)
    assert {"ulysses", "zbv", "offload optimizer"} <= unmeasured
    assert not {"tp", "zero1", "zero3", "1f1b", "interleaved_1f1b", "ring attention", "ep"} & unmeasured


def test_a_run_is_compared_as_if_it_took_its_p90() -> None:
    columns = job_columns(jobs_from_config(run(*ULYSSES), 8))
    unmeasured = frozenset({"ulysses", "zbv"})
    assert unmeasured_techniques(columns, unmeasured) == ("ulysses",)
    assert float(handicap(columns, unmeasured, np.full((), 0.1))) == pytest.approx(np.exp(0.12816), rel=1e-3)
    assert float(handicap(columns, unmeasured - {"ulysses"}, np.full((), 0.1))) == 1
    assert set(find_techniques(columns)) == set(default_constants().evidence)


def test_runs_of_a_calibration_count(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, Calibration("here", "nccl", "2026-01-01", (), evidence={"ulysses": 2, "zbv": 1}))
    found = apply_calibration(replace(Constants(), evidence={"ulysses": 0, "zbv": 0}), read_calibration(path))
    assert list_unmeasured(found.evidence) == {"zbv"}
    write_constants(tmp_path / "constants.json", found)
    assert read_constants(tmp_path / "constants.json").evidence == found.evidence


def test_a_search_prefers_what_was_measured() -> None:
    """Only cp, over a ring or with Ulysses: what is unmeasured comes after what is as fast within the error."""
    config = run(
        *ULYSSES[:2], "precision=bf16", "train.sequence_length=8192", "train.global_batch=4", "train.micro_batch=1"
    )
    base = SearchBase(jobs_from_config(make_single_rank_config(config, 4), 1))
    fixed = FixedColumns({"cp": (2.0,), "tp": (1.0,), "pp": (1.0,), "zero": (3.0,), "recompute": (0.0,)})
    space = SearchSpace(find_degree_limits(config), 8, fixed)

    def first(**counts: int) -> float:
        evidence = {**default_constants().evidence, **counts}
        found = search_space(base, space, replace(default_constants(), evidence=evidence), keep=1)
        return float(found.best.columns["ulysses"][0])

    assert first(**{"ulysses": 0, "ring attention": 9}) == 0
    assert first(**{"ulysses": 9, "ring attention": 0}) == 1
