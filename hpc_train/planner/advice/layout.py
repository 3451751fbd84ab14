"""Lints of the parallel layout: degrees, stages, micro-batches, recomputation, offload.

A lint is a function from RunFacts to one Advice or None; lints.LINTS lists them all, in the order of printing.
"""

from __future__ import annotations

import math

from hpc_train.config.model import VisionTransformerConfig
from hpc_train.models.shape import count_kv_heads
from hpc_train.placement.described_cluster import count_ranks_per_node
from hpc_train.planner.advice.facts import Advice, RunFacts
from hpc_train.planner.batch_laws import min_batch_for_bubble
from hpc_train.traffic.stages import compute_block_costs, list_stage_parts, read_block_costs
from hpc_train.units import GIB

_UNEVEN = 0.05
"""A pipeline counts as uneven if its slowest stage takes this much longer than the mean (a fraction)."""
_BUBBLE = 0.10
"""A larger idle share of a step is reported. 1F1B has this one with m = 9 (p - 1) micro-batches."""
_LAUNCH_SECONDS = 8e-6
"""An elementwise operation that runs shorter than this on the GPU takes longer to launch than to run. From measured
runs: GPTs of hidden 2048 on A100 with one sequence of 2048 (16.8 MB read and written at 2,039 GB/s), for which a
roofline without launch times predicts 55 % too little time (vTrain, arXiv:2312.12391, single node)."""


def check_tensor_divides(facts: RunFacts) -> Advice | None:
    """Report a tp that does not divide the heads or the feed-forward width."""
    model, tp = facts.transformer, facts.degrees.tp
    if model is None or tp == 1:
        return None
    widths = {"heads": model.heads, "feed_forward": model.feed_forward}
    broken = [f"{name} {width}" for name, width in widths.items() if width % tp]
    if not broken:
        return None
    legal = [n for n in range(1, min(widths.values()) + 1) if all(width % n == 0 for width in widths.values())]
    why = f"tp={tp} does not divide {' and '.join(broken)}"
    return Advice("parallel.tp", why, f"parallel.tp={max(n for n in legal if n <= tp)} (legal: {legal})", "error")


def check_kv_head_sharing(facts: RunFacts) -> Advice | None:
    """Report a tp that does not divide kv_heads: ranks then compute the same key and value heads twice."""
    model, tp = facts.transformer, facts.degrees.tp
    if model is None or count_kv_heads(model) % tp == 0:
        return None
    heads = count_kv_heads(model)
    why = f"tp={tp} does not divide kv_heads {heads}: several ranks hold and compute the same key and value heads"
    return Advice("parallel.tp", why, f"parallel.tp={math.gcd(tp, heads)}, where no two ranks do", "hint")


def check_tensor_domain(facts: RunFacts) -> Advice | None:
    """Report a tp whose groups leave the NVLink domain."""
    tp, per_node = facts.degrees.tp, count_ranks_per_node(facts.config)
    node = facts.config.cluster.node
    domain = max(node.nvlink_domain_gpus, per_node)
    where = "NVLink domain" if node.nvlink_domain_gpus > per_node else "node"
    if tp == 1 or not node.gpus or (tp <= domain and domain % tp == 0):
        return None
    inside = max(n for n in range(1, min(tp, domain) + 1) if domain % n == 0 and tp % n == 0)
    what = (
        f"is more than the {domain} GPUs of a {where}" if tp > domain else f"does not divide the {domain} of a {where}"
    )
    slower = _compare_bandwidths(facts)
    why = (
        f"tp={tp} {what}: its groups reduce activations over the network, twice per layer forward and backward{slower}"
    )
    fix = f"parallel.tp={inside}, and parallel.pp or a zero strategy for the rest of the memory"
    return Advice("parallel.tp", why, fix, "warning")


def _compare_bandwidths(facts: RunFacts) -> str:
    """Compare the network bandwidth of a GPU with its links in the node; empty if not slower, or unknown."""
    node = facts.config.cluster.node
    network = node.nics * node.nic_gbit_s / 8 / max(node.gpus, 1)
    if not network or node.gpu_link_gb_s <= network:
        return ""
    return f" (a GPU has {network:.0f} GB/s there, {node.gpu_link_gb_s:.0f} in the node)"


def check_uneven_stages(facts: RunFacts) -> Advice | None:
    """Report pipeline stages of unequal work, by FLOPs, with the layers split as the run will split them."""
    model, degrees = facts.config.model, facts.degrees
    layers = getattr(model, "layers", None)
    stages = degrees.pp * facts.virtual_stages
    if degrees.pp == 1 or layers is None or layers < stages:
        return None
    pipeline = facts.config.parallel.pipeline
    costs = (
        read_block_costs(pipeline.costs)
        if pipeline.costs
        else compute_block_costs(model, facts.config.train.sequence_length, layers)
    )
    parts = [part for rank in list_stage_parts(facts.config, degrees.pp, layers) for part in rank]
    block = sum(costs.blocks) / layers
    times = [part.blocks * block + part.first * costs.before + part.last * costs.after for part in parts]
    slowest = max(times) * len(times) / sum(times) - 1
    if slowest <= _UNEVEN:
        return None
    ends = (costs.before / block, costs.after / block) if block else (0.0, 0.0)
    head = f"; the head weighs {ends[1]:.1f} layers" if ends[1] > 0.5 else ""
    why = f"{layers} layers over {stages} stages: the slowest has {slowest:.0%} more work than the mean{head}"
    return Advice("parallel.pp", why, _suggest_even_stages(facts, layers, ends), "warning")


def _suggest_even_stages(facts: RunFacts, layers: int, ends: tuple[float, float]) -> str:
    """Suggest nearby numbers of layers, or fewer stages, that balance well enough."""
    pp, virtual = facts.degrees.pp, facts.virtual_stages
    stages = pp * virtual
    near = [n for n in range(stages, layers + stages + 1) if compute_stage_imbalance(n, stages, ends) <= _UNEVEN]
    below, above = [n for n in near if n < layers][-1:], [n for n in near if n > layers][:1]
    ways = [f"model.layers={' or '.join(map(str, below + above))}"] if below or above else []
    fewer = [n for n in range(2, pp) if compute_stage_imbalance(layers, n * virtual, ends) <= _UNEVEN]
    return ", or ".join([*ways, f"parallel.pp={fewer[-1]}" if fewer else "parallel.pp=1"])


def compute_stage_imbalance(layers: int, stages: int, ends: tuple[float, float]) -> float:
    """Return how much longer than the mean the slowest stage takes, with the best split of the layers (a fraction).

    ends: work before the first layer and after the last one, in units of a layer.
    """
    times = sorted({count + extra for count in range(1, layers + 1) for extra in (0.0, *ends, sum(ends))})

    def count_layers_within(time: float) -> int:
        """Return how many layers all stages can run within this time, at least one each."""
        each = [time - ends[0], *[time] * (stages - 2), time - ends[1]] if stages > 1 else [time - sum(ends)]
        counts = [math.floor(limit + 1e-9) for limit in each]
        return sum(counts) if min(counts) >= 1 else 0

    slowest = next((time for time in times if count_layers_within(time) >= layers), math.inf)
    return slowest * stages / (layers + sum(ends)) - 1


def check_interleaving_rounds(facts: RunFacts) -> Advice | None:
    """Report a number of micro-batches that pp does not divide, for the interleaved schedules."""
    pipeline, pp, count = facts.config.parallel.pipeline, facts.degrees.pp, facts.micro_batches
    if pp == 1 or not pipeline.schedule.startswith("interleaved") or count % pp == 0:
        return None
    batch = facts.config.train.micro_batch * facts.degrees.data_parallel
    below, above = count // pp * pp * batch, (count // pp + 1) * pp * batch
    sizes = f"{below} or {above}" if below else str(above)
    why = f"{count} micro-batches over pp={pp}: an interleaved schedule runs rounds of {pp}, and the last is not full"
    fails = count % max(1, count // pp) != 0
    fix = f"train.global_batch={sizes}, or parallel.pipeline.schedule=looped_bfs"
    return Advice("train.global_batch", why, fix, "error" if fails else "warning")


def check_bubble(facts: RunFacts) -> Advice | None:
    """Report a pipeline that idles too much of a step."""
    pp = facts.degrees.pp
    share = facts.figures.bubble if facts.figures.bubble is not None else _compute_bubble_of_equal_stages(facts)
    if pp == 1 or share is None or share <= _BUBBLE:
        return None
    count, virtual = facts.micro_batches, facts.virtual_stages
    train, pipeline = facts.config.train, facts.config.parallel.pipeline
    over = _BUBBLE / (1 - _BUBBLE)
    unit = facts.degrees.data_parallel * train.micro_batch
    least = min_batch_for_bubble(facts.degrees.data_parallel, train.micro_batch, pp, virtual, over)
    least = -(-least // (unit * pp)) * unit * pp if pipeline.schedule.startswith("interleaved") else least
    ways = [f"train.global_batch={least}"] if least > train.global_batch else []
    ways += ["a smaller train.micro_batch"] if train.micro_batch > 1 else []
    if pipeline.schedule in ("naive", "gpipe", "1f1b"):
        ways.append("parallel.pipeline.schedule=interleaved_1f1b")
    ways.append("fewer stages")
    why = f"pp={pp} with {count} micro-batches: the pipeline idles {share:.0%} of a step"
    return Advice("parallel.pipeline", why, ", or ".join(ways), "warning")


def _compute_bubble_of_equal_stages(facts: RunFacts) -> float | None:
    """Return the idle share of a step for equal stages (formulas: schedules/simulate.py); None: no closed form."""
    pp, count, virtual = facts.degrees.pp, facts.micro_batches, facts.virtual_stages
    name = facts.config.parallel.pipeline.schedule
    if name == "naive":
        return 1 - 1 / pp
    if name in ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"):
        return (pp - 1) / (virtual * count + pp - 1)
    return None


def check_launch_bound(facts: RunFacts) -> Advice | None:
    """Report a micro-batch so small that the GPU waits for the host to launch its kernels."""
    gpu, train = facts.config.cluster.gpu, facts.config.train
    hidden = getattr(facts.config.model, "hidden", None)
    vision = isinstance(facts.config.model, VisionTransformerConfig)
    if not gpu.memory_bandwidth_gb_s or hidden is None or vision or facts.config.parallel.compile:
        return None
    moved = 4.0 * hidden * train.sequence_length / facts.degrees.cp  # bytes of a sequence: read and written in 16 bits
    seconds = moved * train.micro_batch / (gpu.memory_bandwidth_gb_s * 1e9)
    if seconds > _LAUNCH_SECONDS * 1.05:
        return None
    enough = -(-int(_LAUNCH_SECONDS * 2 * gpu.memory_bandwidth_gb_s * 1e9) // int(max(moved, 1)))
    rows = int(facts.rows)
    most = next((n for n in range(enough, rows + 1) if rows % n == 0), rows)
    larger = f"train.micro_batch={most}, or " if most > train.micro_batch else ""
    why = (
        f"a micro-batch of {train.micro_batch} at hidden {hidden}: an elementwise operation takes {seconds * 1e6:.1f} "
        "us on the GPU, less than its launch, so the GPU waits for the host"
    )
    return Advice("train.micro_batch", why, f"{larger}parallel.compile=true", "warning")


def check_needless_recompute(facts: RunFacts) -> Advice | None:
    """Report recomputation in a run that would fit without."""
    mode, without = facts.config.parallel.recompute.mode, facts.figures.memory_without_recompute
    if mode == "none" or without is None or not _fits_device(facts, without):
        return None
    why = f"recomputation ({mode}) costs up to a third of the FLOPs, and without it {_describe_memory(facts, without)}"
    return Advice("parallel.recompute.mode", why, "parallel.recompute.mode=none", "warning")


def check_needless_offload(facts: RunFacts) -> Advice | None:
    """Report offload in a run that would fit without."""
    offload, without = facts.config.parallel.offload, facts.figures.memory_without_offload
    on = [name for name in ("optimizer", "parameters") if getattr(offload, name) != "none"]
    if not on or without is None or not _fits_device(facts, without):
        return None
    moved = " and ".join(on)
    why = f"offload of {moved} moves them over PCIe in every step, and without it {_describe_memory(facts, without)}"
    keys = " ".join(f"parallel.offload.{name}=none" for name in on)
    return Advice("parallel.offload", why, keys, "warning")


def _fits_device(facts: RunFacts, size: float) -> bool:
    return 0 < size * (1 + facts.figures.memory_margin) <= facts.config.cluster.gpu.memory_gib * GIB


def _describe_memory(facts: RunFacts, size: float) -> str:
    return f"a rank needs {size / GIB:.1f} of {facts.config.cluster.gpu.memory_gib:g} GiB"
