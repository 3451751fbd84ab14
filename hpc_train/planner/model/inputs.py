"""The inputs of the planner's model, one column a property of a job, and the codes of those that are names.

A new column is filled in from_config.py, for runs of ours, and in calibration/row_columns.py, for published runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.parallel import SCHEDULES as BUILT
from hpc_train.config.train import FLOAT8_RECIPES as PRECISION_RECIPES

Column = NDArray[np.float64]
"""Property of n jobs: [n], or [] if all jobs share one value, since columns broadcast against each other.

Counts are floats with whole values: most arithmetic is multiplication and division, which is faster than with integers.
"""

SCHEDULES = (*BUILT, "zb_2p")
"""Schedules; the code of a schedule is its index here. zb_2p (ZB-H2: Qi et al. 2024, arXiv:2401.10241) occurs only in
published runs, hpc_train has all others."""
RECOMPUTE = ("none", "selective", "full")
"""Modes of recomputation, coded by their index. selective differs between stacks: see layer_work.recompute_shares."""
SELECTIVE, FULL = RECOMPUTE.index("selective"), RECOMPUTE.index("full")
OFFLOAD = ("none", "optimizer", "parameters")
"""Parts of the training state in host memory between uses, coded by their index. optimizer: its state, and the update
runs on the CPU. parameters: also the parameters and their gradients."""
FLOAT8_RECIPES = ("none", *PRECISION_RECIPES)
"""How products in 8 bits are scaled (precision.float8), coded by its index; none also where a source does not say."""
CUDA_GRAPHS = ("none", "layers", "step")
"""Which kernels CUDA graphs launch instead of the host, coded by its index. layers: all of a layer but its routed
experts, whose number of rows is not fixed. step: the whole step, with experts in buffers of fixed size and fused
kernels (Megatron-Core's full_iteration with paged stash). hpc_train's own graphs are for models without experts."""
GRAPHED_STEP = CUDA_GRAPHS.index("step")
STACKS = ("megatron", "deepspeed", "fsdp", "hpc_train")
"""Training software (stack) that runs the job, coded by its index: formulas and some constants differ by stack."""
MEGATRON, DEEPSPEED, FSDP, HPC_TRAIN = range(len(STACKS))
"""Codes of the stacks. Those built on PyTorch's own sharding come last: `stack >= FSDP`."""


def _zero() -> Column:
    return np.zeros(())


def _one() -> Column:
    return np.ones(())


def _two() -> Column:
    return np.full((), 2.0)


@dataclass(frozen=True)
class JobInputs:
    """The columns of jobs that are given; jobs.Jobs computes others from them."""

    # Model: a decoder-only transformer.
    layers: Column
    hidden: Column
    feed_forward: Column
    """Width of the feed-forward layer; if gated, of each of its two branches."""
    heads: Column
    kv_heads: Column
    head_dim: Column
    vocab: Column
    gated: Column
    """1: the feed-forward layer has two branches (SwiGLU)."""
    parallel_block: Column
    """1: attention and feed-forward layer run on the same input, so that tp sums once per layer instead of twice (Wang
    and Komatsuzaki 2021, GPT-J)."""
    tied: Column
    """1: embedding and head share one table."""
    learned_positions: Column
    """Rows of the table of learned positions, which hpc_train's tp does not split; 0: no table, or a published run."""
    dropout: Column
    """1: hpc_train's own layers with dropout. 0 for published runs, whose dropout masks are part of their formulas."""
    sequence: Column
    """Tokens of a sequence."""
    # Batch, in sequences.
    global_batch: Column
    micro_batch: Column
    loss_chunk: Column
    """Tokens whose logits exist at a time; 0: those of a micro-batch."""
    # Degrees; their product is the world size.
    dp_replicate: Column
    dp_shard: Column
    cp: Column
    tp: Column
    pp: Column
    virtual_stages: Column
    """Pipeline stages on each rank."""
    # Technique.
    sequence_parallel: Column
    """1: tp splits positions between its layers."""
    ulysses: Column
    """1: cp exchanges heads for positions around attention (Ulysses); 0: keys and values go round a ring."""
    zero: Column
    """Stage of ZeRO over dp_shard: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    reshard: Column
    """With zero 3: 1 if parameters are freed after forward and gathered again for backward."""
    schedule: Column
    """Index into SCHEDULES."""
    recompute: Column
    """Index into RECOMPUTE."""
    recompute_share: Column
    """Share of the layers that are recomputed, 0 to 1; without meaning if recompute is none."""
    offload: Column
    """Index into OFFLOAD."""
    offload_activations: Column
    """1: activations wait in host memory until backward."""
    # Formats, bytes.
    activation_bytes: Column
    """Bytes per element of activations, and of parameters as they are gathered and used in products."""
    weight_bytes: Column
    """Bytes per parameter kept between steps, without the optimizer's copy; sharded by zero 3."""
    gradient_bytes: Column
    """Bytes per gradient element while it is accumulated; sharded by zero 2 and 3."""
    reduce_bytes: Column
    """Bytes per gradient element in reductions over the data-parallel axes."""
    optimizer_bytes: Column
    """Bytes of optimizer state per parameter: 8 for AdamW in fp32, 12 with an fp32 copy of 16-bit parameters. Sharded
    by zero 1 to 3."""
    logit_bytes: Column
    """Bytes per logit at the peak of the loss: 16-bit logit, fp32 copy and gradient; less if the loss is fused."""
    # Software.
    stack: Column
    """Index into STACKS."""
    fused_attention: Column
    """1: attention scores are never written to memory (FlashAttention: Dao et al. 2022, arXiv:2205.14135)."""
    fused_elementwise: Column
    """1: chains of elementwise operations are fused into one kernel each (torch.compile, hand-fused layers)."""
    overlap_data: Column
    """1: data-parallel communication overlaps computation."""
    overlap_tensor: Column
    """1: communication of tp overlaps matrix products (asynchronous tensor parallelism)."""
    launch_blocking: Column
    """1: the host waits for each kernel (CUDA_LAUNCH_BLOCKING), so ranks meet late in every collective."""
    # Machine.
    gpus_per_node: Column
    nvlink_domain: Column
    """Ranks that are connected by NVLink: those of one node, or of several."""
    peak_flops: Column
    """Dense peak in the number format of linear layers, FLOP/s."""
    peak_flops_attention: Column
    """Dense peak in the number format of attention, FLOP/s: 16 bits also where linear layers use 8 or 4."""
    gemm_ceiling: Column
    """Share of the peak that the fastest matrix product reaches: see accelerators.Accelerator.ceiling."""
    attention_ceiling: Column
    """Share of peak_flops_attention that fused attention reaches."""
    multiprocessors: Column
    """Streaming multiprocessors of a GPU, for wave quantisation; 0: unknown."""
    memory_bytes: Column
    memory_bandwidth: Column
    """Bytes/s."""
    link_bandwidth: Column
    """Bandwidth of one GPU inside its NVLink domain, one direction, bytes/s."""
    pair_bandwidth: Column
    """Bandwidth of the link between two GPUs of a node, one direction, bytes/s; infinite behind a switch."""
    nic_bandwidth: Column
    """Network bandwidth per GPU, one direction, bytes/s: the NICs of a node together, over gpus_per_node."""
    host_bandwidth: Column
    """Bytes/s between a GPU and its host, one direction; 0: unknown."""
    leaf_gpus: Column
    """GPUs below one leaf switch (scalable unit); infinite if unknown or non-blocking."""
    leaf_oversubscription: Column
    group_gpus: Column
    """GPUs in one pod or dragonfly group; infinite if unknown."""
    group_oversubscription: Column
    # Checkpoints.
    checkpoint_every: Column
    """Steps between saves; infinite: never saves."""
    checkpoint_bandwidth: Column
    """Bandwidth at which a rank's state is copied while training waits, bytes/s."""
    # Mixtures of experts; the defaults are those of a dense model.
    experts: Column = field(default_factory=_zero)
    """Routed experts of a layer; 0: a dense model."""
    top_k: Column = field(default_factory=_zero)
    """Routed experts that compute a token."""
    expert_width: Column = field(default_factory=_zero)
    """Width of a routed expert."""
    shared_width: Column = field(default_factory=_zero)
    """Width of all shared experts together."""
    dense_layers: Column = field(default_factory=_zero)
    """Layers at the beginning without experts."""
    ep: Column = field(default_factory=_one)
    """Ranks of dp_shard x cp that share the experts of each layer."""
    imbalance: Column = field(default_factory=_one)
    """Tokens of the rank with the busiest experts, over the mean."""
    sends_once: Column = field(default_factory=_zero)
    """1: a token travels once to each node that has some of its experts (DeepEP), not once to each expert."""
    routed_share: Column = field(default_factory=_one)
    """Share of the groups of experts from which a token's experts come (DeepSeek-AI 2024, section 3.2.2: 4 of 8 groups,
    each of which has a node for itself)."""
    dispatch_bytes: Column = field(default_factory=_two)
    """Bytes per element on the way to the experts; the way back is as wide as activations."""
    overlap_experts: Column = field(default_factory=_zero)
    """1: the all-to-all of one micro-batch runs beside the computation of another (DualPipe: DeepSeek-AI 2024,
    arXiv:2412.19437, section 3.2.1; Megatron-Core's overlap_moe_expert_parallel_comm). hpc_train's own does not."""
    cuda_graphs: Column = field(default_factory=_zero)
    """Index into CUDA_GRAPHS."""
    head_norms: Column = field(default_factory=_zero)
    """1: queries and keys have norms of their own."""
    full_norms: Column = field(default_factory=_zero)
    """1: these norms are over all heads together, whose squares tp ranks add up (OLMo 2)."""
    composite_norms: Column = field(default_factory=_zero)
    """1: norms of several kernels each, which compute in fp32, where nothing fuses them (RMSNorm of published PyTorch
    stacks before PyTorch had a kernel for it). hpc_train's are one kernel."""
    output_norms: Column = field(default_factory=_zero)
    """1: the results of attention and of the feed-forward layer have norms, too (Gemma 2)."""
    # Windows, soft-caps and masks; the defaults are those of plain causal attention.
    seen_share: Column = field(default_factory=_one)
    """Keys that a token sees, over those of causal attention without windows, on average over the layers."""
    masked_share: Column = field(default_factory=_zero)
    """Share of the layers whose kernel gets a window as a tensor of all pairs (transformers): it computes all pairs."""
    stored_scores: Column = field(default_factory=_zero)
    """1: attention of plain operations, which stores the scores of all heads for backward (eager of transformers)."""
    capped_scores: Column = field(default_factory=_zero)
    """1: scores have a soft-cap."""
    capped_logits: Column = field(default_factory=_zero)
    """1: logits have a soft-cap, whose backward needs them a second time."""
    # Multi-head latent attention; head_dim is then the width of a query, positions included.
    query_rank: Column = field(default_factory=_zero)
    """Width of the latent of queries; 0: queries come from the hidden states."""
    key_rank: Column = field(default_factory=_zero)
    """Width of the latent of keys and values; 0: other attention."""
    rotary_width: Column = field(default_factory=_zero)
    """Width of the part of a key that has positions and that all heads share."""
    value_dim: Column = field(default_factory=_zero)
    """Width of a value."""
    float8: Column = field(default_factory=_zero)
    """Index into FLOAT8_RECIPES. Products in 8 bits run at peak_flops; this says what scaling costs besides."""
    float8_gather: Column = field(default_factory=_zero)
    """1: fully_shard gathers the weights of linear layers in 8 bits (precision.float8_gather)."""
    reduce_once: Column = field(default_factory=_zero)
    """1: with zero 3, gradients are reduced after the last micro-batch only, and stay whole until then. Published runs
    with set_requires_gradient_sync(False); hpc_train reduces those of each micro-batch."""
    separate_gathers: Column = field(default_factory=_zero)
    """1: with tp that splits positions, each linear layer gathers its input by itself (ColwiseParallel with
    input_layouts=Shard(1)), and not queries, keys and values together. hpc_train gathers once."""
    host_computes: Column = field(default_factory=_zero)
    """1: the device is a CPU: the host launches nothing ahead of it, and no communication runs beside computation."""
    expert_biases: Column = field(default_factory=_zero)
    """1: Megatron's experts with biases and a clamped activation (GPT-OSS), which kernels of their own compute."""
    # Adapters.
    adapter_weights: Column = field(default_factory=_zero)
    """Trained weights of the adapters (LoRA) of one layer, whose own weights are frozen; 0: all weights are trained."""
    adapter_unsplit: Column = field(default_factory=_zero)
    """Trained weights of these adapters that every rank of tp has whole."""
    adapter_reads: Column = field(default_factory=_zero)
    """Input features of all adapters of a layer, added up."""
    adapter_writes: Column = field(default_factory=_zero)
    """Output features of all adapters of a layer, added up."""
    adapter_stored: Column = field(default_factory=_zero)
    """Activations per token that the adapters of a layer store for backward, where tp splits them."""
    adapter_stored_unsplit: Column = field(default_factory=_zero)
    """Activations per token that they store on every rank of tp."""
    dora_widest: Column = field(default_factory=_zero)
    """Weights of the largest layer with DoRA; 0: LoRA."""
    frozen_bytes: Column = field(default_factory=_zero)
    """Mean bytes of a frozen weight of a layer; 0: those of any weight."""
    four_bit_weights: Column = field(default_factory=_zero)
    """Frozen weights of a layer that are stored in 4 bits."""
    four_bit_widest: Column = field(default_factory=_zero)
    """Weights of the largest linear layer in 4 bits."""
