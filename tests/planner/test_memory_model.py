"""Memory of a rank against the field's closed forms, and the answer whether it fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_runs import run

from hpc_train.planner.constants import Constants, default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.inputs import RECOMPUTE, STACKS
from hpc_train.planner.model.jobs import Jobs, as_column, replace_columns
from hpc_train.planner.model.layer.activations import layer_activations
from hpc_train.planner.model.memory import MAYBE, NO, YES, Memory, estimate_memory

PLAIN = Constants(activations=1.0, fragmentation=0.0, context=0.0)


def gpt(**columns: object) -> Jobs:
    """A GPT as Megatron-LM trains it: 16-bit weights and gradients, fp32 copies, plain attention, dropout."""
    base = jobs_from_config(run("model=gpt3_22b", "precision=bf16", "launch.ranks=8", "train.sequence_length=2048"))
    megatron = {"stack": STACKS.index("megatron"), "weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12}
    plain = {"fused_attention": 0, "sequence_parallel": 0, "tp": 8, "dp_replicate": 1, "micro_batch": 4, "zero": 0}
    return replace_columns(base, **{**megatron, **plain, **columns})


@pytest.mark.parametrize(
    ("mode", "sequence", "form"),
    [
        ("none", 0, lambda s, a, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        ("none", 1, lambda s, a, h, t: (34 + 5 * a * s / h) / t),
        ("selective", 1, lambda s, a, h, t: 34 / t),
        ("full", 0, lambda s, a, h, t: 2),
    ],
)
def test_activations_of_a_layer(mode: str, sequence: int, form: object) -> None:
    """Korthikanti et al. 2022, arXiv:2205.05198, table 2."""
    jobs = gpt(sequence_parallel=sequence, recompute=RECOMPUTE.index(mode))
    s, b, a, h, t = (float(getattr(jobs, name)) for name in ("sequence", "micro_batch", "heads", "hidden", "tp"))
    kept = layer_activations(jobs, PLAIN, jobs.micro_batch * jobs.sequence).stored
    assert float(kept) == pytest.approx(s * b * h * form(s, a, h, t))  # type: ignore[operator]


def states(told: Memory) -> float:
    return float((told.parameters + told.gradients + told.optimizer)[0])


@pytest.mark.parametrize(("zero", "each"), [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_states_of_the_zero_stages(zero: int, each: float) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, figure 1: 16 bytes per parameter, and what eight ranks share."""
    jobs = gpt(tp=1, dp_replicate=1, dp_shard=8, zero=zero)
    assert states(estimate_memory(jobs, PLAIN)) == pytest.approx(float(jobs.parameters) * each, rel=1e-6)


def test_stages_of_a_pipeline() -> None:
    jobs = gpt(pp=4, tp=2, global_batch=64, micro_batch=1, recompute=2, schedule=2)
    first, middle, last = estimate_memory(jobs, PLAIN).stages
    assert first > middle > 0
    told = estimate_memory(jobs, PLAIN)
    assert told.logits[0] == told.logits[1] == 0 < told.logits[2]
    assert told.activations[0] > told.activations[1] > told.activations[2]
    assert told.total == max(first, middle, last)
    gpipe = estimate_memory(replace_columns(jobs, schedule=1), PLAIN)
    assert gpipe.activations[0] > 8 * told.activations[0]


def test_offload_and_context_shards_save() -> None:
    base = gpt(zero=3, tp=1, dp_shard=8)
    all_ = float(estimate_memory(base, PLAIN).total)
    optimizer, parameters = (
        float(estimate_memory(replace_columns(base, offload=code), PLAIN).total) for code in (1, 2)
    )
    assert parameters < optimizer < all_
    assert float(estimate_memory(replace_columns(base, cp=2, dp_shard=4), PLAIN).total) < all_


def test_whether_it_fits() -> None:
    needed = float(estimate_memory(gpt(), PLAIN).total)
    constants = replace(PLAIN, headroom=0.05, memory_margin=0.1)
    jobs = replace_columns(gpt(), memory_bytes=[needed * 0.8, needed * 0.95, needed * 1.02, needed * 1.1])
    assert estimate_memory(jobs, constants).fits.tolist() == [NO, MAYBE, MAYBE, YES]


def test_a_vocabulary_fills_the_last_stage() -> None:
    small, large = (
        estimate_memory(gpt(pp=4, tp=2, vocab=vocab, recompute=2), default_constants()) for vocab in (50_304, 1_000_000)
    )
    assert int(np.argmax(large.stages)) == 2
    assert float(large.total) > float(small.total)


def test_the_parts_are_all_of_it() -> None:
    told = estimate_memory(gpt(pp=4, tp=2), default_constants())
    held = told.allocated + told.fragmentation + told.context
    assert np.allclose(held, told.stages)
    assert (told.reserved < told.stages).all()
    assert told.stages.shape == (3, *np.shape(as_column(0)))
