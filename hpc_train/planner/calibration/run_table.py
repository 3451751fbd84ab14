"""Read a table of measured runs (RUNS.csv) as jobs; docs/run_tables.md documents the columns.

A test compares the page with this file.

Each line is checked for impossible numbers, and becomes a MeasuredRun, or a RefusedRun with the reason. Facts come from
columns only, never from notes: what a row does not state is assumed, and its estimate gets a wider band (unstated.py).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.planner.calibration.row_columns import (
    ADAPTER_TARGETS,
    ONCE_A_NODE,
    ZERO_STAGES,
    make_columns,
    name_schedule,
)
from hpc_train.planner.calibration.run_row import CsvRow, explain_impossible
from hpc_train.planner.calibration.software import (
    ATTENTION_KINDS,
    SOFTWARE,
    SoftwareTraits,
    find_row_software,
    knows_software,
)
from hpc_train.planner.model.accelerators import Accelerator, find_accelerator
from hpc_train.planner.model.inputs import CUDA_GRAPHS, FLOAT8_RECIPES, RECOMPUTE, SCHEDULES
from hpc_train.planner.model.jobs import Jobs, as_column
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular
from hpc_train.units import GIB

_REQUIRED = ("id", "layers", "hidden", "gpu_type", "dp", "tp", "pp", "global_batch", "iter_time_s")
_WIDE = re.compile(r"fp32|tf32|fp64|int", re.IGNORECASE)
"""Precisions without a peak in the table of accelerators."""


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run and its job."""

    id: str
    family: str
    """Series of runs: the beginning of the id, without a version."""
    model: str
    cluster: str
    """Family and device; runs with equal ones share a machine."""
    software: str
    """Name of the software; runs of one cluster and one software are calibrated together."""
    group: str
    """Family, model and device: runs that a split of the data keeps together."""
    contest: str
    """Group, GPUs, batch and precision: runs that do the same work, of which one was the fastest."""
    seconds: float
    """Step time; NaN: not stated."""
    memory: float
    """Peak memory in bytes; NaN: not stated."""
    first_stage: bool
    """Whether memory is the first stage's; otherwise it is that of the rank that needs most."""
    memory_of: str
    """How memory was measured: device (nvidia-smi), reserved or allocated (torch's allocator)."""
    out_of_memory: bool
    columns: dict[str, float]
    assumed: tuple[str, ...]
    """Columns that are not stated, for which usual values were assumed. With `recompute` among them, times are those
    without recomputation and memory that with full recomputation, the least possible."""
    held_out: bool | None = None
    """Whether the table says that the run is only predicted, never fitted to; None: it does not say."""


@dataclass(frozen=True)
class RefusedRun:
    """A row of the table that the model does not cover, and why."""

    id: str
    why: str


@dataclass(frozen=True)
class RunTable:
    """The runs of one table."""

    runs: tuple[MeasuredRun, ...]
    refused: tuple[RefusedRun, ...]

    def jobs(self) -> Jobs:
        """Return the jobs of all runs, one row per run."""
        return jobs_from_runs(self.runs)


def jobs_from_runs(runs: Sequence[MeasuredRun]) -> Jobs:
    """Turn runs into jobs, one row per run, in order."""
    names = runs[0].columns
    return Jobs(**{name: as_column([run.columns[name] for run in runs]) for name in names})


def measured_seconds(runs: Sequence[MeasuredRun]) -> NDArray[np.float64]:
    """Return the measured step times in seconds, [runs]."""
    return np.array([run.seconds for run in runs])


def read_runs(path: Path) -> RunTable:
    """Read a table of measured runs. Raises UserError for a file that is not one."""
    try:
        with io.StringIO(read_regular(path, MAX_TEXT_BYTES, follow=True).decode("utf-8-sig"), newline="") as file:
            rows = rename_vtrain_columns(list(csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}; give a table of measured runs") from None
    missing = [name for name in _REQUIRED if not rows or name not in rows[0]]
    if missing:
        raise UserError(
            f"{path}: no column {', '.join(missing)}; docs/run_tables.md lists the columns of a table of measured runs"
        )
    parsed = [parse_run(row) for row in rows]
    return RunTable(
        tuple(run for run in parsed if isinstance(run, MeasuredRun)),
        tuple(run for run in parsed if isinstance(run, RefusedRun)),
    )


_VTRAIN = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
"""Columns of the single-node table of vTrain (Bang et al. 2024, arXiv:2312.12391; github.com/VIA-Research/vTrain):
Megatron-DeepSpeed on A100, every layer recomputed, as in its configurations."""


def rename_vtrain_columns(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rename the columns of vTrain's table to those of RUNS.csv; other tables are returned unchanged."""
    if not rows or "iteration time (ms)" not in rows[0]:
        return rows
    same = {"source": "VIA-Research/vTrain, Megatron-DeepSpeed", "year": "2024", "gpu_type": "A100-80GB"}
    same |= {"gpus_per_node": "8", "sharding": "ddp", "recompute": "full", "precision": "fp16"}
    same |= {"software": "megatron-deepspeed"}
    renamed = []
    for number, row in enumerate(rows, 1):
        shape = {name: row[column] for column, name in _VTRAIN.items()}
        seconds = str(float(row["iteration time (ms)"]) / 1e3)
        named = {"id": f"single-{number}", "model": f"GPT-{shape['hidden']}x{shape['layers']}"}
        renamed.append({**same, **named, **shape, "iter_time_s": seconds})
    return renamed


def parse_run(cells: Mapping[str, str | None]) -> MeasuredRun | RefusedRun:
    """Parse one line of the table."""
    row = CsvRow(cells)
    accelerator = find_accelerator(row.get_text("gpu_type"))
    why = _explain_refusal(row, accelerator)
    if why or accelerator is None:
        return RefusedRun(row.get_text("id"), why or "unknown device")
    software = find_row_software(row)
    columns = make_columns(row, accelerator, software)
    family = re.sub(r"\d+(\.\d+)+$", "", row.get_text("id").split("-")[0]) or "other"
    model, kind = (
        row.get_text("model") or f"{row.get_text('layers')}x{row.get_text('hidden')}",
        row.get_text("gpu_type"),
    )
    batch = f"{row.get_text('gpus')} GPUs, {row.get_text('global_batch')} x {row.get_text('seq')}"
    return MeasuredRun(
        id=row.get_text("id"),
        family=family,
        model=model,
        cluster=f"{family}/{kind}",
        software=software.name,
        group=f"{family}/{model}/{kind}",
        contest=f"{family}/{model}/{kind}/{batch}/{row.get_text('precision')}",
        seconds=row.get_number("iter_time_s"),
        memory=row.get_number("mem_gib") * GIB,
        first_stage=row.get_word("memory_stage") == "first",
        memory_of=_get_memory_convention(row, software),
        out_of_memory=_ran_out_of_memory(row),
        columns=columns,
        assumed=_list_assumed(row, software),
        held_out=row.get_flag("held_out") if "held_out" in cells else None,
    )


def _ran_out_of_memory(row: CsvRow) -> bool:
    return row.get_flag("out_of_memory") and not row.is_stated("iter_time_s")


def _get_memory_convention(row: CsvRow, software: SoftwareTraits) -> str:
    """Return how memory was measured; where that is not stated, as users of the software do."""
    usual = {"deepspeed": "device", "fsdp": "reserved"}
    return row.get_word("memory_of") or usual.get(software.stack, "allocated")


_STATED = ("layers", "hidden", "heads", "seq", "gpus", "dp", "tp", "pp", "global_batch", "micro_batch")


def _explain_refusal(row: CsvRow, accelerator: Accelerator | None) -> str | None:
    """Return why a row cannot be modelled; None if it can."""
    if accelerator is None:
        return f"{row.get_text('gpu_type') or 'no device'} is not a GPU of known speed"
    has_experts = row.get_number("experts", 0) > 1 or row.get_number("ep", 1) > 1
    needed = (*_STATED, *(("experts", "top_k", "expert_hidden") if has_experts else ()))
    unknown = [name for name in needed if not row.is_stated(name)]
    if unknown:
        return f"not stated: {', '.join(unknown)}"
    if why := explain_impossible(row) or _find_unknown_word(row):
        return why
    if has_experts and row.get_number("adapter_rank", 0):
        return "adapters of mixtures of experts are not modelled"
    degrees = [row.get_number(name, 1) for name in ("dp", "tp", "pp", "cp")]
    if math.prod(degrees) != row.get_number("gpus"):
        return f"dp x tp x pp x cp = {math.prod(degrees):g}, but there are {row.get_number('gpus'):g} GPUs"
    if not (row.is_stated("iter_time_s") or row.is_stated("mem_gib") or _ran_out_of_memory(row)):
        return "neither time nor memory is stated"
    return None


def _find_unknown_word(row: CsvRow) -> str | None:
    valid = {
        "sharding": row.get_word("sharding") in ZERO_STAGES,
        "recompute": row.get_word("recompute") in ("", *RECOMPUTE),
        "precision": not _WIDE.match(row.get_text("precision")),
        "attention": row.get_word("attention") in ("", *ATTENTION_KINDS),
        "memory_of": row.get_word("memory_of") in ("", "device", "reserved", "allocated"),
        "memory_stage": row.get_word("memory_stage") in ("", "first"),
        "schedule": name_schedule(row) in SCHEDULES,
        "dispatcher": row.get_word("dispatcher") in ("", "alltoall", "allgather", *ONCE_A_NODE),
        "fp8_recipe": row.get_word("fp8_recipe") in ("", *FLOAT8_RECIPES),
        "cuda_graphs": row.get_word("cuda_graphs") in ("", *CUDA_GRAPHS),
        "adapter_targets": set(row.get_word("adapter_targets").split()) <= ADAPTER_TARGETS,
    }
    if not knows_software(row.get_word("software")):
        return f"unknown software {row.get_text('software')!r}; known: megatron-lm, {', '.join(SOFTWARE)}"
    return next((f"unknown {name} {row.get_text(name)!r}" for name, is_valid in valid.items() if not is_valid), None)


def _list_assumed(row: CsvRow, software: SoftwareTraits) -> tuple[str, ...]:
    """List the columns that a row does not state and that matter for it."""
    names = ["software", "vocab", "recompute", "ffn_hidden"]
    names += ["vpp"] if row.get_number("pp") > 1 and not row.is_stated("schedule") else []
    names += ["inter_link_gbps_per_gpu"] if row.get_number("gpus") > row.get_number("gpus_per_node", 8) else []
    names += ["compile"] if software.stack == "fsdp" else []
    return tuple(name for name in names if not row.get_text(name))
