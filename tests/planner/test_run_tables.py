"""Tables of measured runs: what is read, what is assumed, and which rows are refused and why."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from hpc_train.errors import UserError
from hpc_train.planner.calibration.run_table import MeasuredRun, RefusedRun, jobs_from_runs, parse_run, read_runs
from hpc_train.planner.calibration.unstated import predict_spread
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.accelerators import find_accelerator
from hpc_train.planner.model.inputs import RECOMPUTE, SCHEDULES, STACKS

SAMPLE = Path(__file__).with_name("published_sample.csv")
"""A few public rows, each with its source."""


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, str]]:
    with SAMPLE.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def run(cells: dict[str, dict[str, str]], id_: str, **changes: str) -> MeasuredRun:
    found = parse_run({**cells[id_], **changes})
    assert isinstance(found, MeasuredRun), found
    return found


def test_every_row_is_a_run_or_is_refused(cells: dict[str, dict[str, str]]) -> None:
    found = read_runs(SAMPLE)
    assert {it.id for it in found.runs} | {it.id for it in found.refused} == set(cells)
    assert {it.id: it.why.split(",")[0] for it in found.refused} == {
        "bridge26.08-GB200-DeepSeekV3-mxfp8-n256-b4096": "not stated: top_k",
        "maxtext-v5p-32B-1xv5p-128": "TPUv5p is not a GPU of known speed",
        "pythia-1B": "not stated: dp",
    }
    assert found.jobs().n == len(found.runs)


def test_a_row_becomes_a_job(cells: dict[str, dict[str, str]]) -> None:
    found = run(cells, "sc21-t1-39.1B")
    jobs = jobs_from_runs([found])
    assert (jobs.layers, jobs.hidden, jobs.tp, jobs.pp, jobs.dp_replicate) == (48, 8192, 8, 2, 32)
    assert jobs.world == 512
    assert (found.family, found.cluster) == ("sc21", "sc21/A100-80GB")
    assert found.seconds == 14.453
    assert jobs.link_bandwidth == 300e9  # stated both ways
    assert jobs.nic_bandwidth == 25e9
    assert jobs.recompute == RECOMPUTE.index("full")
    assert float(jobs.parameters[0]) == pytest.approx(39.1e9, rel=0.01)


@pytest.mark.parametrize(
    ("id_", "schedule", "stack"),
    [
        ("zb-6.2B-ZB-2p-m32", "zb_2p", "megatron"),
        ("zb-6.2B-ZB-1p-m32", "interleaved_zero_bubble", "megatron"),
        ("zb-6.2B-1F1B-I-m32", "interleaved_1f1b", "megatron"),
        ("zb-6.2B-1F1B-m32", "1f1b", "megatron"),
        ("vtrain-m058-39.1B-t4d8p16b3", "1f1b", "deepspeed"),
        ("bloom-pre-L947", "1f1b", "deepspeed"),
        ("sc21-t2-z3-174.6B-384", "1f1b", "deepspeed"),
        ("foundry-a100-7b-s2048-n8-b6", "1f1b", "fsdp"),
        ("titan-t1-8B-8-1", "1f1b", "fsdp"),
    ],
)
def test_schedule_and_software(cells: dict[str, dict[str, str]], id_: str, schedule: str, stack: str) -> None:
    columns = run(cells, id_).columns
    assert columns["schedule"] == SCHEDULES.index(schedule)
    assert columns["stack"] == STACKS.index(stack)


def test_what_columns_say(cells: dict[str, dict[str, str]]) -> None:
    assert run(cells, "bloom-pre-L917").out_of_memory
    assert not run(cells, "bloom-pre-L947").out_of_memory
    assert run(cells, "bloom-pre-L947").first_stage
    assert run(cells, "bloom-pre-L947").columns["gradient_bytes"] == 4
    assert run(cells, "bloom-pre-L607").columns["gradient_bytes"] == 2
    assert run(cells, "titan-t1-8B-8-1").columns["fused_elementwise"] == 1
    assert run(cells, "titan-t1-8B-8-1", reduce_once="1").columns["reduce_once"] == 1
    assert run(cells, "titan-t1-8B-8-1", held_out="1").held_out
    assert run(cells, "zb-6.2B-1F1B-m32").assumed == ("vocab",)
    assert np.isnan(run(cells, "korth-f1-530B-selective").seconds)


def test_more_columns_of_pytorch_and_of_experts(cells: dict[str, dict[str, str]]) -> None:
    titan = run(cells, "titan-t1-8B-8-1", separate_gathers="1").columns
    assert (titan["reduce_bytes"], titan["separate_gathers"]) == (4, 1)
    assert run(cells, "titan-t1-8B-8-1", reduce_bytes="2").columns["reduce_bytes"] == 2
    groups = run(cells, "titan-t1-8B-8-1", expert_groups="8", group_top_k="4", dispatch_bytes="1").columns
    assert (groups["routed_share"], groups["dispatch_bytes"]) == (0.5, 1)


def test_megatron_is_that_of_its_year(cells: dict[str, dict[str, str]]) -> None:
    old, new = (run(cells, "sc21-t1-39.1B", attention="", year=year).columns for year in ("2021", "2024"))
    assert (old["fused_attention"], new["fused_attention"]) == (0, 1)


def test_what_is_not_stated_widens_the_band(cells: dict[str, dict[str, str]]) -> None:
    rows = [run(cells, "sc21-t1-39.1B", **{name: ""} if name else {}) for name in ("", "recompute", "vocab")]
    spread = predict_spread(rows, default_constants())
    assert spread[0] == pytest.approx(default_constants().spread)
    assert spread[1] > spread[2] > spread[0]
    pipeline = run(cells, "sc21-t1-39.1B", vpp="", schedule="")
    assert predict_spread([pipeline], default_constants())[0] > spread[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpus": "500"}, "dp x tp x pp x cp = 512, but there are 500 GPUs"),
        ({"gpu_type": ""}, "no device is not a GPU"),
        ({"tp": "", "pp": ""}, "not stated: tp, pp"),
        ({"pp": "x"}, "pp is 'x', which is not a whole number from 1"),
        ({"layers": "24.5"}, "layers is '24.5', which is not a whole number from 1"),
        ({"iter_time_s": "0"}, "iter_time_s is '0', which is not a number above 0"),
        ({"sp": "yes"}, "sp is 'yes', which is neither 0 nor 1"),
        ({"micro_batch": "64"}, "dp x micro_batch = 2048 is more than global_batch = 1536"),
        ({"vpp": "48"}, "pp x vpp = 96 is more than layers + 2 = 50"),
        ({"precision": "tf32"}, "unknown precision 'tf32'"),
        ({"experts": "8"}, "not stated: top_k, expert_hidden"),
        ({"sharding": "magic"}, "unknown sharding 'magic'"),
        ({"software": "magic"}, "unknown software 'magic'; known: megatron-lm, deepspeed"),
        ({"recompute": "most"}, "unknown recompute 'most'"),
        ({"cuda_graphs": "some"}, "unknown cuda_graphs 'some'"),
        ({"iter_time_s": "", "mem_gib": ""}, "neither time nor memory is stated"),
    ],
)
def test_rows_that_are_refused(cells: dict[str, dict[str, str]], changes: dict[str, str], why: str) -> None:
    found = parse_run({**cells["sc21-t1-39.1B"], **changes})
    assert isinstance(found, RefusedRun)
    assert why in found.why


def test_only_some_columns_are_needed(cells: dict[str, dict[str, str]], tmp_path: Path) -> None:
    names = ["id", "gpu_type", "layers", "hidden", "heads", "seq", "gpus", "dp", "tp", "pp", "micro_batch"]
    names += ["global_batch", "iter_time_s"]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerow(cells["sc21-t1-1.7B"])
    (found,) = read_runs(path).runs
    assert found.columns["feed_forward"] == 4 * 2304
    assert set(found.assumed) >= {"vocab", "recompute", "ffn_hidden"}


def test_the_single_node_table_of_vtrain(tmp_path: Path) -> None:
    path = tmp_path / "single.csv"
    head = "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    head += "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
    path.write_text(f"\ufeff{head}\n8,32,4,1024,16,24,1024,2,2,2,219.732754\n", encoding="utf-8")
    (found,) = read_runs(path).runs
    assert found.seconds == pytest.approx(0.219732754)
    assert (found.columns["tp"], found.columns["dp_replicate"], found.columns["pp"]) == (2, 2, 2)
    assert found.family == "single"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "id,layers\n", "\x00\x01"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        read_runs(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_runs(tmp_path / "none.csv")


def test_devices_by_any_of_their_names() -> None:
    assert (
        find_accelerator("NVIDIA A100-SXM4-40GB")
        is find_accelerator("A100-40GB")
        is not find_accelerator("NVIDIA A100-SXM4-80GB")
    )
    assert (
        find_accelerator("NVIDIA H100 80GB HBM3") is find_accelerator("H100-80GB") is not find_accelerator("H100-96GB")
    )
    assert find_accelerator("NVIDIA GB200") is not find_accelerator("NVIDIA B200")
    assert find_accelerator("TPUv4") is find_accelerator("") is None
