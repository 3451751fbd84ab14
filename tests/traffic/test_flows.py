"""flows against the collectives that real ranks run in a step: the same axes, calls and bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from drawn import draw
from traffic_ledger import Key, Ledger
from traffic_steps import EXPERTS, FULL_NORMS, GPT2, LATENT, VIT, WINDOWS, Layout, engine_after_setup, share_of

from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.flows import compute_flows

TP, CP, PP = ("parallel=tp",), ("parallel=cp",), ("parallel=pp",)
HYBRID = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")
LOOSE = ("parallel.sync.every=1", "train.steps=4")
FLOAT8 = ("precision.float8=tensorwise", "precision.float8_gather=true")
FULL, ULYSSES = "parallel.recompute.mode=full", "parallel.context.method=ulysses"
ZERO1, ZERO3 = "parallel.strategy=zero1", "parallel.strategy=zero3"
LAYOUTS = {
    "ddp": Layout(2, ("parallel=ddp",)),
    "zero1": Layout(2, ("parallel=zero1",)),
    "zero1-groups": Layout(2, ("parallel=zero1", "parallel.bucket_mib=0.07")),
    "zero2-accumulated": Layout(2, ("parallel=zero2", "train.micro_batch=2")),
    "zero3-bf16": Layout(2, ("parallel=fsdp", "precision=bf16")),
    "zero3-gpt2-short-last": Layout(2, ("parallel=fsdp", "train.micro_batch=3"), GPT2),
    "zero3-vit": Layout(2, ("parallel=fsdp",), VIT),
    "zero3-8-bits": Layout(2, ("parallel=fsdp", "precision=bf16", *FLOAT8)),
    "zero1-8-bits-vit": Layout(2, ("parallel=zero1", *FLOAT8), VIT),
    "zero2-groups-8-bits": Layout(2, ("parallel=zero2", "parallel.bucket_mib=0.07", *FLOAT8)),
    "ep-8-bits": Layout(4, (ZERO3, "parallel.ep=2", "precision=bf16", *FLOAT8), EXPERTS),
    "pp-hsdp-8-bits-latent": Layout(
        8, (*HYBRID, "parallel.pp=2", "train.micro_batch=2", "precision=bf16", *FLOAT8), LATENT
    ),
    "cp-8-bits": Layout(4, (*CP, ZERO3, "parallel.dp_shard=2", "precision=bf16", *FLOAT8)),
    "hsdp": Layout(4, HYBRID),
    "loose-ddp": Layout(2, ("parallel=ddp", *LOOSE)),
    "loose-zero3": Layout(4, (*HYBRID, *LOOSE)),
    "loose-tp-fragments-int4": Layout(
        4, ("parallel.dp_replicate=2", "parallel.tp=2", *LOOSE, "parallel.sync.compression=int4")
    ),
    "tp": Layout(2, TP),
    "tp-whole-positions": Layout(2, (*TP, "parallel.tensor.sequence=false", FULL)),
    "tp-whole-vocabulary": Layout(2, (*TP, "parallel.tensor.vocabulary=false")),
    "tp-more-ranks-than-kv-heads": Layout(4, (*TP, "parallel.tp=4")),
    "tp-gpt2": Layout(2, TP, GPT2),
    "tp-vit": Layout(2, TP, VIT),
    "tp-asynchronous-recomputed": Layout(2, (*TP, "parallel.tensor.asynchronous=true", FULL)),
    "tp-recomputed": Layout(2, (*TP, FULL, "parallel.recompute.every=3")),
    "tp-zero1-bf16-accumulated": Layout(4, (*TP, ZERO1, "precision=bf16")),
    "cp-ring-bf16": Layout(2, (*CP, "precision=bf16")),
    "cp-ring-4-recomputed": Layout(4, (*CP, "parallel.cp=4", FULL, "train.sequence_length=16")),
    "cp-ulysses": Layout(2, (*CP, ULYSSES)),
    "cp-ulysses-more-ranks-than-kv-heads": Layout(4, (*CP, ULYSSES, "parallel.cp=4", FULL)),
    "pp-1f1b": Layout(2, PP),
    "pp-1f1b-3": Layout(3, (*PP, "parallel.pp=3")),
    "pp-gpt2-tied": Layout(2, PP, GPT2),
    "pp-interleaved": Layout(2, (*PP, "parallel.pipeline.schedule=interleaved_1f1b")),
    "pp-zbv": Layout(2, (*PP, "parallel.pipeline.schedule=zbv")),
    "pp-zero3": Layout(4, (*PP, ZERO3, "train.micro_batch=2")),
    "pp-zero3-zbv": Layout(4, (*PP, ZERO3, "train.micro_batch=2", "parallel.pipeline.schedule=zbv")),
    "pp-zero3-kept": Layout(
        4, (*PP, ZERO3, "train.micro_batch=2", "parallel.reshard_after_forward=false", "parallel.pipeline.schedule=zbv")
    ),
    "pp-zero3-gpipe": Layout(4, (*PP, ZERO3, "train.micro_batch=2", "parallel.pipeline.schedule=gpipe"), GPT2),
    "pp-zero2-zero-bubble": Layout(
        4, (*PP, "parallel.strategy=zero2", "parallel.pipeline.schedule=interleaved_zero_bubble")
    ),
    "pp-zero3-dualpipev": Layout(
        4, (*PP, ZERO3, "train.micro_batch=1", "parallel.pipeline.schedule=dualpipev", "precision=bf16")
    ),
    "pp-zero3-tp-interleaved": Layout(
        8, (*PP, ZERO3, "parallel.tp=2", "train.micro_batch=2", "parallel.pipeline.schedule=interleaved_1f1b")
    ),
    "pp-zero1-looped": Layout(
        4,
        (*PP, "parallel.strategy=zero1", "parallel.pipeline.schedule=looped_bfs", "parallel.pipeline.virtual_stages=2"),
    ),
    "pp-hsdp": Layout(
        8, ("parallel=hsdp", "train.micro_batch=2", "parallel.pp=2", "parallel.dp_replicate=2", "parallel.dp_shard=2")
    ),
    "pp-tp-bf16-short-last": Layout(4, (*PP, "parallel.tp=2", "precision=bf16", "train.micro_batch=6")),
    "3d": Layout(8, ("parallel=3d", "parallel.dp_shard=2", "train.micro_batch=2")),
    "ddp-experts": Layout(2, ("parallel=ddp",), EXPERTS),
    "zero3-tp-experts": Layout(4, (*TP, ZERO3, "parallel.dp_shard=2"), EXPERTS),
    "tp-asynchronous-experts": Layout(2, (*TP, "parallel.tensor.asynchronous=true", FULL), EXPERTS),
    "tp-whole-positions-experts": Layout(2, (*TP, "parallel.tensor.sequence=false", FULL), EXPERTS),
    "ep-of-4": Layout(4, (ZERO3, "parallel.ep=2"), EXPERTS),
    "ep-of-4-zero1-recomputed": Layout(4, (ZERO1, "parallel.ep=2", FULL, "parallel.recompute.every=3"), EXPERTS),
    "ep-hsdp": Layout(8, (*HYBRID, "parallel.dp_shard=4", "parallel.ep=2", "train.micro_batch=2"), EXPERTS),
    "ep-tp": Layout(8, (*TP, ZERO3, "parallel.dp_shard=4", "parallel.ep=2", "train.micro_batch=2"), EXPERTS),
    "ep-pp-bf16": Layout(
        8, (*PP, ZERO3, "parallel.dp_shard=4", "parallel.ep=2", "train.micro_batch=2", "precision=bf16"), EXPERTS
    ),
    "latent-tp-recomputed": Layout(2, (*TP, FULL), LATENT),
    "latent-tp-asynchronous": Layout(2, (*TP, "parallel.tensor.asynchronous=true", FULL), LATENT),
    "latent-tp-whole-positions": Layout(
        2, (*TP, "parallel.tensor.sequence=false"), replace(LATENT, latent=replace(LATENT.latent, q_rank=None))
    ),
    "latent-cp-ring": Layout(2, CP, LATENT),
    "latent-cp-ulysses-tp": Layout(4, (*CP, ULYSSES, "parallel.tp=2"), LATENT),
    "latent-ep-of-4": Layout(4, (ZERO3, "parallel.ep=2"), LATENT),
    "tp-full-norms-bf16": Layout(2, (*TP, "precision=bf16"), FULL_NORMS),
    "tp-full-norms-more-ranks-than-kv-heads-recomputed": Layout(
        4, (*TP, "parallel.tp=4", FULL, "parallel.recompute.every=3"), FULL_NORMS
    ),
    "tp-full-norms-whole-positions-experts-recomputed": Layout(
        2, (*TP, "parallel.tensor.sequence=false", FULL), replace(EXPERTS, query_key_norm="full", post_norms=True)
    ),
    "pp-zbv-tp-full-norms-short-last": Layout(
        4, (*PP, "parallel.tp=2", "parallel.pipeline.schedule=zbv", "train.micro_batch=6"), FULL_NORMS
    ),
    "cp-ring-windows": Layout(4, (*CP, "parallel.cp=4", FULL), WINDOWS),
    "cp-ring-windows-unbalanced": Layout(4, (*CP, "parallel.cp=4", "parallel.context.balanced=false"), WINDOWS),
    "cp-ring-windows-pp": Layout(4, (*CP, "parallel.pp=2"), WINDOWS),
    "cp-tp-zero3": Layout(8, (*CP, "parallel.tp=2", ZERO3, "parallel.dp_shard=2")),
}


DRAWN = (
    "ddp", "zero1-groups", "zero2-accumulated", "zero3-gpt2-short-last", "zero3-8-bits", "hsdp",
    "tp-asynchronous-recomputed", "cp-ring-bf16", "cp-ulysses", "pp-gpt2-tied", "pp-interleaved",
    "pp-zero3-dualpipev", "pp-tp-bf16-short-last", "ddp-experts", "ep-of-4-zero1-recomputed",
    "latent-tp-recomputed", "cp-ring-windows", "tp-full-norms-bf16",
)  # fmt: skip
"""One or two of each kind."""


@pytest.mark.parametrize("name", draw(LAYOUTS, DRAWN))
def test_flows_are_what_ranks_exchange(name: str) -> None:
    layout = LAYOUTS[name]
    config = layout.config()
    degrees = resolve_degrees(config.parallel, layout.ranks)
    ranks = run_ranks(_third_step, layout.ranks, layout, parallel=config.parallel)
    assert _predicted(compute_flows(config, layout.ranks), degrees) == _seen(ranks, degrees)


def _third_step(world: World, layout: Layout) -> dict[Key, list[int]]:
    """Every collective of it; the first two also set up, and in the second ddp makes its buckets anew."""
    config = layout.config()
    engine = engine_after_setup(config, world)
    with Ledger(resolve_degrees(config.parallel, world.size), config.parallel.ep) as ledger:
        engine.forward_backward(share_of(config, world))
        engine.clip(1.0)
        engine.update(0.0)
    return dict(ledger.calls)


Total = dict[Key, tuple[float, float]]
"""Bytes and calls: of messages over all ranks, or of the rank that moves most over these axes."""


def _predicted(found: Sequence[Flow], degrees: Degrees) -> Total:
    totals: defaultdict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for flow in found:
        times = 1.0
        if flow.collective == "send_recv":
            (axis,) = flow.axes
            size = getattr(degrees, axis)
            times = degrees.world / size * (size if flow.ring else size - 1)
        total = totals[flow.axes, flow.collective]
        total[0] += flow.bytes * flow.calls * times
        total[1] += flow.calls * times
    return {key: (round(size, 3), round(calls, 3)) for key, (size, calls) in totals.items()}


def _seen(ranks: Sequence[dict[Key, list[int]]], degrees: Degrees) -> Total:
    totals = {}
    for key in {key for rank in ranks for key in rank}:
        each = [(float(sum(rank.get(key, []))), float(len(rank.get(key, [])))) for rank in ranks]
        if key[1] == "send_recv":
            totals[key] = (sum(size for size, _ in each), sum(calls for _, calls in each))
        elif key[0] == ("ep",):
            totals[key] = _mean_of_largest_stage(each, degrees.pp)
        else:
            totals[key] = each[_busiest(ranks, key[0])]
    return totals


def _mean_of_largest_stage(each: Sequence[tuple[float, float]], pp: int) -> tuple[float, float]:
    """Mean over the ranks of a pp index: what one of them sends depends on the routing. pp is the outermost axis."""
    ranks = len(each) // pp
    stages = [each[at : at + ranks] for at in range(0, len(each), ranks)]
    return max((sum(size for size, _ in stage) / ranks, sum(n for _, n in stage) / ranks) for stage in stages)


def _busiest(ranks: Sequence[dict[Key, list[int]]], axes: tuple[str, ...]) -> int:
    moved = [sum(sum(sizes) for key, sizes in rank.items() if key[0] == axes) for rank in ranks]
    return moved.index(max(moved))
