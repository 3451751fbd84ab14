"""What `plan` says a rank of ours needs, against what a rehearsal counts of the real model under the real passes."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from drawn import draw, draw_every
from planner_runs import run

from hpc_train.config.parallel import resolve_degrees
from hpc_train.errors import UserError
from hpc_train.models.attention import plain_attention
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.model.layer import activations
from hpc_train.planner.rehearsal.one_rank import rehearse_rank
from hpc_train.planner.rehearsal.rehearse import rehearse_run

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


DROPOUT = {
    "no pp": ("parallel.strategy=zero3",),
    "no pp, selective": ("parallel.strategy=zero3", "parallel.recompute.mode=selective"),
    "no pp, full": ("parallel.strategy=zero3", "parallel.recompute.mode=full"),
    "cp2": ("parallel.strategy=zero3", "parallel.cp=2"),
    "cp2, heads exchanged": ("parallel.strategy=zero3", "parallel.cp=2", "parallel.context.method=ulysses"),
    "tp2": ("parallel.strategy=zero2", "parallel.tp=2"),
    "1f1b": ("parallel.strategy=zero1", "parallel.pp=2", "parallel.pipeline.schedule=1f1b"),
    "zbv": ("parallel.strategy=zero3", "parallel.pp=2", "parallel.pipeline.schedule=zbv"),
    "gpt, four sequences": (
        "model=gpt3_1_3b", "model.layers=4", "model.hidden=1024", "model.heads=8", "model.feed_forward=4096",
        "model.vocab_size=16384", "parallel.strategy=zero3", "train.micro_batch=4",
    ),
    "scores in several blocks": (
        "model.layers=4", "train.micro_batch=4", "train.sequence_length=2048", "parallel.strategy=zero3",
        "parallel.tp=2",
    ),
}  # fmt: skip
"""Overrides of MATRIX_MODEL, with dropout."""
_GPT = (
    "model=gpt3_1_3b", "model.layers=8", "model.hidden=1024", "model.heads=8", "model.feed_forward=4096",
    "model.vocab_size=16384",
)  # fmt: skip
_CHUNKS = ("model.layers=4", "model.vocab_size=65536", "train.micro_batch=2", "train.loss_chunk=128")
_NORMS = ("model.pre_norms=false", "model.post_norms=true", "model.query_key_norm=full")
SPECIAL = {
    "tp8 over 4 heads of keys": ("parallel.strategy=ddp", "parallel.tp=8"),
    "tp8, learned positions": (*_GPT, "parallel.strategy=ddp", "parallel.tp=8"),
    "asynchronous tp2": (
        *_GPT, "parallel.strategy=zero3", "parallel.tp=2", "parallel.tensor.asynchronous=true", "train.micro_batch=4",
    ),
    "heads exchanged": ("parallel.strategy=zero3", "parallel.cp=2", "parallel.context.method=ulysses"),
    "one micro-batch": ("parallel.strategy=zero2", "parallel.recompute.mode=full", "train.global_batch=8"),
    "more weights than activations": (
        "model.layers=4", "model.hidden=2048", "model.feed_forward=8192", "model.vocab_size=2048",
        "parallel.strategy=zero3", "parallel.recompute.mode=full", "train.sequence_length=256",
    ),
    "one block a stage": (
        "model.layers=4", "model.vocab_size=2048", "parallel.strategy=zero3", "parallel.pp=2",
        "parallel.pipeline.schedule=interleaved_1f1b",
    ),
    "few micro-batches": (
        "parallel.strategy=zero1", "parallel.pp=2", "parallel.pipeline.schedule=interleaved_zero_bubble",
        "train.global_batch=8",
    ),
    "tied, a table larger than the blocks": (
        "model.layers=6", "model.vocab_size=32768", "model.tied_embeddings=true", "parallel.strategy=zero3",
        "parallel.pp=2", "parallel.cp=2",
    ),
    "hsdp with parameters on the host": (
        "parallel.strategy=zero3", "parallel.dp_replicate=2", "parallel.recompute.mode=full",
        "parallel.offload.parameters=cpu",
    ),
    "norms over all heads, tp2": (*_NORMS, "parallel.strategy=zero3", "parallel.tp=2"),
    "norms over all heads, tp8, selective": (
        *_NORMS, "parallel.strategy=ddp", "parallel.tp=8", "parallel.recompute.mode=selective",
    ),
    "loss in chunks, ddp": (*_CHUNKS, "parallel.strategy=ddp"),
    "loss in chunks, 1f1b": (*_CHUNKS, "parallel.strategy=zero1", "parallel.pp=2", "parallel.pipeline.schedule=1f1b"),
    "loss in chunks, tp2": (*_CHUNKS, "parallel.strategy=zero3", "parallel.tp=2"),
}  # fmt: skip
"""Overrides of MATRIX_MODEL in which something else is the peak."""
MATRIX_MODEL = (
    "cluster=dgx_h100", "precision=bf16", "cluster.nodes=1", "train.sequence_length=1024", "train.micro_batch=1",
    "train.global_batch=32", "model=llama_1b", "model.layers=8", "model.hidden=1024", "model.heads=8",
    "model.kv_heads=4", "model.feed_forward=4096", "model.vocab_size=16384",
)  # fmt: skip
"""8 ranks; with a pipeline, two of it and two stages on each."""
STRATEGIES = {
    "zero1": ("parallel.strategy=zero1",),
    "zero2": ("parallel.strategy=zero2",),
    "zero3": ("parallel.strategy=zero3",),
    "zero3, kept": ("parallel.strategy=zero3", "parallel.reshard_after_forward=false"),
    "hsdp": ("parallel.strategy=zero3", "parallel.dp_replicate=2"),
}
PIPELINES = {
    "no pp": (),
    **{
        name: ("parallel.pp=2", f"parallel.pipeline.schedule={name}")
        for name in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
    },
}
RECOMPUTE = {"": (), "full": ("parallel.recompute.mode=full",), "selective": ("parallel.recompute.mode=selective",)}
OFFLOADS = {
    "": (),
    "optimizer": ("parallel.offload.optimizer=cpu",),
    "parameters": ("parallel.offload.parameters=cpu",),
}
MATRIX = {
    ", ".join(filter(None, (strategy, pipeline, again, f"offload {place}" if place else ""))): (
        *STRATEGIES[strategy], *PIPELINES[pipeline], *RECOMPUTE[again], *OFFLOADS[place],
    )
    for strategy, pipeline, again, place in product(STRATEGIES, PIPELINES, RECOMPUTE, OFFLOADS)
}  # fmt: skip
"""Everything together that the rules let be; recomputation does not go with split backwards."""
DRAWN = (
    "zero1, 1f1b", "zero2, interleaved_1f1b", "zero3, no pp, full", "zero3, 1f1b", "zero3, zbv",
    "zero3, kept, interleaved_zero_bubble", "zero2, dualpipev", "hsdp, 1f1b, offload parameters",
)  # fmt: skip
TOLERANCE = 0.05


def _legal(layout: str) -> bool:
    try:
        check_support(run(*_overrides(layout)), 8)
    except UserError:
        return False
    return True


def _overrides(layout: str) -> tuple[str, ...]:
    return _with_model(MATRIX[layout])


def _with_model(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({it.partition("=")[0]: it for it in (*MATRIX_MODEL, *overrides)}.values())


def _compare(layout: str) -> dict[int, tuple[float, float]]:
    return _compare_run(_overrides(layout))


@cache
def _compare_run(overrides: tuple[str, ...]) -> dict[int, tuple[float, float]]:
    """Return (planned bytes, counted bytes) of the first and the last rank of the pipeline."""
    found = rehearse_run(run(*overrides), 8, "0,4" if "parallel.pp=2" in overrides else "0", 1)
    counted = {built.rank: built.counted.peak for built in found.ranks if built.counted.peak is not None}
    assert len(counted) == len(found.ranks)
    return {rank: (sum(found.planned[rank].values()), float(peak)) for rank, peak in counted.items()}


@pytest.mark.parametrize("layout", draw_every(DRAWN, 5))
def test_what_is_whole_between_uses_is_planned(layout: str) -> None:
    for planned, counted in _compare(layout).values():
        assert planned == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("layout", draw_every(SPECIAL, 5))
def test_what_is_most_in_other_layouts_is_planned(layout: str) -> None:
    for planned, counted in _compare_run(_with_model(SPECIAL[layout])).values():
        assert planned == pytest.approx(counted, rel=TOLERANCE)


@pytest.mark.parametrize("layout", draw(DROPOUT, ["no pp"]))
def test_masks_and_scores_of_dropout_are_planned(layout: str) -> None:
    for planned, counted in _compare_run(_with_model((*DROPOUT[layout], "model.dropout=0.1"))).values():
        assert planned == pytest.approx(counted, rel=TOLERANCE)


def test_blocks_of_scores_are_as_large_as_the_models() -> None:
    assert (activations.MAX_SCORES, activations.MIN_QUERIES) == (
        plain_attention.MAX_SCORES,
        plain_attention.MIN_QUERIES,
    )


@pytest.mark.long
@pytest.mark.parametrize("layout", [it for it in MATRIX if it not in DRAWN])
def test_every_way_to_shard_is_planned(layout: str) -> None:
    if not _legal(layout):  # asked here, as composing them all would make every collection of tests wait 20 s
        pytest.skip("the rules refuse it")
    for rank, (planned, counted) in _compare(layout).items():
        print(f"| {layout} | {rank} | {counted / 2**20:.0f} | {planned / 2**20:.0f} | {planned / counted - 1:+.1%} |")
        assert planned == pytest.approx(counted, rel=TOLERANCE)


def test_zero3_shards_parameters_and_gradients_in_a_pipeline() -> None:
    """Of a model of half a million parameters a rank, whole gradients alone would be as much as all shards together."""
    found = {strategy: _compare(f"{strategy}, 1f1b")[0][1] for strategy in ("zero1", "zero2", "zero3")}
    whole = 4.0 * weights_of_first_rank()
    assert found["zero1"] - found["zero2"] > 0.5 * whole, "gradients"
    assert found["zero2"] - found["zero3"] > 0.1 * whole, "gathered parameters, in 16 bits"


def weights_of_first_rank() -> float:
    """Parameters of half the layers and of the embedding."""
    return 4 * (2 * 1024 * 128 * 12 + 3 * 1024 * 4096) + 16384 * 1024


def test_memory_does_not_grow_with_the_micro_batches_of_a_step() -> None:
    """What a stage receives, and its gradient, is there while it is used."""
    config = run(*_overrides("zero3, 1f1b"))
    degrees = resolve_degrees(config.parallel, 8)
    few, many = (rehearse_rank(config, degrees, 4, count).counted.peak for count in (4, 8))
    assert few is not None
    assert many is not None
    assert 0 <= many - few <= 1 << 18


@pytest.mark.parametrize("layout", draw_every(LAYOUTS, 3))
def test_planned_memory_is_what_is_counted(layout: str) -> None:
    """Without what an allocator and a driver add."""
    own = {it.partition("=")[0]: it for it in (*SMALL, *LAYOUTS[layout])}
    found = rehearse_run(run(*own.values()), 8, "0", 1)
    counted = {built.rank: built.counted.peak for built in found.ranks if built.counted.peak is not None}
    assert counted
    for rank, peak in counted.items():
        assert sum(found.planned[rank].values()) == pytest.approx(peak, rel=0.1), found.ranks[0].counted
