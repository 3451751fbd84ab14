"""Turn one line of a table of measured runs into the columns of a job; what it does not state gets its usual value."""

from __future__ import annotations

import math
import re

from hpc_train.config.cluster import PCIE_BANDWIDTH
from hpc_train.models.counts import compute_mean_keys
from hpc_train.models.linear_shapes import LinearShape
from hpc_train.planner.calibration.run_row import CsvRow
from hpc_train.planner.calibration.software import SoftwareTraits
from hpc_train.planner.model.accelerators import Accelerator, attention_peak
from hpc_train.planner.model.inputs import CUDA_GRAPHS, FLOAT8_RECIPES, RECOMPUTE, SCHEDULES, STACKS
from hpc_train.planner.model.layer.adapters import make_adapter_columns
from hpc_train.units import GIB

ZERO_STAGES = {"": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3, "zero3": 3}
"""Stage by the word in the column `sharding`."""
ONCE_A_NODE = ("deepep", "hybridep")
"""Dispatchers of tokens that send one copy of a token to a node, and copy it there."""
ADAPTER_TARGETS = {"q", "k", "v", "qkv", "o", "gate", "up", "down"}
"""Words of the column `adapter_targets`."""
_NIC_GBIT = {"V100": 100, "A100": 200, "H100": 400, "H800": 400, "H200": 400, "GB300": 800, "B300": 800}
"""Assumed network bandwidth per GPU, Gbit/s: one port of the speed in NVIDIA's own servers with these GPUs (datasheets
of DGX-2, DGX A100, H100 and B300); 400 for other GPUs."""
_NO_NVLINK = 64
"""Link bandwidth of GPUs without NVLink, GB/s, both directions together: 16 lanes of PCIe 4.0, of 16 Gbit/s each."""
_DEFAULT_VOCAB = 51200
"""Assumed vocabulary: GPT-2's 50,257 padded as in Megatron's scripts."""


def make_columns(row: CsvRow, accelerator: Accelerator, software: SoftwareTraits) -> dict[str, float]:
    """Return the columns of the job of a row that was checked. The names are those of Jobs."""
    return {
        **_make_shape_columns(row, software),
        **_make_layout_columns(row, software),
        **_make_format_columns(row, software),
        **_make_machine_columns(row, accelerator, software),
    }


def _make_shape_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    hidden, heads, gated = row.get_number("hidden"), row.get_number("heads"), row.get_number("gated_mlp", 0)
    return {
        "layers": row.get_number("layers"),
        "hidden": hidden,
        "feed_forward": row.get_number("ffn_hidden", 4 * hidden),
        "heads": heads,
        "kv_heads": row.get_number("kv_heads", heads),
        "head_dim": row.get_number("head_dim", hidden / heads),
        "vocab": row.get_number("vocab", _DEFAULT_VOCAB),
        "gated": gated,
        "parallel_block": software.parallel_block,
        "learned_positions": 0,
        "dropout": 0,
        "tied": 1 - gated,  # GPTs tie the embedding to the head, Llamas do not.
        "sequence": row.get_number("seq"),
        "experts": row.get_number("experts", 0) if row.get_number("experts", 0) > 1 else 0,
        "top_k": row.get_number("top_k", 0),
        "expert_width": row.get_number("expert_hidden", 0),
        "shared_width": row.get_number("shared_hidden", 0),
        "dense_layers": row.get_number("dense_layers", 0),
        "composite_norms": row.get_flag("composite_norms"),
        "head_norms": row.get_flag("head_norms"),
        "query_rank": row.get_number("query_rank", 0),
        "key_rank": row.get_number("key_rank", 0),
        "rotary_width": row.get_number("rotary_width", 0),
        "value_dim": row.get_number("value_dim", 0),
        "seen_share": _compute_seen_share(row),
        **_make_adapter_columns(row),
    }


def _compute_seen_share(row: CsvRow) -> float:
    """Return the keys that a token sees, over those of causal attention without windows, on average over the layers."""
    layers, sequence = row.get_number("layers"), int(row.get_number("seq"))
    share = row.get_number("window_layers", layers) / layers
    if not row.is_stated("window"):
        return 1.0
    return 1 - share + share * 2 * compute_mean_keys(int(row.get_number("window")), sequence) / sequence


def _make_adapter_columns(row: CsvRow) -> dict[str, float]:
    """Return the columns of adapters on the linear layers of a dense block; zeros without them."""
    if not row.get_number("adapter_rank", 0):
        return make_adapter_columns({}, 0, 1)
    hidden, heads = int(row.get_number("hidden")), int(row.get_number("heads"))
    width = int(row.get_number("head_dim", hidden / heads))
    keys = int(row.get_number("kv_heads", heads)) * width
    inner, gated = int(row.get_number("ffn_hidden", 4 * hidden)), row.get_number("gated_mlp", 0) > 0
    targets = row.get_word("adapter_targets").split()
    fused = {"qkv": LinearShape(hidden, heads * width + 2 * keys)}
    split = {"q": LinearShape(hidden, heads * width), "k": LinearShape(hidden, keys), "v": LinearShape(hidden, keys)}
    shapes = {
        **(fused if "qkv" in targets else split),
        "o": LinearShape(heads * width, hidden, "rows"),
        **({"gate": LinearShape(hidden, inner)} if gated else {}),
        "up": LinearShape(hidden, inner),
        "down": LinearShape(inner, hidden, "rows"),
    }
    chosen = {name: shape for name, shape in shapes.items() if not targets or name in targets}
    return make_adapter_columns(chosen, row.get_number("adapter_rank"), 1)


_SCHEDULE_NAMES = {"zb_1p": "interleaved_zero_bubble", "zb_v": "zbv", "dualpipe": "dualpipev"}
"""Names of schedules in papers, and ours."""


def name_schedule(row: CsvRow) -> str:
    stated = row.get_word("schedule").replace("-", "_")
    usual = "interleaved_1f1b" if row.get_number("vpp", 1) > 1 else "1f1b"
    return _SCHEDULE_NAMES.get(stated, stated) or usual


def _make_layout_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    zero, dp, cp = ZERO_STAGES[row.get_word("sharding")], row.get_number("dp"), row.get_number("cp", 1)
    sharded = zero > 0
    copies = row.get_number("dp_replicate", 1 if sharded else dp)
    return {
        "global_batch": row.get_number("global_batch"),
        "micro_batch": row.get_number("micro_batch"),
        "dp_replicate": copies,
        "dp_shard": dp / copies,
        "ep": row.get_number("ep", 1),
        "imbalance": row.get_number("expert_imbalance", 1),
        "sends_once": row.get_word("dispatcher") in ONCE_A_NODE,
        "routed_share": row.get_number("group_top_k", 1) / row.get_number("expert_groups", 1),
        "dispatch_bytes": row.get_number("dispatch_bytes", 2),
        "overlap_experts": row.get_flag("overlap_experts"),
        "expert_biases": row.get_flag("expert_biases"),
        "cuda_graphs": CUDA_GRAPHS.index(row.get_word("cuda_graphs") or "none"),
        "loss_chunk": 0,
        "cp": cp,
        "tp": row.get_number("tp"),
        "pp": row.get_number("pp"),
        "virtual_stages": row.get_number("vpp", 1),
        "sequence_parallel": row.get_number("sp", 0),
        "separate_gathers": row.get_flag("separate_gathers"),
        "ulysses": 0,
        "zero": zero,
        "reshard": row.get_flag("reshard", True),
        "reduce_once": row.get_flag("reduce_once"),
        "schedule": SCHEDULES.index(name_schedule(row)),
        "recompute": RECOMPUTE.index(row.get_word("recompute") or "none"),
        "recompute_share": 1,
        "offload": 0,
        "offload_activations": 0,
        "stack": STACKS.index(software.stack),
        "fused_attention": software.fused_attention,
        "fused_elementwise": software.fused_elementwise,
        "overlap_data": software.overlap_data,
        "overlap_tensor": software.overlap_tensor,
        "launch_blocking": row.get_flag("launch_blocking"),
    }


def _make_format_columns(row: CsvRow, software: SoftwareTraits) -> dict[str, float]:
    """Return the bytes per element. Megatron and DeepSpeed keep 16-bit weights and an fp32 copy, FSDP fp32 weights."""
    fp32 = software.stack == "fsdp"
    gradient_bytes = software.gradient_bytes
    return {
        "activation_bytes": 2,
        "weight_bytes": 4 if fp32 else 2,
        "gradient_bytes": gradient_bytes,
        "reduce_bytes": row.get_number("reduce_bytes", software.reduce_bytes or gradient_bytes),
        "optimizer_bytes": 8 if fp32 else 12,
        "logit_bytes": software.logit_bytes,
        "float8_gather": row.get_flag("fp8_gather"),
        "float8": FLOAT8_RECIPES.index(row.get_word("fp8_recipe") or "none"),
        "checkpoint_every": math.inf,
        "checkpoint_bandwidth": PCIE_BANDWIDTH,
    }


def _count_bits(precision: str) -> int:
    return 8 if "fp8" in precision else 4 if "fp4" in precision else 16


def _make_machine_columns(row: CsvRow, accelerator: Accelerator, software: SoftwareTraits) -> dict[str, float]:
    kind, bits = row.get_text("gpu_type"), _count_bits(row.get_word("precision"))
    stated = re.search(r"-(\d+)GB$", kind)
    nic = next((rate for name, rate in _NIC_GBIT.items() if name in kind), 400)
    # A run may use fewer GPUs than one node has.
    per_node = min(row.get_number("gpus_per_node", 8), row.get_number("gpus"))
    rack = 72 if kind.startswith("GB") else per_node
    # A device without products of this width computes in 16 bits.
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
        "link_bandwidth": (row.get_number("intra_link_gbs", 600) or _NO_NVLINK) / 2 * 1e9,
        "pair_bandwidth": math.inf,
        "nic_bandwidth": (row.get_number("inter_link_gbps_per_gpu", nic) or nic) / 8 * 1e9,
        "host_bandwidth": 0,
        "leaf_gpus": math.inf,
        "leaf_oversubscription": 1,
        "group_gpus": math.inf,
        "group_oversubscription": 1,
    }
