"""Rows nobody has checked: each becomes a job with sensible numbers, or is refused with a reason."""

from __future__ import annotations

import csv
import json
import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest

from hpc_train.cli.main import main
from hpc_train.planner.calibration.run_table import MeasuredRun, RefusedRun, jobs_from_runs, parse_run
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.step_time import estimate_jobs

SAMPLE = Path(__file__).with_name("published_sample.csv")
GPUS = (
    "A100-80GB",
    "A100-40GB",
    "H100-80GB",
    "H200-141GB",
    "B200",
    "GB200",
    "GB300",
    "MI250X",
    "V100-16GB",
    "L40S",
    "",
)
CHANGES = {
    "gpu_type": GPUS,
    "seq": ("512", "1024", "8192", "131072", "1048576"),
    "precision": ("fp8", "bf16", "fp16", "fp32", "nvfp4", "mxfp8", "FP8", "tf32", "int8", ""),
    "sharding": ("ddp", "zero1", "zero2", "fsdp", "ZeRO3", "hsdp", "none", ""),
    "recompute": ("none", "selective", "full", "Full", "block", ""),
    "layers": ("1", "2", "96", "1000"),
    "hidden": ("64", "100", "12288", "65536"),
    "heads": ("1", "7", "64", "1024"),
    "dp": ("1", "2", "16", "4096"),
    "tp": ("1", "2", "8", "64"),
    "pp": ("1", "4", "96"),
    "cp": ("1", "2", "8"),
    "vpp": ("1", "4", ""),
    "micro_batch": ("1", "3", "64"),
    "global_batch": ("1", "7", "4096"),
    "gpus_per_node": ("1", "3", "16", "72", ""),
    "intra_link_gbs": ("0", "64", "1800", ""),
    "inter_link_gbps_per_gpu": ("0", "25", "800", ""),
    "vocab": ("", "256", "1000000"),
    "year": ("", "abc", "2031"),
    "notes": ("OOM", "schedule=ZB-V", ""),
    "schedule": ("ZB-V", "zb-2p", "unheard", ""),
    "software": ("torchtitan", "megatron-lm", "unheard", ""),
    "held_out": ("1", "0", ""),
    "window": ("128", "100000", ""),
    "window_layers": ("0", "7", "1000", ""),
    "adapter_rank": ("8", "0", ""),
    "adapter_targets": ("qkv", "q v", "head", ""),
}
ODD = ("", "0", "-1", "nan", "inf", "1e300", "0.5", "abc", " 8 ", "-0")


def mutated(count: int) -> list[dict[str, str]]:
    """Rows of the sample with one to five cells changed, half of them with the GPUs that the degrees then need."""
    chance = random.Random(7)
    with SAMPLE.open(newline="") as file:
        rows = [{name: cell or "" for name, cell in row.items()} for row in csv.DictReader(file)]
    found = []
    for number in range(count):
        row = dict(chance.choice(rows), id=f"odd-{number}")
        for _ in range(chance.choice((1, 1, 2, 5))):
            name = chance.choice(tuple(CHANGES) if chance.random() < 0.7 else tuple(row))
            row[name] = chance.choice(CHANGES[name] if name in CHANGES and chance.random() < 0.8 else ODD)
        if chance.random() < 0.5 and all(row[name].isdecimal() for name in ("dp", "tp", "pp", "cp")):
            row["gpus"] = str(math.prod(int(row[name]) for name in ("dp", "tp", "pp", "cp")))
        found.append(row)
    return found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return mutated(3000)


def test_odd_rows_are_modelled_sensibly_or_refused(rows: list[dict[str, str]]) -> None:
    found = [parse_run(row) for row in rows]
    runs = [it for it in found if isinstance(it, MeasuredRun)]
    assert 800 < len(runs) < 2200
    assert all(it.why and "\n" not in it.why for it in found if isinstance(it, RefusedRun))
    with warnings.catch_warnings(), np.errstate(all="raise", under="ignore"):
        warnings.simplefilter("error")
        told = estimate_jobs(jobs_from_runs(runs), default_constants())
    for name, column in (("step", told.time.step), ("memory", told.memory.total), ("mfu", told.mfu)):
        wrong = ~(np.isfinite(column) & (column > 0))
        assert not wrong.any(), (name, [runs[at].id for at in np.flatnonzero(wrong)][:5])
    assert told.mfu.max() < 0.85
    assert all(math.isnan(it.seconds) or it.seconds > 0 for it in runs)


def test_a_table_of_odd_rows_is_validated(
    rows: list[dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows[:120])
    assert main(["plan", "validate", str(path), "--json", "--rows", "--calibrate", "3"]) == 0
    text = capsys.readouterr().out
    answer = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the answer"))
    assert len(answer["rows"]) + len(answer["refused"]) == 120
    assert answer["overall"]["n"] > 10


def test_a_table_of_which_nothing_can_be_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.csv"
    path.write_text("id,layers,hidden,gpu_type,dp,tp,pp,global_batch,iter_time_s\nx,1,1,abacus,1,1,1,1,1\n")
    assert main(["plan", "validate", str(path), "--calibrate", "3"]) == 0
    assert "abacus is not a GPU" in capsys.readouterr().out
    assert main(["plan", "validate", str(path), "--plot", str(tmp_path / "none.png")]) == 2
    told = capsys.readouterr()
    assert "abacus is not a GPU" in told.out
    assert "nothing to draw" in told.err
