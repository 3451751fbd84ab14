"""What `plan` says a rank of ours needs, against what a rehearsal counts of the real model under the real passes."""

from __future__ import annotations

import pytest
from planner_runs import run

from hpc_train.planner.rehearsal.run import rehearse

SMALL = (
    "cluster=dgx_h100", "precision=bf16", "cluster.nodes=1", "train.sequence_length=512", "train.micro_batch=2",
    "train.global_batch=32", "model=llama_125m", "model.layers=2", "model.hidden=1024", "model.heads=16",
    "model.feed_forward=4096", "model.vocab_size=1024",
)  # fmt: skip
LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "ddp, one micro-batch": ("parallel.strategy=ddp", "train.global_batch=16"),
    "ddp, fp32, gpt": ("model=gpt3_1_3b", "parallel.strategy=ddp", "precision=fp32"),
    "zero3": ("parallel.strategy=zero3", "parallel.dp_shard=8"),
    "zero1": ("parallel.strategy=zero1", "parallel.dp_shard=8"),
    "zero3, every third": (
        "model.layers=4", "parallel.strategy=zero3", "parallel.dp_shard=8", "parallel.recompute.mode=full",
        "parallel.recompute.every=3",
    ),
    "tp8, positions whole": ("model.layers=4", "parallel.tp=8", "parallel.tensor.sequence=false"),
    "tp8, selective": ("parallel.tp=8", "parallel.recompute.mode=selective"),
    "tp4, pp2": ("parallel.tp=4", "parallel.pp=2"),
    "cp2, tp2, grouped keys": ("parallel.cp=2", "parallel.tp=2", "model.kv_heads=4"),
    "cp2, tp2, heads exchanged": (
        "parallel.cp=2", "parallel.tp=2", "model.kv_heads=4", "parallel.context.method=ulysses",
    ),
    "gpt, zero3": ("model=gpt3_1_3b", "parallel.strategy=zero3", "parallel.dp_shard=8"),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_memory_is_what_is_counted(layout: str) -> None:
    """Without what an allocator and a driver add."""
    own = {it.partition("=")[0]: it for it in (*SMALL, *LAYOUTS[layout])}
    found = rehearse(run(*own.values()), 8, "0", 1)
    counted = {built.rank: built.counted.peak for built in found.ranks if built.counted.peak is not None}
    assert counted
    for rank, peak in counted.items():
        assert sum(found.planned[rank].values()) == pytest.approx(peak, rel=0.1), found.ranks[0].counted
