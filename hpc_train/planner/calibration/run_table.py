"""Read a table of measured runs (RUNS.csv) as jobs; docs/run_tables.md documents the columns.

A test compares the page with this file.

Each line (CsvRow) is checked for impossible numbers, and becomes a MeasuredRun, or a RefusedRun with the reason. How
the run's software (Megatron, DeepSpeed, FSDP or hpc_train) works is not in the table; find_software supplies it.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_train.errors import UserError
from hpc_train.planner.model.accelerators import Accelerator, attention_peak, find_accelerator
from hpc_train.planner.model.jobs import FLOAT8_RECIPES, PCIE, RECOMPUTE, SCHEDULES, STACKS, Jobs, as_column
from hpc_train.regular_files import MAX_TEXT_BYTES, read_regular
from hpc_train.units import GIB

_COUNTS = (
    *("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "seq", "vocab", "gpus", "gpus_per_node"),
    *("dp", "dp_replicate", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "global_batch"),
    *("top_k", "expert_hidden", "key_rank", "rotary_width", "value_dim"),
)
"""Columns with whole numbers of at least 1."""
_POSITIVE = ("iter_time_s", "mem_gib")
_RATES = (
    *("intra_link_gbs", "inter_link_gbps_per_gpu", "experts"),
    *("shared_hidden", "dense_layers", "query_rank", "expert_imbalance"),
)
"""Columns with amounts that may be 0, which means none."""
_FLAGS = ("gated_mlp", "sp", "compile", "async_tp", "reshard", "out_of_memory")
_MAX_VALUE = 1e12
"""Larger numbers are refused."""


class CsvRow:
    """One line of the table: cells by column name. A number is NaN if its cell is empty or not a number."""

    def __init__(self, cells: Mapping[str, str | None]) -> None:
        self._cells = cells

    def text(self, name: str) -> str:
        return (self._cells.get(name) or "").strip()

    def number(self, name: str, default: float = math.nan) -> float:
        """Return a cell as a number. default: value of an empty cell."""
        text = self.text(name)
        try:
            return float(text) if text else default
        except ValueError:
            return math.nan

    def stated(self, name: str) -> bool:
        return bool(self.text(name))

    def flag(self, name: str, otherwise: bool) -> bool:
        """Return a flag of a column of its own. otherwise: the answer of a table without such a statement."""
        return self.number(name) == 1 if self.stated(name) else otherwise

    @property
    def year(self) -> int:
        """Return the year of the run; 9999 if none is stated."""
        year = self.number("year")
        return int(year) if math.isfinite(year) else 9999


def explain_impossible(row: CsvRow) -> str | None:
    """Return why the numbers of a row are impossible; None if they are possible. Empty cells are allowed."""
    for names, fault in (
        (_COUNTS, _is_not_a_count),
        (_POSITIVE, _is_not_an_amount),
        (_RATES, _is_not_a_bandwidth),
        (_FLAGS, _is_not_a_flag),
    ):
        for name in names:
            if row.stated(name) and (why := fault(row.number(name))):
                return f"{name} is {row.text(name)!r}, {why}"
    return _contradiction(row)


def _is_not_a_count(value: float) -> str | None:
    return None if 1 <= value <= _MAX_VALUE and value == int(value) else "which is not a whole number from 1"


def _is_not_an_amount(value: float) -> str | None:
    return None if 0 < value <= _MAX_VALUE else "which is not a number above 0"


def _is_not_a_bandwidth(value: float) -> str | None:
    return None if 0 <= value <= _MAX_VALUE else "which is not a number from 0"


def _is_not_a_flag(value: float) -> str | None:
    return None if value in (0, 1) else "which is neither 0 nor 1"


def _contradiction(row: CsvRow) -> str | None:
    """Find two numbers that contradict each other. Empty cells are NaN, which compares as false."""
    heads, stages = row.number("heads"), row.number("pp") * row.number("vpp", 1)
    sequences_at_once = row.number("dp") * row.number("micro_batch")
    pairs = (
        (row.number("kv_heads"), heads, "kv_heads", "heads"),
        (row.number("tp"), heads, "tp", "heads"),
        (row.number("cp"), row.number("seq"), "cp", "seq"),
        # Some stacks count the embedding and the head as a layer each.
        (stages, row.number("layers") + 2, "pp x vpp", "layers + 2"),
        (row.number("dp_replicate"), row.number("dp"), "dp_replicate", "dp"),
        (row.number("top_k"), row.number("experts"), "top_k", "experts"),
        (row.number("ep"), row.number("dp") * row.number("tp") * row.number("cp", 1), "ep", "dp x cp x tp"),
        (sequences_at_once, row.number("global_batch"), "dp x micro_batch", "global_batch"),
    )
    over = next(((a, b, one, other) for a, b, one, other in pairs if a > b), None)
    return over and f"{over[2]} = {over[0]:g} is more than {over[3]} = {over[1]:g}"


@dataclass(frozen=True)
class SoftwareTraits:
    """How a training stack works, from its documentation; nothing here is fitted."""

    name: str
    """Runs of one software are calibrated together under this name."""
    stack: str
    """One of jobs.STACKS."""
    fused_attention: bool = False
    fused_elementwise: bool = False
    overlap_data: bool = False
    overlap_tensor: bool = False
    new_attention: bool = False
    """Has attention kernels written for the device (cuDNN, FlashAttention-3)."""
    triton_attention: bool = False
    """Has FlashAttention in its first Triton version."""
    parallel_block: bool = False
    gradient_bytes: int = 2
    """Bytes of a gradient element that is accumulated over micro-batches."""
    logit_bytes: int = 10
    """Bytes per logit at the memory peak of the loss: 16-bit, fp32 and fp32 gradient; a fused loss works in place."""


_OLD_MEGATRON = SoftwareTraits("megatron", "megatron")
_MEGATRON = SoftwareTraits("megatron", "megatron", True, True, True, True, True, gradient_bytes=4)
_FSDP = SoftwareTraits("fsdp", "fsdp", True, False, True, False, False, gradient_bytes=4)
_DEEPSPEED = SoftwareTraits("deepspeed", "deepspeed")

_SOFTWARE = (
    (r"megatron-deepspeed|deepspeed|bigscience", _DEEPSPEED),
    (r"llm-foundry", replace(_FSDP, logit_bytes=4)),
    (r"torchtitan|fms-fsdp|fsdp", _FSDP),
    (r"megatron-bridge|nemo|megatron-core|mcore", _MEGATRON),
    # FlashAttention-2, norms and activations fused, everything overlapped (section 3 of its paper).
    (r"megascale: |megascale-\d+b", replace(_MEGATRON, name="megascale", parallel_block=True, fused_elementwise=True)),
    (r"arxiv:2402\.15627", replace(_OLD_MEGATRON, fused_attention=True, gradient_bytes=4)),
    (r"megatron|arxiv:2104\.04473|arxiv:2205\.05198|arxiv:2401\.10241", _OLD_MEGATRON),
)


_QUOTATION = re.compile(r"\balso in [^|)]*")
"""Matches mentions of other publications that quote the run, which do not tell what software ran it."""


def row_software(row: CsvRow) -> SoftwareTraits:
    """Return the software of a row: what its own columns state, and for tables without them, what source and notes say.

    What a column states is not looked for in notes.
    """
    named = row.text("software").lower()
    notes = "" if named else f"{row.text('id')} | {row.text('notes')}"
    found = find_software(named or row.text("source"), notes, row.year)
    found = replace(
        found,
        fused_elementwise=row.flag("compile", found.fused_elementwise),
        overlap_tensor=row.flag("async_tp", found.overlap_tensor),
    )
    if row.stated("version"):
        found = replace(found, name=f"{found.name} {row.text('version')}")
    kinds = {"eager": (False, False, False), "triton": (True, False, True), "flash": (True, False, False)}
    kinds |= {"flash3": (True, True, False), "cudnn": (True, True, False)}
    if kind := kinds.get(row.text("attention").lower()):
        fused, new, triton = kind
        found = replace(found, fused_attention=fused, new_attention=new, triton_attention=triton)
    return found


def find_software(source: str, notes: str, year: int) -> SoftwareTraits:
    """Find the software in a run's source and notes; if they name none, assume the usual one of that year."""
    text = _QUOTATION.sub("", f"{source} | {notes}".lower())
    found = next((settings for pattern, settings in _SOFTWARE if re.search(pattern, text)), None)
    found = found or (_MEGATRON if year >= 2023 else _OLD_MEGATRON)
    if re.search(r"compile", text):
        found = replace(found, fused_elementwise=True)
    if re.search(r"async-?tp", text) and not re.search(r"vanilla-?tp", text):
        found = replace(found, overlap_tensor=True)
    if re.search(r"triton", text):
        found = replace(found, triton_attention=True)
    if re.search(r"flash", text):
        found = replace(found, fused_attention=True)
    return found


_REQUIRED = ("id", "layers", "hidden", "gpu_type", "dp", "tp", "pp", "global_batch", "iter_time_s")
_WIDE = re.compile(r"fp32|tf32|fp64|int", re.IGNORECASE)
"""Precisions without a peak in the table of accelerators."""
_ZERO = {"": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 3}
_ONCE_A_NODE = ("deepep", "hybridep")
"""Dispatchers of tokens that send one copy of a token to a node, and copy it there."""
_NIC_GBIT = {"V100": 100, "A100": 200, "H100": 400, "H800": 400, "H200": 400, "GB300": 800, "B300": 800}
"""Assumed network bandwidth per GPU, Gbit/s: that of the vendor's own servers; 400 for other GPUs."""
_NO_NVLINK = 64
"""Link bandwidth of GPUs without NVLink, GB/s, both directions together: PCIe 4.0 x16."""
_DEFAULT_VOCAB = 51200
"""Assumed vocabulary: GPT-2's 50,257 padded as in Megatron's scripts."""


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
    found = [parse_run(row) for row in rows]
    return RunTable(
        tuple(run for run in found if isinstance(run, MeasuredRun)),
        tuple(run for run in found if isinstance(run, RefusedRun)),
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
    found = []
    for number, row in enumerate(rows, 1):
        shape = {name: row[column] for column, name in _VTRAIN.items()}
        seconds = str(float(row["iteration time (ms)"]) / 1e3)
        named = {"id": f"single-{number}", "model": f"GPT-{shape['hidden']}x{shape['layers']}"}
        found.append({**same, **named, **shape, "iter_time_s": seconds})
    return found


def parse_run(cells: Mapping[str, str | None]) -> MeasuredRun | RefusedRun:
    """Parse one line of the table."""
    row = CsvRow(cells)
    accelerator = find_accelerator(row.text("gpu_type"))
    why = _explain_refusal(row, accelerator)
    if why or accelerator is None:
        return RefusedRun(row.text("id"), why or "unknown device")
    software = row_software(row)
    columns = {
        **_shape_columns(row, software),
        **_layout_columns(row, software),
        **_format_columns(row, software),
        **_machine_columns(row, accelerator, software),
    }
    family = re.sub(r"\d+(\.\d+)+$", "", row.text("id").split("-")[0]) or "other"
    model, kind = row.text("model") or f"{row.text('layers')}x{row.text('hidden')}", row.text("gpu_type")
    batch = f"{row.text('gpus')} GPUs, {row.text('global_batch')} x {row.text('seq')}"
    return MeasuredRun(
        id=row.text("id"),
        family=family,
        model=model,
        cluster=f"{family}/{kind}",
        software=software.name,
        group=f"{family}/{model}/{kind}",
        contest=f"{family}/{model}/{kind}/{batch}/{row.text('precision')}",
        seconds=row.number("iter_time_s"),
        memory=row.number("mem_gib") * GIB,
        first_stage="embedding-stage" in row.text("notes") or "bigscience" in row.text("source"),
        memory_of=_memory_convention(row, software),
        out_of_memory=_ran_out_of_memory(row),
        columns=columns,
        assumed=_list_assumed(row),
    )


def _ran_out_of_memory(row: CsvRow) -> bool:
    in_notes = bool(re.search(r"\bOOM\b", row.text("notes")))
    return row.flag("out_of_memory", in_notes) and not row.stated("iter_time_s")


def _memory_convention(row: CsvRow, software: SoftwareTraits) -> str:
    """Return how memory was measured: reserved (torchtitan), device (nvidia-smi: DeepSpeed's users) or allocated."""
    if row.stated("memory_of"):
        return row.text("memory_of").lower()
    if "nvidia-smi" in row.text("notes") or software.stack == "deepspeed":
        return "device"
    return "reserved" if software.stack == "fsdp" else "allocated"


_STATED = ("layers", "hidden", "heads", "seq", "gpus", "dp", "tp", "pp", "global_batch", "micro_batch")


def _explain_refusal(row: CsvRow, accelerator: Accelerator | None) -> str | None:
    """Return why a row cannot be modelled; None if it can."""
    if accelerator is None:
        return f"{row.text('gpu_type') or 'no device'} is not a GPU of known speed"
    has_experts = row.number("experts", 0) > 1 or row.number("ep", 1) > 1
    needed = (*_STATED, *(("experts", "top_k", "expert_hidden") if has_experts else ()))
    unknown = [name for name in needed if not row.stated(name)]
    if unknown:
        return f"not stated: {', '.join(unknown)}"
    if why := explain_impossible(row) or _find_unknown_word(row):
        return why
    degrees = [row.number(name, 1) for name in ("dp", "tp", "pp", "cp")]
    if math.prod(degrees) != row.number("gpus"):
        return f"dp x tp x pp x cp = {math.prod(degrees):g}, but there are {row.number('gpus'):g} GPUs"
    if not (row.stated("iter_time_s") or row.stated("mem_gib") or _ran_out_of_memory(row)):
        return "neither time nor memory is stated"
    return None


def _find_unknown_word(row: CsvRow) -> str | None:
    valid = {
        "sharding": row.text("sharding").lower() in _ZERO,
        "recompute": row.text("recompute").lower() in ("", *RECOMPUTE),
        "precision": not _WIDE.match(row.text("precision")),
        "attention": row.text("attention").lower() in ("", "eager", "flash", "flash3", "cudnn", "triton"),
        "memory_of": row.text("memory_of").lower() in ("", "device", "reserved", "allocated"),
        "schedule": row.text("schedule").lower().replace("-", "_") in ("", *SCHEDULES, *_SCHEDULE_NAMES),
        "dispatcher": row.text("dispatcher").lower() in ("", "alltoall", "allgather", *_ONCE_A_NODE),
        "fp8_recipe": row.text("fp8_recipe").lower() in ("", *FLOAT8_RECIPES),
    }
    return next((f"unknown {name} {row.text(name)!r}" for name, is_valid in valid.items() if not is_valid), None)


def _list_assumed(row: CsvRow) -> tuple[str, ...]:
    names = ("vocab", "recompute", "vpp", "inter_link_gbps_per_gpu", "ffn_hidden")
    return tuple(name for name in names if not row.text(name))


def _shape_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    hidden, heads, gated = row.number("hidden"), row.number("heads"), row.number("gated_mlp", 0)
    return {
        "layers": row.number("layers"),
        "hidden": hidden,
        "feed_forward": row.number("ffn_hidden", 4 * hidden),
        "heads": heads,
        "kv_heads": row.number("kv_heads", heads),
        "head_dim": row.number("head_dim", hidden / heads),
        "vocab": row.number("vocab", _DEFAULT_VOCAB),
        "gated": gated,
        "parallel_block": software.parallel_block,
        "learned_positions": 0,
        "dropout": 0,
        "tied": 1 - gated,  # GPTs tie the embedding to the head, Llamas do not.
        "sequence": row.number("seq"),
        "experts": row.number("experts", 0) if row.number("experts", 0) > 1 else 0,
        "top_k": row.number("top_k", 0),
        "expert_width": row.number("expert_hidden", 0),
        "shared_width": row.number("shared_hidden", 0),
        "dense_layers": row.number("dense_layers", 0),
        "query_rank": row.number("query_rank", 0),
        "key_rank": row.number("key_rank", 0),
        "rotary_width": row.number("rotary_width", 0),
        "value_dim": row.number("value_dim", 0),
    }


_SCHEDULE_NAMES = {"zb_1p": "interleaved_zero_bubble", "zb_v": "zbv", "dualpipe": "dualpipev"}
"""Names of schedules in papers, and ours."""


def _schedule(row: CsvRow) -> str:
    if row.stated("schedule"):
        stated = row.text("schedule").lower().replace("-", "_")
        return _SCHEDULE_NAMES.get(stated, stated)
    named = re.search(r"schedule=?\s*([A-Za-z0-9-]+)", row.text("notes"))
    kind = named[1].lower().replace("-", "") if named else ""
    schedules = {"zb1p": "interleaved_zero_bubble", "zb2p": "zb_2p", "zbv": "zbv", "gpipe": "gpipe"}
    return schedules.get(kind, "interleaved_1f1b" if row.number("vpp", 1) > 1 else "1f1b")


def _layout_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    zero, dp, cp = _ZERO[row.text("sharding").lower()], row.number("dp"), row.number("cp", 1)
    if software.stack == "deepspeed" and "ZeRO stage not stated" in row.text("notes"):
        zero = 1  # what its users run unless they say otherwise
    sharded = zero > 0
    copies = row.number("dp_replicate", 1 if sharded else dp)
    return {
        "global_batch": row.number("global_batch"),
        "micro_batch": row.number("micro_batch"),
        "dp_replicate": copies,
        "dp_shard": dp / copies,
        "ep": row.number("ep", 1),
        "imbalance": row.number("expert_imbalance", 1),
        "sends_once": row.text("dispatcher").lower() in _ONCE_A_NODE,
        "loss_chunk": 0,
        "cp": cp,
        "tp": row.number("tp"),
        "pp": row.number("pp"),
        "virtual_stages": row.number("vpp", 1),
        "sequence_parallel": row.number("sp", 0),
        "ulysses": 0,
        "zero": zero,
        "reshard": row.flag("reshard", "SHARD_GRAD_OP" not in row.text("notes")),
        "schedule": SCHEDULES.index(_schedule(row)),
        "recompute": RECOMPUTE.index(row.text("recompute").lower() or "none"),
        "recompute_share": 1,
        "offload": 0,
        "offload_activations": 0,
        "stack": STACKS.index(software.stack),
        "fused_attention": software.fused_attention,
        "fused_elementwise": software.fused_elementwise,
        "overlap_data": software.overlap_data,
        "overlap_tensor": software.overlap_tensor,
        "launch_blocking": "LAUNCH_BLOCKING" in row.text("notes"),
    }


def _format_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    """Return the bytes per element. Megatron and DeepSpeed keep 16-bit weights and an fp32 copy, FSDP fp32 weights."""
    fp32 = software.stack == "fsdp"
    gradient_bytes = 4 if fp32 or "fp32 grad" in row.text("notes").lower() else software.gradient_bytes
    return {
        "activation_bytes": 2,
        "weight_bytes": 4 if fp32 else 2,
        "gradient_bytes": gradient_bytes,
        "reduce_bytes": 2 if fp32 else gradient_bytes,
        "optimizer_bytes": 8 if fp32 else 12,
        "logit_bytes": software.logit_bytes,
        "float8": FLOAT8_RECIPES.index(row.text("fp8_recipe").lower() or "none"),
        "checkpoint_every": math.inf,
        "checkpoint_bandwidth": PCIE,
    }


def _bits(precision: str) -> int:
    return 8 if "fp8" in precision else 4 if "fp4" in precision else 16


def _machine_columns(row: CsvRow, accelerator: Accelerator, software: SoftwareTraits) -> dict[str, float]:
    kind, bits = row.text("gpu_type"), _bits(row.text("precision").lower())
    stated = re.search(r"-(\d+)GB$", kind)
    nic = next((rate for name, rate in _NIC_GBIT.items() if name in kind), 400)
    per_node = min(row.number("gpus_per_node", 8), row.number("gpus"))
    rack = 72 if kind.startswith("GB") else per_node
    half = accelerator.flops.get(bits, accelerator.flops[16])
    return {
        "gpus_per_node": per_node,
        "nvlink_domain": max(rack, per_node),
        "peak_flops": half,
        "peak_flops_attention": accelerator.flops[16],
        "gemm_ceiling": accelerator.ceiling,
        "attention_ceiling": attention_peak(accelerator, software.new_attention, software.triton_attention),
        "multiprocessors": accelerator.multiprocessors,
        "memory_bytes": (float(stated[1]) if stated else accelerator.memory_gb) * GIB,
        "memory_bandwidth": accelerator.bandwidth,
        "link_bandwidth": (row.number("intra_link_gbs", 600) or _NO_NVLINK) / 2 * 1e9,
        "pair_bandwidth": math.inf,
        "nic_bandwidth": (row.number("inter_link_gbps_per_gpu", nic) or nic) / 8 * 1e9,
        "host_bandwidth": 0,
        "leaf_gpus": math.inf,
        "leaf_oversubscription": 1,
        "group_gpus": math.inf,
        "group_oversubscription": 1,
    }
