"""Convert a RunConfig to a job of the planner's model.

The other way to jobs is calibration/row_columns.py, for published runs: a new column is filled in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.config.optim import OptimConfig
from hpc_train.config.parallel import Degrees, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.adapters.nf4_sizes import NF4_BYTES
from hpc_train.models.counts import compute_seen_share
from hpc_train.models.linear_shapes import (
    LinearShape,
    list_adapted_layers,
    list_linear_layers,
    takes_four_bits,
)
from hpc_train.models.shape import (
    CountedTransformer,
    compute_expert_width,
    compute_head_dim,
    count_branches,
    count_kv_heads,
    count_vit_tokens,
    count_window_layers,
    has_latent_attention,
)
from hpc_train.parallel.rules.adapter import explain_missing_base
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.model.accelerators import attention_peak, find_accelerator
from hpc_train.planner.model.inputs import FLOAT8_RECIPES, HPC_TRAIN, OFFLOAD, RECOMPUTE, SCHEDULES, Column
from hpc_train.planner.model.jobs import Jobs, as_column, recomputed_share
from hpc_train.planner.model.layer.adapters import make_adapter_columns
from hpc_train.planner.model.machine_columns import make_machine_columns
from hpc_train.schedules.generate import REQUIREMENTS
from hpc_train.traffic.sharding import uses_fully_shard
from hpc_train.traffic.stages import ELEMENT_BYTES


def jobs_from_config(config: RunConfig, world: int | None = None) -> Jobs:
    """Convert a run to one job. world: number of ranks; None: as the configuration says.

    Raises UserError for a model whose shape is unknown, for degrees that do not multiply to the world, and for products
    in 8 bits on a device without them.
    """
    world = world or count_nodes(config) * count_ranks_per_node(config)
    degrees = resolve_degrees(config.parallel, world)
    shape = make_model_columns(config.model, config.train.sequence_length)
    columns = {
        **shape,
        **_make_technique_columns(config, degrees, shape["layers"]),
        **make_machine_columns(config.cluster, config.precision.name, count_ranks_per_node(config)),
        **_make_kernel_columns(config),
        **_make_float8_columns(config),
        **_make_adapter_columns(config),
        **_make_format_columns(config, degrees),
        "checkpoint_every": config.checkpoint.every or math.inf,
    }
    jobs = Jobs(**{name: as_column(value) for name, value in columns.items()})
    if jobs.has_four_bits:
        jobs = replace(jobs, frozen_bytes=_compute_frozen_bytes(jobs))
    return replace(jobs, optimizer_bytes=jobs.weight_bytes * _count_optimizer_states(config.optim, jobs))


def _make_kernel_columns(config: RunConfig) -> dict[str, float]:
    """Return the ceiling of FlashAttention-2 if the run asks for it: torch's own choice is cuDNN's kernels."""
    listed_gpu = find_accelerator(config.cluster.gpu.name or "")
    if listed_gpu is None or getattr(config.model, "attention", "auto") != "flash":
        return {}
    return {"attention_ceiling": attention_peak(listed_gpu, new_kernels=False)}


def _make_float8_columns(config: RunConfig) -> dict[str, float]:
    """Return the columns of products in 8 bits. Raises UserError if the device is known and has none."""
    recipe, gpu = config.precision.float8, config.cluster.gpu
    if recipe == "none":
        return {}
    listed_gpu = find_accelerator(gpu.name or "")
    peak = gpu.peak_tflops.get("fp8", 0.0) * 1e12 or (listed_gpu.flops.get(8, 0.0) if listed_gpu else 0.0)
    if not peak:
        raise UserError(
            f"precision.float8={recipe}: cluster={config.cluster.name} has no products in 8 bits"
            f"{f' ({gpu.name})' if gpu.name else ''}; use precision=bf16, or give cluster.gpu.peak_tflops.fp8"
        )
    if recipe.startswith("mxfp8") and listed_gpu is not None and not listed_gpu.multiplies_blocks:
        raise UserError(
            f"precision.float8={recipe}: cluster={config.cluster.name} ({gpu.name}) has no such products; use "
            "precision=fp8, or a cluster of B200 or B300"
        )
    gather = float(config.precision.float8_gather)
    return {"peak_flops": peak, "float8": FLOAT8_RECIPES.index(recipe), "float8_gather": gather}


def _make_adapter_columns(config: RunConfig) -> dict[str, float]:
    """Return the columns of adapters and frozen weights; {} without them.

    Raises UserError for targets that no layer has, and for a base in 4 bits of a model that no file has.
    """
    adapter, model = config.adapter, config.model
    if adapter.kind == "none":
        return {}
    assert isinstance(model, (TransformerConfig, VisionTransformerConfig))
    layers = list_linear_layers(model)
    targets = list_adapted_layers(model, adapter.targets)
    columns = make_adapter_columns(targets, adapter.rank, model.layers, dora=adapter.kind == "dora")
    if adapter.base == "bf16":
        columns["frozen_bytes"] = ELEMENT_BYTES["bf16"]
    if adapter.base == "nf4":
        if not isinstance(model, CountedTransformer):
            raise UserError(explain_missing_base(model))
        columns |= _make_four_bit_columns(list(layers.values()), model)
    return columns


def _make_four_bit_columns(layers: Sequence[LinearShape], model: CountedTransformer) -> dict[str, float]:
    """Return the columns of weights in 4 bits; all others are as the precision stores them."""
    narrow = [layer.weights for layer in layers if takes_four_bits(layer)]
    numbers = sum(narrow) / model.layers
    return {"four_bit_weights": numbers, "four_bit_widest": max(narrow, default=0)}


def _compute_frozen_bytes(jobs: Jobs) -> Column:
    """Return the mean bytes of a frozen weight of a layer, some of which are in 4 bits."""
    share = jobs.four_bit_weights / jobs.all_layer_parameters
    return share * NF4_BYTES + (1 - share) * jobs.weight_bytes


def _count_optimizer_states(optim: OptimConfig, jobs: Jobs) -> Column:
    """Return the elements of optimizer state per parameter, on average over the model; 2 for AdamW and users' own."""
    in_layers = jobs.layers * jobs.all_layer_parameters / jobs.parameters
    states: Column = as_column(2.0)
    if optim.state == "bf16":
        states = as_column(1.0)
    if optim.state == "8bit":
        share = _compute_share_in_8_bits(jobs, optim.block_size)
        states = 2 * (1 - share + share * (1 + 4 / optim.block_size) / jobs.weight_bytes)
    if optim.name == "muon":  # a momentum of matrices in layers, AdamW's two moments of the rest
        states = 2 - in_layers
    if optim.name == "sgd":
        states = as_column(float(optim.sgd.momentum > 0))
    if optim.name == "adafactor":  # a row and a column of each matrix
        states = in_layers * 2 / jobs.hidden + (1 - in_layers) * (1 / jobs.hidden + 1 / jobs.vocab)
    return states + (optim.ema.decay is not None)


def _compute_share_in_8_bits(jobs: Jobs, block_size: int) -> Column:
    """Return the share of the parameters in matrices whose rows are multiples of a block (optim.state=8bit)."""
    attended = jobs.heads * np.where(jobs.key_rank > 0, jobs.value_dim, jobs.head_dim)
    dense, sparse = jobs.layers * (1 - jobs.sparse_share), jobs.layers * jobs.sparse_share
    by_row = (  # width of a row, rows
        (attended, jobs.layers * jobs.hidden),
        (jobs.feed_forward, dense * jobs.hidden),
        (jobs.expert_width, sparse * 2 * jobs.experts * jobs.hidden),
    )
    others: Column = jobs.parameters
    quantized: Column = as_column(0.0)
    for width, rows in by_row:
        others = others - width * rows
        quantized = quantized + np.where(width % block_size == 0, width * rows, 0.0)
    return (quantized + np.where(jobs.hidden % block_size == 0, others, 0.0)) / jobs.parameters


def make_model_columns(model: ModelConfig, sequence: int) -> dict[str, float]:
    """Return the columns of a model's shape. A vision transformer counts as a transformer whose tokens are patches."""
    if isinstance(model, TransformerConfig):
        return {
            "layers": model.layers,
            "hidden": model.hidden,
            "feed_forward": model.feed_forward,
            "heads": model.heads,
            "kv_heads": count_kv_heads(model),
            "head_dim": compute_head_dim(model),
            "vocab": model.vocab_size,
            "gated": count_branches(model) == 2,
            "parallel_block": isinstance(model, CountedTransformer) and model.parallel_block,
            "tied": model.tied_embeddings,
            "learned_positions": model.max_positions if model.positions == "learned" else 0,
            "dropout": model.dropout > 0,
            "head_norms": model.query_key_norm != "none",
            "full_norms": model.query_key_norm == "full",
            "output_norms": model.pre_norms and model.post_norms,
            "capped_logits": model.logit_softcap is not None,
            "sequence": sequence,
            **_make_attention_columns(model, sequence),
            **_make_expert_columns(model),
            **_make_latent_columns(model),
        }
    if isinstance(model, VisionTransformerConfig):
        width = model.hidden // model.heads
        shape = {"heads": model.heads, "kv_heads": model.heads, "head_dim": width, "vocab": model.classes}
        plain = {"gated": 0, "parallel_block": 0, "tied": 0, "sequence": count_vit_tokens(model)}
        plain |= {"learned_positions": count_vit_tokens(model), "dropout": model.dropout > 0}
        sizes = {"layers": model.layers, "hidden": model.hidden, "feed_forward": model.feed_forward}
        return {**sizes, **shape, **plain}
    raise UserError(
        f"model.name={model.name}: the shape of a custom model, or of one of transformers, is not known, so it cannot "
        "be planned; plan a transformer of its size, such as model=llama_1b"
    )


def _make_expert_columns(model: TransformerConfig) -> dict[str, float]:
    experts = model.experts
    if not experts.count:
        return {}
    width = compute_expert_width(model)
    return {
        "experts": experts.count,
        "top_k": experts.top_k,
        "expert_width": width,
        "shared_width": experts.shared * width,
        "dense_layers": experts.first_dense,
    }


def _make_latent_columns(model: TransformerConfig) -> dict[str, float]:
    latent = model.latent
    if not has_latent_attention(model):
        return {}
    return {
        "query_rank": latent.q_rank or 0,
        "key_rank": latent.kv_rank,
        "rotary_width": latent.rope_head_dim,
        "value_dim": latent.value_head_dim,
    }


def _make_attention_columns(model: TransformerConfig, sequence: int) -> dict[str, float]:
    """Return the columns of windows and of scores that are not in a fused kernel."""
    masked = 0.0
    if isinstance(model, CountedTransformer) and model.masks_windows and (model.sliding_window or math.inf) <= sequence:
        masked = count_window_layers(model) / model.layers
    return {
        "seen_share": compute_seen_share(model, sequence),
        "masked_share": masked,
        "stored_scores": stores_scores(model),
        "capped_scores": model.attention_softcap is not None,
    }


def stores_scores(model: ModelConfig) -> bool:
    """Whether attention is computed by plain operations, whose scores are stored for backward."""
    return isinstance(model, CountedTransformer) and model.stores_scores


def splits_positions(model: ModelConfig) -> bool:
    """Whether tp splits positions between layers; models of transformers have them whole on each rank."""
    return isinstance(model, TransformerConfig) and not isinstance(model, CountedTransformer)


def _make_technique_columns(config: RunConfig, degrees: Degrees, layers: float) -> dict[str, float]:
    parallel, train = config.parallel, config.train
    pipeline, recompute = parallel.pipeline, parallel.recompute
    needs = REQUIREMENTS.get(pipeline.schedule)
    virtual = (pipeline.virtual_stages or (needs.virtual_stages if needs else 1)) if degrees.pp > 1 else 1
    offloaded = parallel.offload.parameters != "none", parallel.offload.optimizer != "none"
    offload = "parameters" if offloaded[0] else "optimizer" if offloaded[1] else "none"
    return {
        "global_batch": train.global_batch,
        "micro_batch": min(train.micro_batch, train.global_batch / degrees.data_parallel),
        "loss_chunk": train.loss_chunk,
        "dp_replicate": degrees.dp_replicate,
        "dp_shard": degrees.dp_shard,
        "cp": degrees.cp,
        "tp": degrees.tp,
        "pp": degrees.pp,
        "ep": parallel.ep,
        "imbalance": config.plan.expert_imbalance,
        "virtual_stages": virtual,
        "sequence_parallel": parallel.tensor.sequence and splits_positions(config.model),
        "ulysses": parallel.context.method == "ulysses",
        "zero": _get_zero_code(config, degrees),
        "reshard": parallel.reshard_after_forward,
        "schedule": SCHEDULES.index(pipeline.schedule if needs else "1f1b"),
        "recompute": RECOMPUTE.index(recompute.mode),
        "recompute_share": recomputed_share(layers, degrees.pp * virtual, recompute.every),
        "offload": OFFLOAD.index(offload),
        "offload_activations": recompute.offload,
        "overlap_tensor": parallel.tensor.asynchronous,
    }


def _get_zero_code(config: RunConfig, degrees: Degrees) -> int:
    """Return the ZeRO stage. ddp with tp or pp runs as fully_shard and then shards over cp, as zero1 does."""
    if config.parallel.strategy == "ddp":
        return int(uses_fully_shard(config, degrees))
    return int(config.parallel.strategy.removeprefix("zero"))


def _make_format_columns(config: RunConfig, degrees: Degrees) -> dict[str, float]:
    """Return the bytes per element: hpc_train keeps parameters, gradients and moments in fp32 (fp64: in fp64)."""
    weight_bytes = 8 if config.precision.name == "fp64" else 4
    is_unsharded = not uses_fully_shard(config, degrees)
    return {
        "activation_bytes": ELEMENT_BYTES[config.precision.name],
        "weight_bytes": weight_bytes,
        "gradient_bytes": weight_bytes,
        "reduce_bytes": weight_bytes if is_unsharded else ELEMENT_BYTES[config.precision.reduce],
        "optimizer_bytes": 2 * weight_bytes,
        "logit_bytes": ELEMENT_BYTES[config.precision.name] + 2 * weight_bytes,
        "stack": HPC_TRAIN,
        # With dropout, plain_attention computes scores and masks itself instead of calling a fused kernel.
        "fused_attention": getattr(config.model, "dropout", 0.0) == 0 and not stores_scores(config.model),
        "fused_elementwise": config.parallel.compile,
        "overlap_data": 1,
        "launch_blocking": 0,
    }
