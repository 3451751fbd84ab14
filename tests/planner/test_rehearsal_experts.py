"""Rehearsals of models of experts: scores have no values there, and tokens are routed evenly."""

from __future__ import annotations

import pytest
from drawn import draw
from planner_runs import run

from hpc_train.planner.rehearsal.rehearse import rehearse_run

MODEL = (
    "cluster=dgx_h100", "cluster.nodes=1", "train.sequence_length=512", "train.micro_batch=1", "train.global_batch=32",
    "model=mixtral_8x7b", "model.layers=2", "model.hidden=256", "model.heads=8", "model.kv_heads=4",
    "model.feed_forward=1024", "model.vocab_size=1024", "model.experts.balance_loss=0", "parallel.strategy=zero3",
)  # fmt: skip
LATENT = (
    "model.kv_heads=null", "model.latent.kv_rank=64", "model.latent.q_rank=96", "model.latent.nope_head_dim=32",
    "model.latent.rope_head_dim=16", "model.latent.value_head_dim=32",
)  # fmt: skip
EXPERTS = 8 * 3 * 256 * 1024
"""Parameters of the experts of one layer."""


@pytest.mark.parametrize("precision", draw(["bf16", "fp32"], ["bf16"]))
def test_a_step_with_experts_is_counted(precision: str) -> None:
    config = run(*MODEL, f"precision={precision}", "parallel.ep=4")
    found = rehearse_run(config, 8, "0", 1)
    (rank,) = found.ranks
    assert rank.unknown is None
    assert rank.counted.parameters == found.closed_form[0]["parameters"]
    assert rank.counted.peak is not None
    assert rank.counted.peak > rank.counted.parameters + rank.counted.optimizer


@pytest.mark.parametrize("layout", draw(["parallel.ep=4", "parallel.ep=8"], ["parallel.ep=8"]))
def test_experts_are_split_over_more_ranks_than_there_are(layout: str) -> None:
    """Eight experts over 64 ranks: what ep leaves is cut along the hidden dimension."""
    nodes = ("cluster.nodes=8", "train.global_batch=64")
    found = rehearse_run(run(*MODEL, *nodes, "precision=bf16", layout), 64, "0", 1)
    assert found.ranks[0].counted.parameters == found.closed_form[0]["parameters"]


def test_ranks_of_experts_gather_only_their_own() -> None:
    """ep=4: a quarter of a layer's experts, in 16 bits, and no whole gradients of the others."""
    whole, part = (rehearse_run(run(*MODEL, "precision=bf16", f"parallel.ep={ep}"), 8, "0", 1) for ep in (1, 4))
    (one,), (other,) = whole.ranks, part.ranks
    assert one.counted.gathered is not None
    assert other.counted.gathered is not None
    assert one.counted.gathered - other.counted.gathered == pytest.approx(2 * EXPERTS * 3 / 4, rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.ep=4", "parallel.cp=2", "parallel.pp=2"),
        ("parallel.ep=2", "parallel.tp=2", "parallel.dp_replicate=2", *LATENT),
    ],
    ids=["cp-pp", "tp-hsdp-latent"],
)
def test_experts_are_held_once(layout: tuple[str, ...]) -> None:
    found = rehearse_run(run(*MODEL, "precision=bf16", *layout), 8, "0,5", 1)
    assert found.coverage.problems == ()
    assert [rank.unknown for rank in found.ranks] == [None, None]
